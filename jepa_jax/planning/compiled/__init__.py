"""What a compiled program says: its kernels, and the buffers at its peak."""

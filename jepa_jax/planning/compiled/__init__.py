"""Compiles for GPUs that are not there, and reads the buffers at the peak of a program."""

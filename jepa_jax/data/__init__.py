"""Data sets: readers, the pipeline that puts batches on devices, and augmentation."""

"""Facts of this machine that are known without importing JAX."""

import pathlib

DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one: WSL


def has_nvidia_driver() -> bool:
    return any(pathlib.Path(path).exists() for path in DRIVER_FILES)

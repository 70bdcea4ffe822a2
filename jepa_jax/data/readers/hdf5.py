"""HDF5 files, with the optional package h5py."""

import pathlib
from typing import Any

from jepa_jax.base.errors import UserError


def open_hdf5(file: pathlib.Path) -> Any:
    """Opens an HDF5 file for reading."""
    try:
        import h5py
    except ImportError:
        raise UserError(f"{file}: needs h5py; pip install 'jepa_jax[hdf5]'") from None
    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise UserError(f"{file}: cannot be read as HDF5 ({error}); write it again") from error

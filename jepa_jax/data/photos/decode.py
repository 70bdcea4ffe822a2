"""Turns the bytes of an image file into pixels, at a fraction of the size where that suffices.

16-bit files keep their upper 8 bits, CMYK and palettes become RGB, grey is repeated, a rotation that EXIF asks for is
carried out, and what is transparent becomes white (unless `data.channels` is 4). The first frame of several is used.
Arrays of any number of channels come from .npy files and, with the package tifffile, from TIFF files of many bands.
"""

import functools
import io
import itertools
import math
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps

from jepa_jax.data.readers.bounded import check_values

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
MODE_BYTES = 4  # that Pillow keeps per pixel, at most
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by channels
# Of what the files hold, whatever their names say; Pillow would run a program for some others.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
JPEG_END = b"\xff\xd9"
NPY_MAGIC = b"\x93NUMPY"
TIFF_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
ORIENTATION = 0x0112  # tag of EXIF
SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange width and height
WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # of more than 8 bits
SHRINKS = (8, 4, 2)  # fractions at which JPEG can be decoded


class Photo:
    """One image; the file is parsed at once and decoded by `pixels`.

    Attributes:
      size: height and width, upright.
    """

    def __init__(self, content: bytes, channels: int):
        self._channels = channels
        self._stored: Any = None
        self._array: np.ndarray | None = None
        if content.startswith(NPY_MAGIC):
            self._array = as_levels(read_array(io.BytesIO(content), len(content)), channels)
        elif channels not in MODES and content.startswith(TIFF_MAGICS):
            self._array = as_levels(read_tiff(content, channels), channels)
        if self._array is not None:
            self.size = self._array.shape[:2]
            return
        if channels not in MODES:
            raise ValueError(f"image files have 1, 3 or 4 channels, data.channels is {channels}")
        self._content = content
        self._stored = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = self._stored.size
        check_values(height * width * MODE_BYTES, len(content))
        self._orientation = self._stored.getexif().get(ORIENTATION, 1)
        self.size = (width, height) if self._orientation in SIDEWAYS else (height, width)

    @property
    def is_array(self) -> bool:
        """Whether the pixels come from a file of numbers, which Pillow does not read."""
        return self._array is not None

    def pixels(self, most_shrink: float = 1.0) -> np.ndarray:
        """Returns uint8 [H, W, channels], not more than `most_shrink` times smaller than the file's."""
        if self._array is not None:
            return self._array
        if most_shrink < SHRINKS[-1] and (plain := self._plain_jpeg()) is not None:
            return plain
        image = self.image(most_shrink)
        return np.asarray(image).reshape(image.height, image.width, self._channels)

    def _plain_jpeg(self) -> np.ndarray | None:
        """Returns the pixels of a whole, upright RGB file by OpenCV, without the copies of Pillow; None for others.

        Both use libjpeg-turbo and give the same pixels. OpenCV fills up what a truncated file lacks: such files are
        left to Pillow, which refuses them.
        """
        stored, content = self._stored, self._content
        if (stored.format, stored.mode, self._channels, self._orientation) != ("JPEG", "RGB", 3, 1):
            return None
        if not content.endswith(JPEG_END):
            return None
        cv2 = opencv()
        return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)

    def image(self, most_shrink: float = 1.0) -> Image.Image:
        """Returns the upright image in the mode of the channels, not more than `most_shrink` times smaller."""
        stored = self._stored
        shrink = next((by for by in SHRINKS if by <= most_shrink), 1)
        width, height = stored.size
        mode = "L" if self._channels == 1 else stored.mode
        stored.draft(mode, (max(1, width // shrink), max(1, height // shrink)))  # no effect but on JPEG
        if self._orientation != 1:
            ImageOps.exif_transpose(stored, in_place=True)
        return in_mode(stored, MODES[self._channels])


def in_mode(stored: Image.Image, mode: str) -> Image.Image:
    """Returns an image as L, RGB or RGBA of 8 bits."""
    if stored.mode in WIDE_MODES:
        stored = Image.fromarray(eight_bits(np.asarray(stored)))
    if stored.has_transparency_data:
        stored = stored.convert("RGBA")
        if mode != "RGBA":
            stored = Image.alpha_composite(Image.new("RGBA", stored.size, "white"), stored)
    stored.load()
    return stored if stored.mode == mode else stored.convert(mode)


def eight_bits(array: np.ndarray) -> np.ndarray:
    """Returns numbers as uint8: the upper 8 bits of uint16, other integers in 0..255 as they are, floats times 255."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{array.dtype}; store uint8, uint16, or floats in 0..1")
    low, high = (array.min(), array.max()) if array.size else (0, 0)
    if array.dtype.kind == "f":
        if not (low >= 0 and high <= 1):
            raise ValueError(f"floats from {low:g} to {high:g}; scale them to 0..1, or store uint8")
        return (array * 255 + 0.5).astype(np.uint8)
    if is_sixteen_bits(array):
        return (array >> 8).astype(np.uint8)
    if array.dtype.kind in "iu" and 0 <= low and high <= 255:
        return array.astype(np.uint8)
    raise ValueError(f"{array.dtype} from {low} to {high}; store uint8, uint16, or floats in 0..1")


def is_sixteen_bits(array: np.ndarray) -> bool:
    """Returns whether an array is uint16, in either byte order."""
    return array.dtype.kind == "u" and array.dtype.itemsize == 2


def as_levels(array: np.ndarray, channels: int) -> np.ndarray:
    """Returns an array [H, W] or [H, W, C] as uint8 [H, W, channels]; grey is repeated to RGB."""
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"shape {array.shape}; expected [H, W] or [H, W, channels]")
    if array.shape[-1] == 1 and channels == 3:
        array = np.repeat(array, 3, axis=-1)
    if array.shape[-1] != channels:
        raise ValueError(f"{array.shape[-1]} channels; set data.channels = {array.shape[-1]}")
    return eight_bits(array)


def read_array(stream: IO[bytes], size: int) -> np.ndarray:
    """Returns the array of a .npy file of `size` bytes; raises ValueError unless they are what its header claims."""
    version = np.lib.format.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"has version {version} of the format")
    shape, _, dtype = HEADERS[version](stream)
    claimed, held = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if dtype.hasobject:  # numpy would advise to trust the file
        raise ValueError("an array holds Python objects instead of numbers")
    if claimed != held:
        raise ValueError(f"claims {claimed:,} bytes, which the file does not hold")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def read_tiff(content: bytes, channels: int) -> np.ndarray:
    """Returns the bands of a TIFF file as [H, W, C], however they are stored."""
    tifffile = _tifffile()
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        pages = list(itertools.islice(file.pages, channels + 1))
        first = pages[0]
        if len(first.shape) == 2 and len(pages) > 1:  # one page per band
            if len(pages) > channels or any(page.shape != first.shape for page in pages):
                raise ValueError(f"has other pages than {channels} bands of one size")
            check_values(math.prod(first.shape) * channels, len(content))
            return np.stack([page.asarray() for page in pages], axis=-1)
        check_values(math.prod(first.shape), len(content))
        array = first.asarray()
        return np.moveaxis(array, 0, -1) if first.planarconfig == 2 and array.ndim == 3 else array


@functools.cache
def _tifffile() -> Any:
    try:
        import tifffile
    except ImportError as error:
        raise ValueError("TIFF files of other than 1, 3 or 4 channels need pip install 'jepa_jax[tiff]'") from error
    return tifffile


@functools.cache
def opencv() -> Any:
    """Imports OpenCV on first use; its threads would compete with the processes that decode."""
    import cv2

    cv2.setNumThreads(1)
    return cv2

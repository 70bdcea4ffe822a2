"""Small files that claim to be large: refused before anything of that size is made."""

import io
import os
import re
import tarfile

import numpy as np
import pytest
from PIL import Image

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.data.elements import as_source
from jepa_jax.data.photos.crops import centre_crop
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.readers import bounded
from jepa_jax.data.readers.bounded import read_image_file
from jepa_jax.data.sources import open_source
from tests.data.opening import config


@pytest.fixture
def budget(monkeypatch):
    """Lets readers decode no more than 1,000 values, 2,000 bytes and 100 classes."""
    small = {
        "MOST_VALUES": 1000, "VALUES_PER_BYTE": 10, "VALUES_ALWAYS": 1000, "FILE_BYTES": 2000, "MOST_CLASSES": 100,
    }  # fmt: skip
    for name, most in small.items():
        monkeypatch.setattr(bounded, name, most)


def stored(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("format", ["PNG", "TIFF", "GIF", "BMP", "WEBP", "JPEG"])
def test_images_of_more_pixels_than_the_budget_are_refused_before_they_are_decoded(budget, format):
    Photo(stored(Image.new("RGB", (12, 12)), format), 3).pixels()
    with pytest.raises(ValueError, match="claims 1,600 values in .* at most 1,000 are decoded"):
        Photo(stored(Image.new("RGB", (20, 20)), format), 3)


def test_a_small_file_cannot_claim_many_pixels(monkeypatch):
    monkeypatch.setattr(bounded, "VALUES_ALWAYS", 1000)
    monkeypatch.setattr(bounded, "VALUES_PER_BYTE", 100)
    content = stored(Image.new("RGB", (2000, 2000)), "PNG")
    with pytest.raises(ValueError, match="claims 16,000,000 values"):
        Photo(content, 3)
    Photo(content + bytes(200_000), 3)  # many bytes may hold many pixels


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000), (70_000, 3)])
def test_a_strip_is_cropped_before_it_is_enlarged(size, monkeypatch):
    enlarged = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda image, size, *more: enlarged.append(size) or resize(image, size))
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[(size[1] - 1) // 2, (size[0] - 1) // 2] = 255
    cropped = centre_crop(Photo(stored(Image.fromarray(pixels)), 3), 8)
    assert cropped.shape == (8, 8, 3) and cropped.max() > 0 and not enlarged


def test_arrays_whose_headers_claim_more_than_the_file_holds_are_refused():
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((4, 4, 3), np.uint8))
    Photo(buffer.getvalue(), 3)
    lying = buffer.getvalue().replace(b"(4, 4, 3), }", b"(99999,9999,3)}")
    with pytest.raises(ValueError, match="claims 2,999,670,003 bytes, which the file does not hold"):
        Photo(lying, 3)


def test_a_tiff_has_as_many_pages_as_channels_and_no_more_values_than_the_budget(budget):
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, np.ones((200, 2, 2), np.uint8), photometric="minisblack")
    with pytest.raises(ValueError, match="has other pages than 5 bands"):
        Photo(buffer.getvalue(), 5)
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, np.ones((5, 20, 20), np.uint8), photometric="minisblack")
    with pytest.raises(ValueError, match="claims 2,000 values"):
        Photo(buffer.getvalue(), 5)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/full", "/dev/tty"])
def test_links_to_devices_are_no_images(tmp_path, target):
    (tmp_path / "a.png").symlink_to(target)
    with pytest.raises((OSError, ValueError), match="not a regular file|No such device|No such file"):
        read_image_file(tmp_path / "a.png")


def test_image_files_of_more_bytes_than_the_budget_are_not_read(tmp_path, budget):
    (tmp_path / "a.png").write_bytes(b"")
    os.truncate(tmp_path / "a.png", 2**40)
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes, at most 2,000 are read"):
        read_image_file(tmp_path / "a.png")


def test_a_member_of_a_tar_file_that_claims_more_bytes_than_the_budget_is_not_read(tmp_path, budget):
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = 3000
        tar.addfile(member, io.BytesIO(bytes(3000)))
    with pytest.raises(DataLost, match="3,000 bytes, at most 2,000 are read"):
        open_source(config("webdataset", tmp_path, num_train=1), "train")


@pytest.mark.parametrize("label", [2**31 - 1, 2**31, 2**40, -2])
def test_labels_that_are_no_classes_are_refused_in_tar_files(tmp_path, label):
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for name, content in {"a.png": stored(Image.new("RGB", (9, 9))), "a.cls": str(label).encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(DataLost, match=f"a.cls is {label}"):
        open_source(config("webdataset", tmp_path, num_train=1), "train")


def test_labels_of_given_data_are_classes_of_the_budget(budget):
    data = {"image": np.zeros((4, 8, 8, 3), np.uint8), "label": np.array([0, 1, 2, 100])}
    with pytest.raises(UserError, match="labels go up to 100, and at most 100 classes are possible"):
        as_source(data)


def write_parquet(file, table, **options):
    from pyarrow import parquet
    from pyarrow import table as as_table

    parquet.write_table(as_table(table) if isinstance(table, dict) else table, file, **options)


@pytest.mark.parametrize("label", [2**31 - 1, 2**31, 2**40])
def test_labels_of_parquet_files_neither_wrap_nor_make_millions_of_classes(tmp_path, label):
    pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "train-0.parquet", {"image": [b"x"] * 20, "label": [0] * 19 + [label]})
    with pytest.raises(UserError, match=f"train-0.parquet: column label: labels go up to {label}, and at most"):
        open_source(config("parquet", tmp_path), "train")


@pytest.mark.parametrize("is_struct", [True, False])
def test_an_image_that_is_stored_once_and_named_in_many_rows_is_in_memory_once(tmp_path, is_struct):
    pyarrow = pytest.importorskip("pyarrow")
    content = stored(Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)))
    image = {"bytes": content, "path": None} if is_struct else content
    write_parquet(tmp_path / "train-0.parquet", {"image": [image] * 3000})
    source = open_source(config("parquet", tmp_path, image_size=8), "train")
    assert os.path.getsize(tmp_path / "train-0.parquet") < 100_000
    before = pyarrow.total_allocated_bytes()
    source.batch(np.arange(3))
    assert pyarrow.total_allocated_bytes() - before < 10 * len(content)  # of 90 MB


def test_descriptions_and_columns_of_parquet_files_that_do_not_fit_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"image": [stored(Image.new("RGB", (9, 9)))] * 20, "label": [0, 1] * 10})
    described = b'{"info": {"features": {"label": {"names": null}}}}'
    write_parquet(tmp_path / "train-0.parquet", table.replace_schema_metadata({"huggingface": described}))
    assert open_source(config("parquet", tmp_path, image_size=8), "train").classes == ("0", "1")
    for other in ({"image": [b"x"]}, {"picture": [b"x"], "label": [0]}, {"image": [{"path": "x"}], "label": [0]}):
        write_parquet(tmp_path / "train-1.parquet", other)
        message = "has other columns than train-0.parquet|has the columns picture, label|images are in image or img"
        with pytest.raises(UserError, match=f"train-1.parquet: .*({message})"):
            open_source(config("parquet", tmp_path, image_size=8), "train")


@pytest.mark.parametrize("value", ["texts", "objects", "times"])
def test_npz_arrays_that_are_no_numbers_are_named(tmp_path, value):
    kinds = {"texts": "U1", "objects": object, "times": "M8[s]"}
    np.savez(tmp_path / "train.npz", image=np.zeros((4, 8, 8), kinds[value]), label=np.zeros(4, int))
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "train.npz"))):
        open_source(config("npz", tmp_path, image_size=8), "train")

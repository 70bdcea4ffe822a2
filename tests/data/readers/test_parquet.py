"""Data sets of Hugging Face on disk give the images, labels and class names that were written."""

import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.readers import parquet
from jepa_jax.data.sources import open_source, open_splits

pyarrow = pytest.importorskip("pyarrow")
arrow_parquet = pytest.importorskip("pyarrow.parquet")


def settings(place, **more):
    return DataConfig(source="parquet", dir=str(place), image_size=8, **more)


def png(level):
    buffer = io.BytesIO()
    Image.new("RGB", (10, 12), (level, 0, 0)).save(buffer, format="PNG")
    return buffer.getvalue()


def write(file, levels, *, label="label", names=("cat", "dog"), struct=True):
    file.parent.mkdir(parents=True, exist_ok=True)
    contents = [png(level) for level in levels]
    images = [{"bytes": content, "path": None} for content in contents] if struct else contents
    columns = {"image": images} | ({label: [level % 2 for level in levels]} if label else {})
    table = pyarrow.table(columns)
    if names:
        described = {"info": {"features": {"label": {"names": list(names)}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(described)})
    arrow_parquet.write_table(table, file, row_group_size=4)


@pytest.mark.parametrize("folder", ["", "data"])
def test_splits_labels_and_names_are_those_of_the_files(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 600)  # so that row groups are dropped and read again
    write(tmp_path / folder / "train-00000-of-00002.parquet", range(0, 10))
    write(tmp_path / folder / "train-00001-of-00002.parquet", range(10, 15))
    write(tmp_path / folder / "validation-00000-of-00001.parquet", [200, 201])
    train, test = open_splits(settings(tmp_path))
    assert train.classes == ("cat", "dog") and (len(train), len(test)) == (15, 2)
    order = np.random.default_rng(0).permutation(15)
    batch = pickle.loads(pickle.dumps(train)).batch(order)
    np.testing.assert_array_equal(batch["image"][:, 4, 4, 0], order)
    np.testing.assert_array_equal(batch["label"], order % 2)
    assert test.batch(np.arange(2))["image"][:, 4, 4, 0].tolist() == [200, 201]


def test_without_test_files_and_labels_a_tenth_is_held_back(tmp_path):
    write(tmp_path / "train.parquet", range(30), label="", names=(), struct=False)
    train, test = open_splits(settings(tmp_path))
    levels = [source.batch(np.arange(len(source)))["image"][:, 4, 4, 0].tolist() for source in (train, test)]
    assert len(test) == 3 and sorted(levels[0] + levels[1]) == list(range(30)) and train.classes == ()


@pytest.mark.parametrize("split", ["train", "test"])
def test_one_image_cannot_be_divided(tmp_path, split):
    write(tmp_path / "train-0.parquet", [5])
    with pytest.raises(UserError, match="train-0.parquet: one image cannot be divided"):
        open_source(settings(tmp_path), split)


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(UserError, match="no train-\\*.parquet there"):
        open_source(settings(tmp_path), "train")
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UserError, match="train-0.parquet: not a readable parquet file"):
        open_source(settings(tmp_path), "train")
    arrow_parquet.write_table(pyarrow.table({"text": ["a"], "label": [0]}), tmp_path / "train-0.parquet")
    with pytest.raises(UserError, match="has the columns text, label; images are in image or img"):
        open_source(settings(tmp_path), "train")
    table = pyarrow.table({"image": [png(1)] * 20, "label": [None] * 20})
    arrow_parquet.write_table(table, tmp_path / "train-0.parquet")
    with pytest.raises(UserError, match="column label is null with 20 gaps"):
        open_source(settings(tmp_path), "train")
    arrow_parquet.write_table(pyarrow.table({"image": [b"no image"] * 20}), tmp_path / "train-0.parquet")
    with pytest.raises(UserError, match="train-0.parquet, row .* of row group 0: cannot be read as an image"):
        open_source(settings(tmp_path), "train").batch(np.arange(2))

"""CIFAR-10 in every official form, and what happens when a file is missing, damaged or hostile; 20 images a file."""

import builtins
import os
import pickle
import tarfile

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import image_spec, sample
from jepa_jax.data.readers import cifar
from jepa_jax.data.sources import open_source

PER_FILE = 20


def opened(directory, split="train", **kwargs):
    return open_source(DataConfig(source="cifar10", dir=str(directory), **kwargs), split)


def everything(source):
    return source.batch(np.arange(len(source)))


@pytest.fixture
def small_cifar(monkeypatch):
    monkeypatch.setattr(cifar, "IMAGES_PER_FILE", PER_FILE)


def cifar_content():
    rng = np.random.default_rng(0)
    names = cifar.PYTHON["train"] + cifar.PYTHON["test"]
    return {n: (rng.integers(0, 256, (PER_FILE, 32, 32, 3), np.uint8), rng.integers(0, 10, PER_FILE)) for n in names}


def write_cifar(directory, layout, content):
    directory.mkdir(parents=True)
    for name, (images, labels) in content.items():
        planar = images.transpose(0, 3, 1, 2).reshape(PER_FILE, -1)
        if layout == "binary":
            (directory / f"{name}.bin").write_bytes(np.c_[labels.astype(np.uint8), planar].tobytes())
        else:
            batch = {
                b"batch_label": name.encode(),
                b"labels": labels.tolist(),
                b"data": planar,
                b"filenames": [b"x.png"],
            }
            (directory / name).write_bytes(pickle.dumps(batch, protocol=3))
    return directory


def tar_of(directory, archive):
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(directory, arcname=directory.name)
    return archive


@pytest.mark.parametrize("layout", ["binary", "python"])
@pytest.mark.parametrize("place", ["itself", "parent", "archive", "folder of the archive"])
def test_cifar10_reads_every_layout(tmp_path, small_cifar, layout, place):
    content = cifar_content()
    files = write_cifar(tmp_path / f"cifar-10-batches-{'bin' if layout == 'binary' else 'py'}", layout, content)
    path = {"itself": files, "parent": tmp_path}.get(place)
    if path is None:
        (tmp_path / "packed").mkdir()
        archive = tar_of(files, tmp_path / "packed" / f"cifar-10-{layout}.tar.gz")
        path = archive if place == "archive" else archive.parent
    train, test = opened(path), opened(path, "test")
    assert (len(train), len(test), train.spec) == (5 * PER_FILE, PER_FILE, image_spec(32))
    assert train.classes[3] == "cat"
    np.testing.assert_array_equal(
        everything(train)["image"], np.concatenate([content[n][0] for n in cifar.PYTHON["train"]])
    )
    np.testing.assert_array_equal(everything(test)["label"], content["test_batch"][1])
    assert everything(test)["label"].dtype == np.int32
    assert len(pickle.dumps(train)) < 3000  # the path, not the images
    copy = pickle.loads(pickle.dumps(train))
    np.testing.assert_array_equal(everything(copy)["image"], everything(train)["image"])


def test_cifar10_limits_and_size(tmp_path, small_cifar):
    write_cifar(tmp_path / "cifar-10-batches-bin", "binary", cifar_content())
    whole, part = opened(tmp_path), opened(tmp_path, num_train=7)
    np.testing.assert_array_equal(everything(part)["image"], everything(whole)["image"][sample(len(whole), 7)])
    with pytest.raises(UserError, match="data.num_train = 101: the data has 100 images"):
        opened(tmp_path, num_train=101)
    with pytest.raises(
        UserError, match="data.image_size = 64: cifar10 has images of 32 x 32 pixels; set data.image_size = 32"
    ):
        opened(tmp_path, image_size=64)


def test_cifar10_missing_and_truncated_files_are_named_with_the_fix(tmp_path, small_cifar):
    fix = f"jepa-jax prepare-data cifar10 --dir={tmp_path}"
    with pytest.raises(UserError, match="data.dir is empty.*prepare-data cifar10"):
        opened("")
    with pytest.raises(UserError, match="no such file or folder"):
        opened(tmp_path / "nowhere")
    with pytest.raises(UserError) as error:
        opened(tmp_path)
    assert "data_batch_1.bin" in str(error.value) and fix in str(error.value)

    files = write_cifar(tmp_path / "cifar-10-batches-bin", "binary", cifar_content())
    data = (files / "data_batch_3.bin").read_bytes()
    (files / "data_batch_3.bin").write_bytes(data[:-1])
    with pytest.raises(UserError) as error:
        opened(tmp_path)
    assert str(error.value).startswith(f"{files / 'data_batch_3.bin'}: 61,459 bytes, expected 61,460")
    assert fix in str(error.value)

    (files / "data_batch_3.bin").write_bytes(b"\x0a" + data[1:])
    with pytest.raises(UserError, match="data_batch_3.bin: labels outside 0..9"):
        opened(tmp_path)

    (files / "data_batch_3.bin").unlink()
    with pytest.raises(UserError) as error:
        opened(files)
    assert str(error.value) == f"{files / 'data_batch_3.bin'}: missing; run: {fix}"


def test_cifar10_damaged_archives_are_refused(tmp_path, small_cifar):
    files = write_cifar(tmp_path / "cifar-10-batches-bin", "binary", cifar_content())
    archive = tar_of(files, tmp_path / "a.tar.gz")
    data = archive.read_bytes()
    for damaged in (data[: len(data) // 2], b"not an archive", data[:5000] + b"\0" * 400 + data[5400:]):
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match=f"a.tar.gz: .*|{len(damaged):,} bytes on disk"):
            opened(archive)
    (files / "data_batch_2.bin").unlink()
    tar_of(files, archive)
    with pytest.raises(UserError, match="holds no data_batch_2.bin"):
        opened(archive)


class RunsOnLoad:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", ["os.mkdir", "builtins.eval", "numpy.load"])
def test_cifar10_malicious_pickles_execute_nothing(tmp_path, small_cifar, function):
    proof = tmp_path / "executed"
    attack = {
        "os.mkdir": RunsOnLoad(os.mkdir, str(proof)),
        "builtins.eval": RunsOnLoad(builtins.eval, f"__import__('os').mkdir({str(proof)!r})"),
        "numpy.load": RunsOnLoad(np.load, str(tmp_path / "x.npy")),
    }[function]
    files = write_cifar(tmp_path / "cifar-10-batches-py", "python", cifar_content())
    (files / "data_batch_2").write_bytes(pickle.dumps({b"data": attack, b"labels": []}, protocol=3))
    with pytest.raises(UserError, match="data_batch_2: not a CIFAR-10 python batch .*the pickle asks for"):
        opened(tmp_path)
    assert not proof.exists()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps([1]), pickle.dumps({b"data": np.zeros((3, 3072)), b"labels": [0]})]
)
def test_cifar10_damaged_pickles_are_refused(tmp_path, small_cifar, content):
    files = write_cifar(tmp_path / "cifar-10-batches-py", "python", cifar_content())
    (files / "test_batch").write_bytes(content)
    with pytest.raises(UserError, match="test_batch: "):
        opened(tmp_path, "test")

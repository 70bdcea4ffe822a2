"""Damaged and hostile files: each ends in one clear error, in bounded time and memory."""

import gzip
import io
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_data, open_source

SECONDS = 600  # after which a case counts as hanging
MEGABYTES = 3000  # of address space for a case about memory; importing jax takes most of it


@pytest.fixture(autouse=True)
def _limited_time():
    def give_up(*_):
        raise TimeoutError(f"took more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def config(source, directory, **changes):
    return DataConfig(**{"source": source, "dir": str(directory), "image_size": 8, "batch_size": 4} | changes)


def images(count=12, size=8):
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)


def write_npz(folder, *, labels=None, test_labels=None, **arrays):
    labels = np.arange(12) % 3 if labels is None else labels
    np.savez(folder / "train.npz", **{"image": images(), "label": labels} | arrays)
    np.savez(folder / "test.npz", image=images(), label=labels if test_labels is None else test_labels)
    return config("npz", folder)


def npy(header, content=b""):
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def with_member(folder, name, content, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(folder / "train.npz", "w", compression) as archive:
        archive.writestr(name, content)
    return config("npz", folder)


HUGE = "{'descr': '|u1', 'fortran_order': False, 'shape': (10000000, 32, 32, 3), }"


def lying_directory(folder):
    """Writes an archive whose headers agree on 30 GB that are not there."""
    data = with_member(folder, "image.npy", npy(HUGE, b"\0" * 1000))
    size = struct.pack("<I", 0xF0000000)
    file = folder / "train.npz"
    held = struct.pack("<I", len(npy(HUGE)) + 1000)
    file.write_bytes(file.read_bytes().replace(held, size))
    return data


def odd_dtype(folder):
    return with_member(folder, "image.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", b"\0" * 24))


NPZ = {
    "a .npy named .npz": (lambda f: np.save(open(f / "train.npz", "wb"), images()) or config("npz", f), "no archive"),
    "a header of 30 GB": (lambda f: with_member(f, "image.npy", npy(HUGE, b"\0" * 100)), "claims 30,720,000,000 bytes"),
    "a directory of 30 GB": (lying_directory, "not a readable .npz file|GiB of memory are free"),
    "objects": (odd_dtype, "holds Python objects"),
    "a damaged header": (lambda f: with_member(f, "image.npy", npy("{'descr': ((((")), "not a readable .npz"),
    "a strange version": (lambda f: with_member(f, "image.npy", b"\x93NUMPY\x09\x00xx"), "not a readable .npz"),
    "an empty file": (lambda f: (f / "train.npz").write_bytes(b"") or config("npz", f), "no archive"),
    "a folder": (lambda f: (f / "train.npz").mkdir() or config("npz", f), "not a regular file"),
    "a pipe": (lambda f: os.mkfifo(f / "train.npz") or config("npz", f), "not a regular file"),
    "labels beyond 2^31": (lambda f: write_npz(f, labels=np.full(12, 2**32 + 1)), "labels go up to 4294967297"),
    "labels of billions": (lambda f: write_npz(f, labels=np.full(12, 2_000_000_000)), "labels go up to 2000000000"),
    "negative labels": (lambda f: write_npz(f, labels=np.full(12, -1)), "expected integers from 0 on"),
    "unsigned labels": (lambda f: write_npz(f, labels=np.full(12, 2**64 - 1, np.uint64)), "labels go up to 18446"),
    "labels of no type": (lambda f: write_npz(f, labels=np.array(["a"] * 12)), "expected integers from 0 on"),
    "a scalar": (lambda f: write_npz(f, image=np.uint8(3)), "images have shape"),
    "no image": (lambda f: write_npz(f, image=images()[:0], labels=np.zeros(0, int)), "holds no image"),
}  # fmt: skip


def write_idx(folder, shape=(12, 8, 8), *, claimed=None, packed=False, content=None):
    def put(name, axes, shape, content):
        data = bytes([0, 0, 8, len(axes)]) + b"".join(struct.pack(">I", n) for n in axes) + content
        file = folder / f"{name}{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(data) if packed else data)

    content = b"\1" * int(np.prod(shape)) if content is None else content
    for prefix in ("train", "t10k"):
        put(f"{prefix}-images-idx3-ubyte", claimed or shape, shape, content)
        put(f"{prefix}-labels-idx1-ubyte", shape[:1], shape[:1], b"\1" * shape[0])
    return config("idx", folder, channels=1)


def idx_pipe(folder):
    data = write_idx(folder)
    (folder / "train-images-idx3-ubyte").unlink()
    os.mkfifo(folder / "train-images-idx3-ubyte")
    return data


IDX = {
    "empty": (lambda f: write_idx(f, (0, 8, 8)), r"holds nothing \(shape \(0, 8, 8\)\)"),
    "empty images": (lambda f: write_idx(f, (12, 0, 0)), "holds nothing"),
    "a claim of terabytes": (lambda f: write_idx(f, claimed=(2**31, 2**10, 2**10)), "takes 2097152.0 GiB"),
    "a packed claim of terabytes": (lambda f: write_idx(f, claimed=(2**31, 2**10, 2**10), packed=True), "takes 2097"),
    "less than claimed": (lambda f: write_idx(f, claimed=(13, 8, 8), packed=True), "less than the 832 bytes"),
    "a pipe": (idx_pipe, "not a regular file"),
    "cut gzip": (lambda f: (write_idx(f, packed=True), cut(f / "train-images-idx3-ubyte.gz"))[0], "cannot be read"),
}


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


def write_folder(folder, classes=("a", "b"), count=6):
    for name, i in itertools.product(classes, range(count)):
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(images(1)[0]).save(folder / "train" / name / f"{i}.png")
    return config("folder", folder)


def folder_with(make):
    def build(folder):
        data = write_folder(folder)
        make(folder / "train" / "a")
        return data

    return build


def a_socket(place):
    here = os.getcwd()
    os.chdir(place)  # the path of a socket is limited to a hundred letters
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("x.jpg")
    os.chdir(here)


FOLDER = {
    "a link to itself": (folder_with(lambda a: (a / "loop").symlink_to(".")), "a/loop: the same folder as .*/a;"),
    "a link upwards": (folder_with(lambda a: (a / "loop").symlink_to("..")), "a/loop: the same folder as .*/train;"),
    "a link to another class": (folder_with(lambda a: (a / "more").symlink_to("../b")), "the same folder as"),
    "a class that is a link to another": (
        folder_with(lambda a: (a.parent / "c").symlink_to("b")),
        "the same folder as",
    ),
    "a link that leads round": (folder_with(lambda a: (a / "x").symlink_to("x")), "a/x: .*Too many levels"),
    "a pipe": (folder_with(lambda a: os.mkfifo(a / "x.jpg")), "x.jpg: not a regular file"),
    "a socket": (folder_with(a_socket), "x.jpg: not a regular file"),
    "a device": (folder_with(lambda a: (a / "x.jpg").symlink_to("/dev/zero")), "x.jpg: not a regular file"),
}


def write_tar(folder, members, name="cifar-10-binary.tar.gz"):
    with tarfile.open(folder / name, "w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return config("cifar10", folder, image_size=32)


def link(name, target, kind=tarfile.SYMTYPE):
    member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
    member.type, member.linkname = kind, target
    return member, b""


def negative_size(folder):
    """Writes a tar file with a member of size -512, over which some readers never get."""
    member = tarfile.TarInfo("data_batch_1.bin")
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 8 + struct.pack(">i", -512)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (folder / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(bytes(header) + bytes(1024)))
    return config("cifar10", folder, image_size=32)


FIRST = "data_batch_1.bin"
TAR = {
    "a link to an absolute path": (lambda f: write_tar(f, [link(FIRST, "/etc/passwd")]), "holds no data_batch_1.bin"),
    "links in a loop": (lambda f: write_tar(f, [link(FIRST, "b"), link("b", FIRST)]), "holds no data_batch_1.bin"),
    "hard links in a loop": (
        lambda f: write_tar(f, [link(FIRST, f"cifar-10-batches-bin/{FIRST}", tarfile.LNKTYPE)]), "holds no data",
    ),
    "a negative size": (negative_size, "cifar-10-binary.tar.gz: "),
    "many members": (
        lambda f: write_tar(f, [(tarfile.TarInfo(f"{i}"), b"") for i in range(1000)]), "more than 100 members",
    ),
    "a pipe": (lambda f: os.mkfifo(f / "cifar-10-binary.tar.gz") or config("cifar10", f), "not a regular file"),
}  # fmt: skip

CASES = {
    f"{kind}: {name}": case
    for kind, cases in {"npz": NPZ, "idx": IDX, "folder": FOLDER, "tar": TAR}.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_one_clear_error(tmp_path, name):
    build, message = CASES[name]
    data = build(tmp_path)
    with pytest.raises(UserError, match=message):
        open_source(data, "train")


ZEROS = gzip.compress(bytes(100 << 20), compresslevel=1)


def gzip_bomb(folder, name, head=b""):
    """Writes a file that unpacks to 4 GB; parts of a gzip file follow each other."""
    (folder / name).write_bytes(gzip.compress(head) + 40 * ZEROS)


def idx_bomb(folder):
    write_idx(folder, packed=True)
    gzip_bomb(folder, "train-images-idx3-ubyte.gz", bytes([0, 0, 8, 3]) + struct.pack(">III", 12, 8, 8))
    return {"source": "idx", "dir": str(folder), "image_size": 8, "channels": 1}


def tar_bomb(folder):
    member = tarfile.TarInfo(FIRST)
    member.size = 4000 << 20
    gzip_bomb(folder, "cifar-10-binary.tar.gz", member.tobuf())
    return {"source": "cifar10", "dir": str(folder)}


def pax_bomb(folder):
    member = tarfile.TarInfo("x")
    member.size, member.type = 4000 << 20, tarfile.XHDTYPE
    gzip_bomb(folder, "cifar-10-binary.tar.gz", member.tobuf())
    return {"source": "cifar10", "dir": str(folder)}


def npz_claim(folder):
    with_member(folder, "image.npy", npy(HUGE, b"\0" * 100))
    return {"source": "npz", "dir": str(folder)}


def sparse_idx(folder):
    write_idx(folder)
    with open(folder / "train-images-idx3-ubyte", "r+b") as file:
        file.truncate(30 << 30)
    return {"source": "idx", "dir": str(folder), "image_size": 8, "channels": 1}


OPEN_LIMITED = f"""
import json, resource, sys
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_source
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + ({MEGABYTES} << 20),) * 2)
for settings in json.load(sys.stdin):
    try:
        open_source(DataConfig(**settings), "train")
    except UserError as error:
        print(error)
    else:
        sys.exit("was read")
"""


def test_bombs_are_refused_in_little_memory(tmp_path):
    cases = []
    for build in (idx_bomb, tar_bomb, pax_bomb, npz_claim, sparse_idx):
        folder = tmp_path / build.__name__
        folder.mkdir()
        cases.append(build(folder))
    ended = subprocess.run(
        [sys.executable, "-c", OPEN_LIMITED], input=json.dumps(cases), capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    messages = ended.stdout.splitlines()
    assert len(messages) == len(cases) and "MemoryError" not in ended.stdout
    assert "more than the 768 bytes that it claims" in messages[0]
    assert all("holds more than 536,870,912 bytes" in message for message in messages[1:3])


def test_links_to_other_images_and_folders_are_followed(tmp_path):
    data = write_folder(tmp_path / "set")
    (tmp_path / "more").mkdir()
    Image.fromarray(images(1)[0]).save(tmp_path / "more" / "x.png")
    (tmp_path / "set" / "train" / "a" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "set" / "train" / "b" / "one.png").symlink_to(tmp_path / "more" / "x.png")
    (tmp_path / "set" / "train" / "b" / "two.png").symlink_to(tmp_path / "more" / "x.png")
    source = open_source(data, "train")
    assert np.bincount(source.batch(np.arange(len(source)))["label"]).tolist() == [7, 8]


def test_files_that_pillow_would_hand_to_a_program_are_not_opened(tmp_path):
    data = write_folder(tmp_path)
    (tmp_path / "train" / "a" / "0.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    )
    source = open_source(data, "train")
    with pytest.raises(UserError, match="a/0.png: cannot be read as an image .UnidentifiedImageError"):
        source.batch(np.arange(len(source)))


def test_labels_beyond_the_classes_of_train_are_refused(tmp_path):
    with pytest.raises(UserError, match="the splits differ .*no class that train lacks"):
        open_data(write_npz(tmp_path, test_labels=np.arange(12) + 5))


@pytest.mark.parametrize("content", ["{", "{}", "[]", "\0", '{"name": 3, "splits": [{"shardLengths": ["-1"]}]}'])
def test_damaged_descriptions_of_tfds_are_refused(tmp_path, content):
    pytest.importorskip("tensorflow_datasets")
    (tmp_path / "strange" / "1.0.0").mkdir(parents=True)
    for name in ("dataset_info.json", "features.json"):
        (tmp_path / "strange" / "1.0.0" / name).write_text(content)
    with pytest.raises(UserError, match="tfds:strange"):
        open_source(config("tfds:strange", tmp_path), "train")


@pytest.mark.parametrize("key", ["type", "pythonClassName", "python_class_name"])
def test_a_description_of_tfds_imports_no_class_of_others(tmp_path, monkeypatch, key):
    pytest.importorskip("tensorflow_datasets")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_features.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "strange" / "1.0.0").mkdir(parents=True)
    description = {key: "tensorflow_datasets.core.features.FeaturesDict", "content": [{key: "evil_features.Evil"}]}
    (tmp_path / "strange" / "1.0.0" / "features.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=r"features.json: names evil_features.Evil, .*--trust"):
        open_source(config("tfds:strange", tmp_path), "train")
    assert not (tmp_path / "ran").exists()


def test_places_that_cannot_be_read_are_named(tmp_path):
    for source in ("cifar10", "idx", "npz", "folder", "tfds:mnist"):
        for directory in ("x" * 5000, "a\0b", str(tmp_path / "file" / "below"), "/proc/self/mem"):
            (tmp_path / "file").write_bytes(b"")
            with pytest.raises(UserError):
                open_source(config(source, directory), "train")


def test_no_pickle_is_loaded_from_npz(tmp_path):
    np.savez(tmp_path / "train.npz", image=np.array([{}], object))
    with pytest.raises(UserError, match="Python objects"):
        open_source(config("npz", tmp_path), "train")

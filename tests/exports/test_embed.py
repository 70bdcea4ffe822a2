"""Features of a folder: names beside vectors, continued after an interruption, damaged images, neighbours."""

import json
import sys

import numpy as np
import PIL.Image
import pytest
from safetensors.numpy import load_file, save_file

from jepa_jax.base.console import QuietConsole
from jepa_jax.base.errors import UserError
from jepa_jax.cli.main import main
from jepa_jax.data.photos.crops import centre_crop
from jepa_jax.data.photos.decode import Photo
from jepa_jax.evals.inference import load_encoder
from jepa_jax.evals.neighbours import nearest
from jepa_jax.exports import embed
from jepa_jax.exports.embed import Embedder, embed_folder, open_embedder, read_features
from jepa_jax.exports.export import export_encoder
from jepa_jax.reports.neighbours_page import queries
from jepa_jax.weights import load_model
from tests.evals.untrained_run import write_run
from tests.exports.write_parity import shaken
from tests.tiny import tiny_config, tiny_masked_config
from tests.weights.golden import WEIGHTS, write_in_parts


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of ten images of several sizes, in two folders."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(10):
        file = folder / ("cats" if i % 2 else "more/dogs") / f"{i}.{'png' if i % 3 else 'jpg'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(rng.integers(0, 256, (40 + i, 50, 3), np.uint8)).save(file)
    (folder / "notes.txt").write_text("no image")
    return folder


def decode(file, size):
    return centre_crop(Photo(file.read_bytes(), 3), size)


def mean_colours(calls):
    """Returns an encoder that counts its images and refuses to go on after six of them, once."""

    def encode(images):
        calls.append(len(images))
        if sum(calls) == 6:
            raise KeyboardInterrupt
        return images.mean((1, 2)).astype(np.float32)

    return Embedder(encode, 16, 3, 2, "mean colours", "")


def test_the_encoder_of_a_run_and_its_export_give_the_features_of_each_image(photos, tmp_path, capsys):
    run, output = tmp_path / "run", tmp_path / "out.npz"
    write_run(tiny_config(), run, shaken)
    flags = [f"--input={photos}", "--batch_size=4", "--json"]
    assert main(["embed", f"--workdir={run}", f"--output={output}", "--neighbours=cats/1.png", *flags]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["images"] == 10 and record["features"] == 16 and record["skipped"] == record["continued_from"] == 0
    stored = np.load(output)
    assert stored["names"].tolist() == sorted(stored["names"]) and "more/dogs/0.jpg" in stored["names"]
    images = np.stack([decode(photos / name, 16) for name in stored["names"]])
    np.testing.assert_allclose(stored["features"], load_encoder(run)(images), rtol=1e-5, atol=1e-5)
    page = (tmp_path / "out.html").read_text()
    assert "cats/1.png" in page and "more/dogs/2.png" in page and "data:image/png;base64," in page

    export_encoder(run, "safetensors", tmp_path / "exported")
    again = tmp_path / "out.parquet"
    assert main(["embed", f"--weights={tmp_path / 'exported'}", f"--output={again}", *flags]) == 0
    _, names, features = read_features(again)
    assert names == stored["names"].tolist()
    np.testing.assert_allclose(features, stored["features"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("formats", "changes"), [(("safetensors", "hf"), {}), (("safetensors",), {"eval__image_size": 12})]
)
def test_exports_see_the_same_part_of_a_picture_as_the_run(formats, changes, photos, tmp_path):
    run = tmp_path / "run"
    write_run(tiny_masked_config("ijepa", data__shorter_side=22, **changes), run, shaken)

    def features(**source):
        embedder = open_embedder(**{"workdir": None, "weights": None, **source}, batch_size=5)
        return embed_folder(embedder, photos, tmp_path / f"{len(list(tmp_path.iterdir()))}.npz", console=QuietConsole())

    expected = features(workdir=str(run)).features
    for format in formats:
        export_encoder(run, format, tmp_path / format)
        np.testing.assert_allclose(features(weights=str(tmp_path / format)).features, expected, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "safetensors" / "config.json").read_text())
    del config["shorter_side"]
    (tmp_path / "safetensors" / "config.json").write_text(json.dumps(config))
    assert np.abs(features(weights=str(tmp_path / "safetensors")).features - expected).max() > 1e-3  # it does matter


def test_public_weights_give_what_their_library_gives(photos, tmp_path):
    embedder = open_embedder(workdir=None, weights=str(WEIGHTS / "hf_vit"), batch_size=4)
    made = embed_folder(embedder, photos, tmp_path / "out.npz", console=QuietConsole())
    model = load_model(WEIGHTS / "hf_vit")
    image = decode(photos / made.names[3], 32).astype(np.float32) / 255
    pixels = (image - np.float32(model.mean)) / np.float32(model.std)
    np.testing.assert_allclose(made.features[3], model.apply(pixels[None])[0, 0], rtol=1e-5, atol=1e-5)  # its CLS token


def test_every_file_of_tensors_and_the_config_decide_what_an_encoder_is(tmp_path):
    def identity():
        return open_embedder(workdir=None, weights=str(tmp_path)).identity

    write_in_parts(tmp_path, "hf_vit")
    before, part = identity(), tmp_path / "b.safetensors"
    assert identity() == before
    save_file({name: tensor + 1 for name, tensor in load_file(part).items()}, part)
    other_tensors = identity()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 6}))
    assert len({before, other_tensors, identity()}) == 3


def test_an_interrupted_call_is_continued_and_a_finished_one_is_not_repeated(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "PART_IMAGES", 2)
    output, calls, other = tmp_path / "out.npz", [], []
    with pytest.raises(KeyboardInterrupt):
        embed_folder(mean_colours(calls), photos, output, console=QuietConsole())
    assert not output.exists() and sum(calls) == 6
    made = embed_folder(mean_colours(calls), photos, output, console=QuietConsole())
    assert made.reused == 4 and sum(calls) == 6 + 6 and not list(tmp_path.glob(".*"))
    expected = [decode(photos / name, 16).mean((0, 1)) for name in made.names]
    np.testing.assert_allclose(made.features, expected, rtol=1e-5)
    again = embed_folder(mean_colours(other), photos, output, console=QuietConsole())
    assert again.reused == 10 and other == []
    np.testing.assert_array_equal(again.features, made.features)
    changed = Embedder(lambda images: np.zeros((len(images), 2), np.float32), 16, 3, 2, "another", "")
    assert embed_folder(changed, photos, output, console=QuietConsole()).features.shape == (10, 2)


def test_an_unreadable_image_is_refused_or_left_out(photos, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    PIL.Image.new("RGB", (20, 20)).save(folder / "good.png")
    (folder / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match="bad.jpg: cannot be read as an image.*--on_error=skip"):
        embed_folder(mean_colours([]), folder, tmp_path / "out.npz", console=QuietConsole())
    made = embed_folder(mean_colours([]), folder, tmp_path / "out.npz", skip=True, console=QuietConsole())
    assert list(made.names) == ["good.png"] and made.skipped == ["bad.jpg"]


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_that_something_else_wrote_is_not_replaced(suffix, photos, tmp_path):
    file = tmp_path / f"out{suffix}"

    def refused():
        before = file.read_bytes()
        with pytest.raises(UserError, match="exists, and embed did not write it"):
            embed_folder(mean_colours([]), photos, file, console=QuietConsole())
        assert file.read_bytes() == before

    file.write_text("a thesis")
    refused()
    if suffix == ".npz":
        with file.open("wb") as out:
            np.savez(out, names=np.zeros(2), features=np.zeros((2, 2)))
        refused()
        with file.open("wb") as out:
            np.save(out, np.zeros(3))
        refused()
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pyarrow.parquet.write_table(pyarrow.table({"name": ["a"], "features": [[1.0]]}), file)
        refused()


def test_wrong_flags_are_refused(photos, tmp_path, capsys, monkeypatch):
    def refused(*flags):
        assert main(["embed", *flags]) == 2
        return capsys.readouterr().err

    both = [f"--input={photos}", f"--output={tmp_path / 'o.npz'}"]
    assert "either --workdir" in refused(*both)
    assert "either --workdir" in refused(*both, "--workdir=a", "--weights=b")
    weights = f"--weights={WEIGHTS / 'hf_ijepa'}"
    assert "pooled by mean or grid2" in refused(*both, weights, "--pool=cls").replace("\n", " ")
    assert "neither with .npz nor with .parquet" in refused(weights, f"--input={photos}", "--output=o.csv")
    assert "--neighbours=x.png: no such image" in refused(*both, "--neighbours=x.png", "--weights=nowhere")  # first
    assert "no such folder" in refused(weights, "--input=nowhere", f"--output={tmp_path / 'o.npz'}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs the package pyarrow" in refused(weights, f"--input={photos}", f"--output={tmp_path / 'o.parquet'}")


def test_neighbours_are_those_of_the_smallest_angle():
    angles = np.array([0.0, 0.1, 3.0, 0.3, -0.2])
    features = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.array([[1], [5], [1], [0.1], [2]])
    (order,), (cosines,) = nearest(features, [0], 3)
    assert order.tolist() == [1, 4, 3]
    np.testing.assert_allclose(cosines, np.cos([0.1, 0.2, 0.3]))
    assert nearest(features, [2, 1], 9)[0].shape == (2, 4)
    assert queries(["a", "b", "c"], "c, a") == [2, 0] and queries(["a", "b"], "sample") == [0, 1]
    with pytest.raises(UserError, match="--neighbours=d: no such image"):
        queries(["a", "b"], "a,d")

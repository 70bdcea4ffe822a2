"""Every block of Python of README and docs runs: here, with what its page leaves to the reader, or where it says."""

import dataclasses
import importlib
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jepa_jax
from jepa_jax.config.recipe import read_ladder
from jepa_jax.data.contract import Source
from jepa_jax.program.config import load_config
from tests.runs import Silent
from tests.tiny import TINY

ROOT = pathlib.Path(__file__).parents[1]
RNG = np.random.default_rng(0)
PIXELS = RNG.normal(size=(2, 32, 32, 3)).astype(np.float32)
# Where the blocks of other pages run, in whole.
ELSEWHERE = {
    "README.md": "tests/test_api.py, tests/projects/world_models/test_world_model.py",
    "docs/start.md": "tests/test_docs.py",
    "docs/tutorial.md": "tests/test_notebooks.py",
    "docs/notebooks/method.md": "tests/test_notebooks.py",
    "docs/notebooks/photographs.md": "tests/test_notebooks.py",
    "docs/notebooks/plan_and_tune.md": "tests/test_notebooks.py",
    "docs/guides/wildfire.md": "tests/projects/wildfire/evals/test_predictor.py",
}


def blocks(page: str) -> list[str]:
    """Returns the blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(block: str, **names):
    """Runs a block with what its page leaves to the reader; returns all names."""
    done = {"jax": jax, "jnp": jnp, "np": np, "jepa_jax": jepa_jax, "__name__": "mine", **names}
    exec(block, done)
    return done


def test_a_recipe_of_ones_own(tmp_path):
    made = run(blocks("docs/guides/coming_from.md")[0])["get_config"]("large")
    assert load_config(made, {"data.batch_size": 32}).eval.batch_size == 32 and made.model.name == "resnet18"


def test_histories_of_fires_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("data").mkdir()
    planes = RNG.uniform(size=(4, 4, 2))
    run(
        blocks("docs/guides/data.md")[0], speed=np.ones(6), degrees=np.full(6, 370.0), terrain=planes, lowest=0.0,
        highest=1.0, burnt=np.zeros((6, 4, 4)), fire_name="a",
    )  # fmt: skip
    with np.load("data/a_004.npz") as stored:
        assert stored["fire"].shape == (4, 4, 4, 1) and stored["wind"][0, 1] == pytest.approx(10 / 360)
    assert len(list(pathlib.Path("data").iterdir())) == 2


@pytest.mark.slow
def test_arrays_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jepa_jax, "Console", Silent)
    arrays = {"image": RNG.integers(256, size=(96, 16, 16, 3), dtype=np.uint8), "label": np.arange(96) % 2}
    config = jepa_jax.get_config("quickstart", TINY | {"train.max_steps": 2, "mesh.data": 1})
    run(blocks("docs/guides/data.md")[1], config=config, train=arrays, test=arrays)
    assert pathlib.Path("runs/own/summary.json").exists()


def test_a_source_and_a_loader_of_ones_own():
    source = run(blocks("docs/guides/data.md")[2])["FireSource"](types.SimpleNamespace(dir="x"), "train")
    assert isinstance(source, Source) and source.file == "x/train.npy"
    block = blocks("docs/guides/data.md")[3].replace("num_workers=4", "num_workers=0").replace(": ...", ": break")
    names = run(block, images=RNG.integers(256, size=(512, 8, 8, 3), dtype=np.uint8), labels=np.zeros(512, np.int32))
    assert names["batch"]["image"].shape == (256, 8, 8, 3)


def test_a_loss_and_forward_mode():
    loss, terms = run(blocks("docs/guides/extend.md")[0])["spread_loss"](jnp.ones((2, 4, 3)), key=None, roles=None)
    assert loss == 0 and terms.keys() == {"agreement", "spread"}
    names = run(blocks("docs/guides/extend.md")[1], encoder=jnp.sin, images=jnp.zeros(3), direction=jnp.ones(3))
    np.testing.assert_allclose(names["tangent"], 1)


@pytest.mark.slow
def test_a_plan_of_a_function():
    planned = run(blocks("docs/guides/plan.md")[0])["planned"]
    assert planned.verdict == "fits" and planned.prediction.images_per_sec > 0


def test_a_loop_is_profiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = jax.jit(lambda state, batch: (state + batch.sum(), batch.mean()))
    block = blocks("docs/guides/profiling.md")[0].replace('trace_steps="50:52"', 'trace_steps=""')
    loader = [np.ones((64, 2), np.float32)] * 6
    run(block, train_step=step, loader=loader, state=jnp.zeros(()), is_due=lambda: True, validate=lambda state: None)
    assert pathlib.Path("profiles/mine/profile.json").exists()


def test_a_ladder(tmp_path):
    (tmp_path / "mine.py").write_text(blocks("docs/guides/scale.md")[0])
    assert [step.name for step in read_ladder(str(tmp_path / "mine.py"))] == ["small", "batch 32", "wide"]


def test_a_step_to_tune():
    given = {"init": lambda dtype: 0, "train_step": lambda state, element: (state + 1, jnp.zeros(()))}
    make = run(blocks("docs/guides/throughput.md")[0], batches_of=lambda batch, workers: [batch], **given)["make"]
    step, batches = make(4, "float32", 0)
    assert step(batches[0]) == 0 and batches == [4]


def test_public_weights():
    block = blocks("docs/guides/weights.md")[0].replace("weights/dinov2", str(ROOT / "tests/golden/weights/hf_vit"))
    names = run(block, pixel_values=PIXELS)
    assert names["tokens"].shape[0] == 2 and names["features"].shape == names["tokens"][:, 0].shape


def test_a_program_without_this_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path("exports/continued")
    folder.mkdir(parents=True)
    shape = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    exported = jax.export.export(jax.jit(lambda images: images.mean((1, 2))))(shape)
    (folder / "encoder.stablehlo").write_bytes(exported.serialize())
    assert run(blocks("docs/guides/weights.md")[1], images=PIXELS)["features"].shape == (2, 3)


def test_an_environment_of_ones_own():
    _, block = blocks("docs/guides/world_models.md")
    world = run(block)["Pendulum"](None, None)
    start, goal = world.task(jax.random.key(0))
    after = world.step(start, jnp.ones(1), None)
    assert world.frame(after).shape == (16, 16, 1) and world.distance(after, goal).shape == ()


def test_the_methods_of_the_guide_are_in_files_that_tests_use(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "fixtures")
    byol = importlib.import_module("byol")
    files = {"BarlowTwins": ROOT / "jepa_jax" / "methods" / "barlow_twins.py"}
    for block in blocks("docs/guides/write_a_method.md"):
        if "class SimSiam" in block:
            made = run(block, **{**vars(byol), "__name__": "mine"})["SimSiam"]
            assert issubclass(made, byol.Byol) and dataclasses.is_dataclass(made.Keys)
            continue
        quoted = [path for name, path in files.items() if name in block] or [ROOT / "tests" / "fixtures" / "byol.py"]
        for line in block.splitlines():
            name = line.partition("(")[0] if "def " in line else line  # the files also state types
            assert name in quoted[0].read_text(), line


def test_every_block_is_run_somewhere():
    """A page with a block that no test runs is named here."""
    own = pathlib.Path(__file__).read_text()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = page.relative_to(ROOT).as_posix()
        here = len(set(re.findall(rf'blocks\("{re.escape(name)}"\)\[(\d+)\]', own)))
        elsewhere = [path for path in ELSEWHERE.get(name, "").split(", ") if path]
        assert all((ROOT / path).exists() for path in elsewhere)
        assert not blocks(name) or elsewhere or here == len(blocks(name)) or name in IN_PARTS, name


# Pages of which a test takes the blocks apart, or runs some of them elsewhere.
IN_PARTS = {
    "docs/guides/write_a_method.md": "quoted from a file",
    "docs/guides/world_models.md": "the other one: tests/projects/world_models/test_world_model.py",
    "docs/guides/coming_from.md": "the other one: tests/config/test_outside_script.py",
    "docs/reference/python.md": "an import",
}

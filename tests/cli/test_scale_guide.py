"""The command `scale-guide`: exit codes, streams and files, without compiling."""

import json

import pytest

from jepa_jax.base.errors import EXIT_DOES_NOT_FIT, EXIT_OK, EXIT_USER_ERROR
from jepa_jax.cli.scale_guide import main
from jepa_jax.planning import scale_guide
from tests.planning.line_compiler import GIB, LineCompiler

RECIPE = """
LADDER = (("small", {}, 1.5), ("large", {"data.batch_size": 64}))


def get_config():
    return {"base": "quickstart", "data.batch_size": 16}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    line = lambda data, folder, on_compile: LineCompiler(per_image=GIB // 4, data=data)  # noqa: E731
    monkeypatch.setattr(scale_guide, "StepCompiler", line)
    return path


def test_a_config_that_fits_ends_with_0_whatever_its_rungs_need(recipe, tmp_path, capsys):
    folder = tmp_path / "deep" / "guide"
    assert main([f"--config={recipe}", "--gpu=rtx3090", f"--output_dir={folder}"]) == EXIT_OK
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["name"] for row in rows if row["section"] == "ladder"] == ["small", "large"]
    assert [row["fits"] for row in rows if row["section"] == "ladder"] == [True, False]
    assert rows[0]["claimed_gb"] == [1.5] and "Scaling guide: mine on NVIDIA GeForce RTX 3090" in err
    assert f"jepa-jax scale-guide --config={recipe} --gpu=rtx3090\n" in (folder / "scale_guide.md").read_text()
    assert (folder / "scale_guide.png").exists()


def test_a_config_that_does_not_fit_ends_with_4(recipe, capsys):
    assert main([f"--config={recipe}", "--gpu=rtx3090", "--config.data.batch_size=128"]) == EXIT_DOES_NOT_FIT


def test_an_unknown_gpu_ends_with_2(recipe, capsys):
    assert main([f"--config={recipe}", "--gpu=rtx3091"]) == EXIT_USER_ERROR
    assert "did you mean rtx3090?" in capsys.readouterr().err

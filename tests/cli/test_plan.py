"""The command `plan`: exit codes, streams and files, without compiling."""

import json

import pytest

from jepa_jax.base.errors import EXIT_DOES_NOT_FIT, EXIT_OK, EXIT_USER_ERROR
from jepa_jax.cli.plan import PLAN
from jepa_jax.planning import plan_command
from tests.planning.line_compiler import GIB, LineCompiler

RECIPE = """
LADDER = (("small", {}, 1.5), ("large", {"data.batch_size": 64}))


def get_config():
    from jepa_jax.configs import quickstart

    config = quickstart.get_config()
    config.data.batch_size = 16
    return config
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    line = lambda data, folder, on_compile: LineCompiler(per_image=GIB // 4, data=data)  # noqa: E731
    monkeypatch.setattr(plan_command, "StepCompiler", line)
    return path


def flags(recipe, *others):
    return [f"--config={recipe}", "--gpu=rtx3090", "--noloader", "--novariants", *others]


def test_a_config_that_fits_ends_with_0_whatever_its_rungs_need(recipe, tmp_path, capsys):
    assert PLAN.main(flags(recipe, "--ladder", f"--html={tmp_path / 'plan.html'}")) == EXIT_OK
    out, err = capsys.readouterr()
    rungs = json.loads(out.splitlines()[-1])["ladder"]["rungs"]
    assert [(row["label"], row["verdict"]) for row in rungs] == [("small", "fits"), ("large", "does not fit")]
    assert rungs[0]["claimed_gb"] == [1.5] and "memory of each rung" in err
    assert "When memory runs out" in (tmp_path / "plan.html").read_text()


def test_a_config_that_does_not_fit_ends_with_4(recipe, capsys):
    assert PLAN.main(flags(recipe, "--config.data.batch_size=128")) == EXIT_DOES_NOT_FIT


def test_an_unknown_gpu_ends_with_2(recipe, capsys):
    assert PLAN.main([f"--config={recipe}", "--gpu=rtx3091"]) == EXIT_USER_ERROR
    assert "did you mean rtx3090?" in capsys.readouterr().err


def test_the_frontier_is_drawn_on_a_page(recipe, tmp_path, capsys):
    page = tmp_path / "frontier.html"
    assert PLAN.main(flags(recipe, f"--frontier={page}")) == EXIT_OK
    assert "Memory against time" in page.read_text() and "advice: " in capsys.readouterr().err
    assert PLAN.main(flags(recipe, "--frontier=frontier.png")) == EXIT_USER_ERROR
    assert "name an HTML file" in capsys.readouterr().err

"""The Python API of the README, from a folder in which another folder is called like the package."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import jepa_jax
from jepa_jax.base.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


def run_python(program, folder, flags=""):
    """Runs a program in `folder`, where the package is found as an editable install finds it: after `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)


def test_importing_the_package_has_no_side_effect(tmp_path):
    (tmp_path / "jepa_jax").mkdir()  # as in the parent of a clone
    program = (
        "import sys; before = set(sys.modules); import jepa_jax; print(jepa_jax.__file__); "
        "foreign = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "assert foreign == {'jepa_jax'}, foreign; import jepa_jax.training.loop; assert jepa_jax.train.__code__"
    )
    result = run_python(program, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(ROOT / "jepa_jax" / "__init__.py")


def test_configs_by_name_with_changes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = jepa_jax.get_config("quickstart", {"optim.lr": 0.25, "train.seed": 3}, data__batch_size=32)
    assert (config.optim.lr, config.train.seed, config.data.batch_size) == (0.25, 3, 32)
    with pytest.raises(UserError, match="learning_rate"):
        jepa_jax.get_config("quickstart", optim__learning_rate=0.1)


@pytest.mark.slow
def test_the_lines_of_the_readme(tmp_path):
    (tmp_path / "jepa_jax").mkdir()
    program, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    short = program.replace('"train.seed": 1', '"train.max_steps": 20')
    assert short != program
    result = run_python(f"{short}\nassert features.shape[0] == 5 and features.std() > 0", tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/notebook/report.html").exists()

"""Commands that read runs: `checkpoint verify`, and what makes sense next after a run."""

import json
import shlex

from jepa_jax.cli.main import find_command, main
from jepa_jax.cli.runs import next_commands
from jepa_jax.program.checkpoint import Checkpoints
from tests.program.test_checkpoint import make_state


def verify(capsys, folder):
    """Returns the exit code, the lines of JSON and what was said besides."""
    code = main(["checkpoint", "verify", str(folder)])
    out = capsys.readouterr()
    return code, [json.loads(line) for line in out.out.splitlines()], out.err


def test_checkpoints_are_listed_with_the_files_that_are_damaged(tmp_path, capsys):
    for name, steps in (("checkpoints", (1, 2)), ("best", (1,))):
        with Checkpoints(tmp_path / name, keep=2) as checkpoints:
            for step in steps:
                checkpoints.save(step, make_state(step=step), {"step": step})
    code, lines, table = verify(capsys, tmp_path)
    assert code == 0 and lines[-1] == {"checkpoints": 3, "damaged": 0, "whole": True}
    assert [row["checkpoint"] for row in lines[:-1]] == ["checkpoints/step_2", "checkpoints/step_1", "best/step_1"]
    (tmp_path / "best" / "step_1" / "progress" / "metadata").write_text("{}")
    code, lines, table = verify(capsys, tmp_path)
    assert code == 2 and lines[-1] == {"checkpoints": 3, "damaged": 1, "whole": False}
    assert lines[2]["state"] == "damaged" and lines[2]["damage"] == ["progress/metadata: 2 instead of 11 bytes"]
    assert "best/step_1" in table and "progress/metadata: 2 instead of 11 bytes" in table
    assert (tmp_path / "best" / "step_1").is_dir()  # nothing is changed


def test_a_folder_without_checkpoints_is_an_error(tmp_path, capsys):
    code, lines, errors = verify(capsys, tmp_path)
    assert code == 2 and not lines and "holds no checkpoint" in errors


def test_the_commands_that_come_next_can_be_typed_and_name_the_users_own_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"data": {"source": "folder", "dir": "my photos"}}))
    commands = next_commands({"status": "finished", "feature_dim": 8}, tmp_path)
    for command in commands:
        name, *flags = shlex.split(command)
        find_command(name).parse(flags)  # refuses unknown flags
    assert any("--input='my photos'" in command for command in commands)
    assert next_commands({"status": "interrupted"}, tmp_path) == []

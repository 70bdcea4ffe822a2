"""Sub-commands as programs see them: exit codes, streams, help, and answers to mistakes."""

import json
import os
import pathlib
import pty
import signal
import subprocess
import sys

import pytest

from jepa_jax.base.errors import EXIT_DOES_NOT_FIT, Diverged, UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.main import COMMANDS, find_command, main

ROOT = pathlib.Path(__file__).parents[2]


def jepa_jax(*arguments, **options):
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "jepa_jax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)


def on_a_terminal(*arguments):
    """Runs the command with a terminal as standard output; returns what it shows there."""
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jepa_jax", *arguments], stdout=writer, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    os.close(writer)
    shown = b""
    try:
        while part := os.read(reader, 65536):
            shown += part
    except OSError:  # how Linux reports the end of a terminal
        pass
    os.close(reader)
    assert process.wait() == 0
    return shown.decode()


def answer(run):
    """Returns the exit code of a command that does `run`."""
    return Command("test", "Tests.", lambda parser: None, run).main([])


def test_help_lists_every_command_and_imports_neither_jax_nor_numpy():
    program = (
        "import sys; from jepa_jax.cli.main import main; code = main(['--help']); "
        "sys.exit(code or any(name in sys.modules for name in ('jax', 'numpy', 'flax', 'ml_collections')))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_documents_its_flags(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jepa-jax {name} ")
    assert find_command(name).summary in shown and f"jepa-jax {name}" in find_command(name).documentation


def test_the_help_of_a_command_imports_no_jax():
    program = (
        "import sys; from jepa_jax.cli.main import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit as stop: sys.exit(stop.code or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT).returncode == 0


def test_the_help_of_a_script_shows_how_to_start_it(capsys):
    command = Command("profiling/check.py", "Checks.", lambda parser: None, lambda *_: Result([], ""), program="python")
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python profiling/check.py ")


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_scripts_run_the_same_commands(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 8
    name = text.split("`jepa-jax ")[1].split("`")[0]
    result = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and result.stdout.startswith(f"usage: jepa-jax {name} ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "trian: no such command; did you mean train?"),
        (["lr_search"], "did you mean lr-search?"),
        (["zzz"], "jepa-jax --help lists them"),
        ([], "no command"),
        (["train", "--confg=rapid"], "--confg: no such flag; did you mean --config?"),
        (["train", "--work-dir=x", "--config=rapid"], "did you mean --workdir?"),
        (["train", "--config=rapid"], "missing: --workdir"),
        (["train", "--config=rapid", "--workdir=x", "word"], "unexpected argument 'word'"),
        (["train", "--config=rapid", "--workdir=x", "--config.optim.lr"], "write --config.optim.lr=VALUE"),
        (
            ["train", "--config=rapid", "--workdir=x", "--resume=maybe"],
            "--resume=maybe: value should be one of <auto|never|must>",
        ),
        (["train", "--config=rapdi", "--workdir=x"], "rapdi"),
        (["show-summary", "--workdir=x", "--config.optim.lr=1"], "--config.optim.lr: no such flag"),
        (["sweep", "--config=rapid", "--output_json=x", "--repeats=0"], "--repeats=0: 0 is not a positive integer"),
        (["plan", "--config=rapid", "--variants=maybe"], "--variants=maybe: Non-boolean argument to boolean flag"),
        (["compare-profiles", "runs/a"], "give the folders of two runs"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def raises(error):
    def run(arguments, console):
        raise error

    return run


def test_exit_codes():
    assert answer(lambda arguments, console: Result([{}], "")) == 0
    assert answer(lambda arguments, console: Result([{}], "", EXIT_DOES_NOT_FIT)) == 4
    assert answer(raises(UserError("fix this"))) == 2
    assert answer(raises(Diverged("the loss is NaN"))) == 3
    assert answer(raises(KeyboardInterrupt())) == 130
    assert answer(raises(Interrupted(signal.SIGINT))) == 130
    assert answer(raises(Interrupted(signal.SIGTERM))) == 143


def test_a_pipe_gets_json_and_a_terminal_the_table():
    piped = jepa_jax("configs")
    assert piped.returncode == 0
    summaries = json.loads(piped.stdout)["configs"]
    assert "quickstart" in piped.stderr  # the table, for whoever watches

    shown = on_a_terminal("configs")
    assert "{" not in shown
    assert all(name in shown and summary in shown for name, summary in summaries.items())

    last_line = on_a_terminal("configs", "--json").splitlines()[-1]
    assert json.loads(last_line)["configs"] == summaries


def test_shipped_configs_are_listed_with_their_first_line():
    summaries = json.loads(jepa_jax("configs").stdout)["configs"]
    assert set(summaries) == {path.stem for path in (ROOT / "configs").glob("[!_]*.py")}
    for name, summary in summaries.items():
        assert summary and f'"""{summary}\n' in (ROOT / "configs" / f"{name}.py").read_text()


def test_a_refused_run_leaves_no_folder(tmp_path):
    flags = ["--config=quickstart", f"--workdir={tmp_path}/run", "--config.data.source=folder"]
    assert main(["train", *flags, f"--config.data.dir={tmp_path}/none"]) == 2
    assert main(["train", *flags, "--config.optim.learning_rate=1"]) == 2
    assert list(tmp_path.iterdir()) == []

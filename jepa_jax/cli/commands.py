"""What every script ends with: one JSON line on standard output, or one clear message and an exit code."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.config.schema import check_overrides
from jepa_jax.studies.study import Study, StudyRun, split_overrides


def run(command: Callable[[Console], dict[str, Any] | None]) -> int:
    """Runs a command; its result is printed as the last line."""
    # Orbax, Grain and JAX narrate; errors of theirs stay.
    for name in ("absl", "jax", "orbax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    console = Console()
    try:
        result = command(console)
    except Interrupted as stop:
        return stop.exit_code
    except UserError as error:
        console.stop()
        console.error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        console.stop()
        return EXIT_INTERRUPTED
    finally:
        console.stop()
    if result is not None:
        print(json.dumps(result), flush=True)
    return EXIT_OK


def main(entry: Callable[[list[str]], int]) -> None:
    """Main of a script: a flag that cannot be is answered like any other mistake, with one line and exit code 2."""

    def parse(argv: list[str]) -> list[str]:
        try:
            if not any(argument.lstrip("-").startswith("help") for argument in argv):
                check_overrides(argv)
            return flags.FLAGS(argv)
        except flags.IllegalFlagValueError as error:
            text = str(error).replace("=None: Flag", ": flag").replace("have a value other than None", "be given")
        except (UserError, flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
            text = str(error.args[0])
        print(f"error: {text}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR)

    app.run(entry, flags_parser=parse)


def run_with_overrides(command: Callable[[list[str], tuple[str, ...]], int]) -> None:
    """Main of a script whose --config.key=value go on to the runs it starts: `command` gets its arguments and these."""
    try:
        arguments, overrides = split_overrides(sys.argv)
        app.run(lambda argv: command(argv, overrides), argv=arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def conduct_study(study: Study, runs: Sequence[StudyRun], *, timeout: float | None, resume: bool) -> int:
    """Runs a study and prints its table, then its findings as the last line; returns the exit code."""
    from jepa_jax.reports import study_page
    from jepa_jax.studies import findings
    from jepa_jax.studies.rows import StudyRow
    from jepa_jax.studies.study import run_study

    def write_tables(rows: list[StudyRow]) -> None:
        study_page.write_tables(study, rows, findings.find(study.kind, rows))

    code, rows = run_study(study, runs, timeout=timeout, resume=resume, on_rows=write_tables)
    write_tables(rows)
    if rows:
        study_page.write_plot(study, rows)
    found = findings.find(study.kind, rows)
    print(study_page.study_markdown(study, rows, found))
    print(json.dumps(found.facts | {"results": str(study.output_dir / "results.json"), "exit_code": code}))
    return code


def refuse_arguments(argv: list[str]) -> None:
    """Words that are not flags are mistakes: `--config.x 3` loses its value without a sound."""
    if len(argv) > 1:
        print(f"error: unexpected argument {argv[1]!r}; flags are written --name=value", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR)

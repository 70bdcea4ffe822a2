"""What every script ends with: one JSON line on standard output, or one clear message and an exit code."""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from jepa_jax.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, UserError
from jepa_jax.interrupt import Interrupted
from jepa_jax.writers import Console


def run(command: Callable[[Console], dict[str, Any] | None]) -> int:
    """Runs a command; its result is printed as the last line."""
    # Orbax, Grain and JAX narrate; warnings of theirs stay.
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


def refuse_arguments(argv: list[str]) -> None:
    """Words that are not flags are mistakes: `--config.x 3` loses its value without a sound."""
    if len(argv) > 1:
        print(f"error: unexpected argument {argv[1]!r}; flags are written --name=value", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR)

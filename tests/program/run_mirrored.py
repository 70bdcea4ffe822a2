"""Trains the tiny config with a mirror on an S3-compatible server: run_mirrored.py WORKDIR [URL]."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from tests.runs import Silent, run


def main() -> None:
    workdir, *url = sys.argv[1:]
    console = Silent(lambda text: print(text, file=sys.stderr, flush=True))
    overrides = {"train__mirror": url[0]} if url else {}
    summary = run(pathlib.Path(workdir), console, eval__untrained=False, optim__epochs=6.0, **overrides)
    print(summary["params_sha256"])


if __name__ == "__main__":
    main()

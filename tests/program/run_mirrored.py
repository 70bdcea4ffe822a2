"""Trains the tiny config with a mirror on an S3-compatible server: run_mirrored.py WORKDIR [URL [MARKER]].

Stays for ever at the line that begins with MARKER.
"""

import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from tests.runs import Silent, run


def main() -> None:
    workdir, url, marker = (*sys.argv[1:], "", "")[:3]

    def hear(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        while marker and text.startswith(marker):
            signal.pause()

    console = Silent(hear)
    overrides = {"train__mirror": url} if url else {}
    summary = run(pathlib.Path(workdir), console, eval__untrained=False, optim__epochs=6.0, **overrides)
    print(summary["params_sha256"])


if __name__ == "__main__":
    main()

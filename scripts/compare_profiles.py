"""Compare the profiles of two runs, section by section, with intervals.

python scripts/compare_profiles.py runs/a runs/b
"""

import sys

from absl import app, flags

from jepa_jax.base.errors import UserError
from jepa_jax.cli import commands


def main(argv: list[str]) -> int:
    def command(console):
        from jepa_jax.profiling.profile_changes import changes_json, changes_table, compare_profiles, read_profile

        if len(argv) != 3:
            raise UserError(f"{len(argv) - 1} arguments: give the folders of two runs, A and B")
        changes = compare_profiles(*(read_profile(path) for path in argv[1:]))
        for line in changes_table(changes):
            console.line(line)
        return changes_json(changes)

    return commands.run(command)


if __name__ == "__main__":
    try:
        app.run(main, flags_parser=lambda argv: flags.FLAGS(argv))
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

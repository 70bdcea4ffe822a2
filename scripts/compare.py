"""Put runs side by side: figures, evaluations, curves and where their configs differ, as one HTML page.

python scripts/compare.py runs/a runs/b [runs/c ...] [--output=comparison.html]
"""

from absl import flags

from jepa_jax.cli import commands

_OUTPUT = flags.DEFINE_string("output", None, "The page; default: comparison.html beside the first run.")


def main(argv: list[str]) -> int:
    def command(console):
        from jepa_jax.reports.comparison_page import comparison_text, write_comparison

        result = write_comparison(argv[1:], _OUTPUT.value)
        differing = ", ".join(result["differing_keys"]) or "nothing"
        console.line(f"{comparison_text(result['runs'])}\n\ndiffer in: {differing}\npage: {result['output']}")
        return result

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)

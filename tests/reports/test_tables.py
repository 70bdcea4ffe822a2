"""Tables as text: cells cannot break a Markdown table, columns of a terminal are aligned."""

from jepa_jax.reports.tables import markdown_table, text_table


def test_cells_cannot_break_a_markdown_table():
    table = markdown_table(["name", "value"], [["a|b", "1\n2"]], right=["value"])
    assert table == "| name | value |\n| --- | ---: |\n| a\\|b | 1 2 |\n"


def test_columns_of_a_terminal_are_aligned():
    lines = text_table([["", "one"], ["accuracy", "60.0 %"], ["x" * 60, "–"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].startswith("accuracy ") and lines[1].endswith(" 60.0 %")
    assert "x" * 48 in lines[2] and "x" * 49 not in lines[2]

"""Numbers as text."""

from jepa_jax.base.text import data_size, duration, gib, percent, short


def test_numbers_are_short():
    values = {12345: "12,345", 0.03125: "0.03125", 3e-5: "3e-05", 2.0: "2", None: "–", float("nan"): "–"}
    assert {value: short(value) for value in values} == values
    assert percent(71.34) == "71.3 %" and percent("text") == "–"


def test_times_have_the_unit_that_fits():
    values = {0.04: "0.0 s", 59.96: "1 min 00 s", 245: "4 min 05 s", 7620: "2 h 07 min", None: "–"}
    assert {value: duration(value) for value in values} == values


def test_sizes_have_the_unit_that_fits():
    assert gib(2**40) == "1,024.00 GiB" and gib(None) == "–"
    assert data_size(3 * 2**29) == "1.50 GiB" and data_size(12 * 2**20) == "12 MiB" and data_size(None) == "–"

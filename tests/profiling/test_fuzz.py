"""Damaged files of every format are read or refused by one clear error; `profiling/fuzz.py` tries many more."""

import pytest

from profiling.fuzz_cases import check_all, readers
from profiling.fuzz_json import json_files

CASES = 15  # per format
OPTIONAL = {"parquet": "pyarrow", "folder of bands": "tifffile", "tfds": "tensorflow_datasets"}


@pytest.mark.parametrize("name", readers())
def test_damaged_data_are_read_or_refused(tmp_path, name):
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    assert check_all(readers()[name], tmp_path, range(CASES)) == {}


def test_damaged_files_of_runs_are_read_or_refused(tmp_path, tiny_run):
    for name, target in json_files(tiny_run[0]).items():
        assert check_all(target, tmp_path / name, range(CASES)) == {}, name

"""Scaling guides as tables, JSON, Markdown and a plot."""

import dataclasses
import json

import pytest

from jepa_jax.base.text import GIB
from jepa_jax.config.recipe import LadderStep
from jepa_jax.program.config import load_config
from jepa_jax.reports.scale_page import guide_json, guide_text, memory_parts, write_guide
from tests.planning.test_scale_guide import LADDER, line_guide, sequences
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def guide():
    return line_guide(tiny_config(), LADDER, per_image=GIB)[0]


def test_the_parts_of_the_memory_add_up_to_the_need(guide):
    for rung in guide.rungs:
        parts, facts = memory_parts(rung.estimate), rung.estimate.facts
        assert sum(parts.values()) == rung.estimate.need.total
        assert (parts["parameters"], parts["optimizer"]) == (facts.parameter_bytes, facts.optimizer_bytes)


def test_a_copy_by_ema_is_a_part_of_its_own(guide):
    estimate = guide.rungs[0].estimate
    copied = dataclasses.replace(
        estimate.facts, target_bytes=7, argument_bytes=estimate.facts.argument_bytes + 7,
        peak_bytes=estimate.facts.peak_bytes + 7,
    )  # fmt: skip
    other = memory_parts(dataclasses.replace(estimate, facts=copied))
    assert other == {**memory_parts(estimate), "EMA copy": 7, "margin": other["margin"]}


def test_the_tables_show_claims_verdicts_and_flags(guide):
    text = guide_text(guide, "tiny")
    lines = {line.split("  ")[0]: line for line in reversed(text.splitlines())}
    assert text.startswith("Scaling guide: tiny on NVIDIA GeForce RTX 3090")
    assert " 2.7 " in lines["small"] and " 6-7 " in lines["large batch"] and "does not fit" in lines["large batch"]
    assert "--config.data.batch_size=64 --config.train.accum_steps=8" in text
    assert "Rules of thumb" in text and "longest element" not in text and "EMA copy" not in text


def test_there_is_one_json_object_per_row(guide):
    rows = [json.loads(json.dumps(row)) for row in guide_json(guide)]
    ladder = [row for row in rows if row["section"] == "ladder"]
    assert [row["name"] for row in ladder] == ["small", "large batch", "wide"]
    assert ladder[1]["claimed_gb"] == [6.0, 7.0] and ladder[1]["flops_per_sample"] == 10**10
    assert ladder[1]["learning_rates"]["linear"] == pytest.approx(4 * ladder[0]["learning_rates"]["linear"])
    assert [row["name"] for row in rows if row["section"] == "out_of_memory"] == [row.label for row in guide.retreat]
    assert len(rows) == len(ladder) + len(guide.retreat)


def test_sizes_have_rows_and_a_gain_over_the_longest(tmp_path):
    guide, _ = line_guide(sequences(), [LadderStep("small", {})])
    assert [row["size"] for row in guide_json(guide) if row["section"] == "size"] == ["6", "11", "20"]
    assert "with all padded to 20" in guide_text(guide, "sequences")


def test_absent_data_has_sizes_of_unknown_shares():
    absent = sequences(**{"data.dir": "nowhere"})
    guide, _ = line_guide(absent, [LadderStep("small", {})])
    assert [(row.size, row.share) for row in guide.sizes] == [("6", None), ("11", None), ("20", None)]
    text = guide_text(guide, "sequences")
    assert "unknown" in text and "with all padded to" not in text


def test_the_files_are_a_page_with_its_command_and_a_plot(tmp_path, guide):
    with_sizes, _ = line_guide(sequences(), [LadderStep("small", {})])
    doubled, _ = line_guide(load_config("rapid"))
    for name, each in {"ladder": guide, "sizes": with_sizes, "doubled": doubled}.items():
        (tmp_path / name).mkdir()
        write_guide(tmp_path / name, each, name, "jepa-jax scale-guide --config=x")
        page = (tmp_path / name / "scale_guide.md").read_text()
        assert "jepa-jax scale-guide --config=x" in page and "](scale_guide.png)" in page
        assert (tmp_path / name / "scale_guide.png").read_bytes().startswith(b"\x89PNG")
    assert "## Effect of the longest element" not in page

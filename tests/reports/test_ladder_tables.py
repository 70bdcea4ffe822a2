"""Ladders as tables, JSON and parts of the page of a plan."""

import dataclasses
import json

import pytest

from jepa_jax.base.text import GIB
from jepa_jax.config.recipe import LadderStep
from jepa_jax.planning.run_cost import PlanContext
from jepa_jax.program.config import load_config
from jepa_jax.reports.page import render
from jepa_jax.reports.plan_page import plan_page
from jepa_jax.reports.plan_text import (
    ladder_json,
    ladder_tables,
    learning_rates,
    memory_parts,
    plan_json,
    plan_lines,
    table_lines,
)
from tests.planning.line_compiler import CIFAR
from tests.planning.test_ladder import LADDER, line_ladder, sequences
from tests.planning.test_planner import line_plan
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def ladder():
    return line_ladder(tiny_config(), LADDER, per_image=GIB)[0]


def text_of(ladder):
    return "\n".join(line for table in ladder_tables(ladder) for line in table_lines(table))


def test_the_parts_of_the_memory_add_up_to_the_need(ladder):
    for rung in ladder.rungs:
        parts, facts = memory_parts(rung.estimate), rung.estimate.facts
        assert sum(parts.values()) == rung.estimate.need.total
        assert (parts["parameters"], parts["optimizer"]) == (facts.parameter_bytes, facts.optimizer_bytes)


def test_a_copy_by_ema_is_a_part_of_its_own(ladder):
    estimate = ladder.rungs[0].estimate
    copied = dataclasses.replace(
        estimate.facts, target_bytes=7, argument_bytes=estimate.facts.argument_bytes + 7,
        peak_bytes=estimate.facts.peak_bytes + 7,
    )  # fmt: skip
    need = dataclasses.replace(estimate.need, peak=estimate.need.peak + 7)
    other = memory_parts(dataclasses.replace(estimate, facts=copied, need=need))
    assert other == {**memory_parts(estimate), "EMA target": 7}


def test_the_tables_show_claims_verdicts_and_flags(ladder):
    text = text_of(ladder)
    lines = {line.split("  ")[0]: line for line in reversed(text.splitlines())}
    assert " 2.7 " in lines["small"] and " 6-7 " in lines["large batch"] and "does not fit" in lines["large batch"]
    assert "--config.data.batch_size=64 --config.train.accum_steps=8" in text
    assert "rules of thumb" in text and "longest element" not in text and "EMA target" not in text


def test_the_plan_holds_its_ladder_in_text_json_and_page(ladder):
    plan, _ = line_plan(variants=False)
    plan = dataclasses.replace(plan, ladder=ladder)
    assert "memory of each rung" in "\n".join(plan_lines(plan, PlanContext(CIFAR), "rapid"))
    assert "Memory of each rung" in render(plan_page([plan], PlanContext(CIFAR), "rapid"))
    found = json.loads(json.dumps(plan_json(plan, PlanContext(CIFAR))["ladder"]))
    rungs = found["rungs"]
    assert [row["label"] for row in rungs] == ["small", "large batch", "wide"]
    assert rungs[1]["claimed_gb"] == [6.0, 7.0] and rungs[1]["flops_per_step"] == 64 * 10**10
    assert rungs[1]["learning_rates"]["linear"] == pytest.approx(4 * rungs[0]["learning_rates"]["linear"])
    assert [row["label"] for row in found["out_of_memory"]] == [row.label for row in ladder.retreat]
    assert found["sizes"] == []


def test_rates_follow_from_the_reference_batch():
    config = load_config("rapid", {"data.batch_size": 1024, "optim.lr": 0.2, "optim.reference_batch": 512})
    rates = {rung.estimate.batch_size: learning_rates(rung.estimate) for rung in line_ladder(config)[0].rungs}
    assert sorted(rates) == [1024, 2048, 4096, 8192]
    assert (rates[2048]["linear"], rates[2048]["sqrt"]) == pytest.approx((0.8, 0.4))
    own = {"none": 0.2, "linear": 0.8, "sqrt": 0.4}[config.optim.batch_scaling]
    assert rates[2048]["config"] == pytest.approx(own)


def test_sizes_have_rows_and_a_gain_over_the_longest():
    ladder, _ = line_ladder(sequences(), [LadderStep("small", {})])
    assert [row["size"] for row in ladder_json(ladder)["sizes"]] == ["6", "11", "20"]
    assert "with all padded to 20" in " ".join(text_of(ladder).split())


def test_absent_data_has_sizes_of_unknown_shares():
    absent = sequences(**{"data.dir": "nowhere"})
    ladder, _ = line_ladder(absent, [LadderStep("small", {})])
    assert [(row.size, row.share) for row in ladder.sizes] == [("6", None), ("11", None), ("20", None)]
    text = " ".join(text_of(ladder).split())
    assert "unknown" in text and "with all padded to" not in text

"""The adviser on memory, with a compiler whose memory is known."""

import pytest

from jepa_jax.planning.planner import Planner, combinations
from jepa_jax.planning.step_compiler import Request
from jepa_jax.program.config import load_config
from jepa_jax.reports.plan_page import frontier_chart
from jepa_jax.reports.plan_text import frontier_table, table_lines
from tests.planning.line_compiler import GIB, TABLE, LineCompiler


@pytest.fixture(scope="module")
def frontier():
    request = Request(load_config("rapid", {"data.batch_size": 4096}), TABLE["rtx4090"])
    return Planner(LineCompiler(), TABLE).frontier(request, 10 * GIB)


def test_every_policy_is_compiled_with_every_division_and_the_config_comes_first(frontier):
    assert len(frontier.points) == 9 and frontier.points[0].label == "remat none"
    patches = Request(load_config("quickstart", {"model.name": "patchnet"}), TABLE["rtx4090"])
    policies = {changes["train.remat"] for _, changes in combinations(patches)}
    assert policies == {"none"}  # nothing to recompute


def test_no_combination_beats_one_of_the_frontier_and_the_advice_keeps_to_the_budget(frontier):
    for point in frontier.best:
        assert not any(frontier.beats(other, point) for other in frontier.points)
    advice = frontier.advice
    assert advice is not None and advice.need.total <= 10 * GIB
    inside = [point for point in frontier.points if point.need.total <= 10 * GIB]
    assert advice.speed.images_per_sec == max(point.speed.images_per_sec for point in inside)


def test_the_advice_is_printed_with_its_flags_and_drawn(frontier):
    text = "\n".join(table_lines(frontier_table(frontier)))
    assert "advice: " in text and "--config.train.remat=" in text and text.count("  *") >= len(frontier.best)
    (chart,) = frontier_chart(frontier).parts
    assert chart.legend == ["none is better in both", "remat none", "remat light", "remat full"]
    assert [text for layer in chart.layers for _, text in layer.levels] == ["budget"]


def test_a_budget_that_nothing_keeps_to_is_said():
    request = Request(load_config("rapid"), TABLE["rtx4090"])
    frontier = Planner(LineCompiler(), TABLE).frontier(request, GIB // 2)
    assert frontier.advice is None and "use a smaller batch or model" in frontier_table(frontier).note

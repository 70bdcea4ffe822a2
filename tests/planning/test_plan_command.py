"""The options of `jepa-jax plan`, and plans against measurements."""

import dataclasses
import io

import pytest

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.planning import plan_command
from jepa_jax.planning.plan_command import PlanCheck, check_flops, check_peak
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.run_cost import PlanContext, run_cost
from jepa_jax.planning.step_compiler import Request
from jepa_jax.program.config import load_config
from jepa_jax.reports.plan_page import plan_page
from jepa_jax.reports.plan_text import failed_json, plan_json, plan_lines
from tests.planning.line_compiler import CIFAR, TABLE, LineCompiler
from tests.planning.test_planner import LABELS, line_plan

PLAIN = PlanContext(CIFAR)


def test_the_step_of_a_masked_autoencoder_agrees_with_xla():
    small = {"model.name": "vit", "model.width": 96, "model.depth": 2, "model.heads": 3, "data.batch_size": 32}
    config = load_config("mae_cifar10", {**small, "train.precision": "float32"})
    assert abs(check_flops(config, CIFAR).error_percent) < 3


def test_an_error_is_relative_to_the_measurement():
    assert PlanCheck("bytes", 110.0, 100.0).error_percent == pytest.approx(10)


def test_a_peak_is_checked_only_on_the_gpu_it_is_for():
    plan = Planner(LineCompiler(), TABLE).plan(Request(load_config("rapid"), TABLE["h100"]), variants=False)
    with pytest.raises(UserError, match="the plan is for 1 x NVIDIA H100 80GB HBM3, this machine has 8 x cpu"):
        check_peak(plan, CIFAR)


def test_mistakes_are_answered_before_anything_is_compiled(tmp_path):
    for options, message in (
        (plan_command.PlanOptions(("rtx9999",)), "--gpu=rtx9999: unknown"),
        (plan_command.PlanOptions(("h100",), topology="8"), "--topology=8"),
        (plan_command.PlanOptions(("h100",), topology="1x1x8", batch_sizes=(500,)), "use a multiple of 8"),
    ):
        with pytest.raises(UserError, match=message):
            plan_command.make_plans(load_config("rapid"), options, Console(io.StringIO()))


def test_prices_are_read_by_gpu_and_mistakes_are_named(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text("rtx4090 = 0.45\nh100 = 3")
    prices = plan_command.read_prices(str(file), TABLE)
    plan, _ = line_plan(variants=False)
    dear = run_cost(plan, PlanContext(CIFAR, price_per_hour=9.0, prices=prices))
    assert dear.prices[0] == pytest.approx(0.45 * dear.seconds[0] / 3600)
    for text, message in (("rtx9 = 1", "rtx9: no GPU of the table"), ("h100 = 'x'", "h100 = 'x': a price per hour")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            plan_command.read_prices(str(file), TABLE)


def test_the_features_that_evaluation_holds_are_planned():
    plan, _ = line_plan(variants=False)
    assert plan_command.feature_numbers(load_config("rapid")) == 512
    text = "\n".join(plan_lines(plan, PlanContext(CIFAR, feature_numbers=512), "rapid"))
    assert "evaluation (k-NN and probe hold all features on one device)" in text and "fits" in text
    huge = PlanContext(dataclasses.replace(CIFAR, num_train=14_000_000), feature_numbers=2048)
    assert "set config.eval.max_images" in "\n".join(plan_lines(plan, huge, "rapid"))


class Failing(LineCompiler):
    """Cannot compile for a T4, nor in float32."""

    def all_facts(self, requests):
        if any(request.gpu.key == "t4" or request.config.train.precision == "float32" for request in requests):
            raise UserError("XLA could not compile")
        return super().all_facts(requests)


def each_plan(*keys):
    requests = [Request(load_config("rapid"), TABLE[key]) for key in keys]
    line, out = Failing(), io.StringIO()
    found = plan_command.each_plan(Planner(line, TABLE), requests, plan_command.PlanOptions(()), Console(out))
    return *found, line, out.getvalue()


def test_a_gpu_that_fails_gets_a_row_with_its_reason_and_the_others_their_plans():
    (plan,), (failed,), _, said = each_plan("t4", "rtx3090")
    assert plan.request.gpu.key == "rtx3090" and "t4: XLA could not compile" in said
    assert [row.label for row, _ in plan.largest] == LABELS[:-1]  # without the variant in float32
    row = failed_json(failed)
    assert (row["gpu"], row["verdict"], row["fits"]) == ("t4", "does not compile", False)
    assert row["error"] == "XLA could not compile"
    assert "T4: does not compile (XLA could not compile)" in str(plan_page([plan], PLAIN, "rapid", [failed]))
    with pytest.raises(UserError, match="XLA could not compile"):
        each_plan("t4")


def test_many_gpus_are_planned_without_a_search():
    plans, _, line, _ = each_plan("t4", "rtx4090", "h100", "a6000", "rtx3090")
    assert [plan.request.gpu.key for plan in plans] == ["rtx4090", "h100", "a6000", "rtx3090"] and len(line.asked) == 4
    assert plan_json(plans[0], PLAIN)["largest_batch"] is None
    assert "not searched" in "\n".join(plan_lines(plans[0], PLAIN, "rapid"))

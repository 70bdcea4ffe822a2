"""Plans against measurements."""

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.planning.plan_check import PlanCheck, check_flops, check_peak
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request
from jepa_jax.program.config import load_config
from tests.planning.line_compiler import CIFAR, TABLE, LineCompiler


def test_the_step_of_a_masked_autoencoder_agrees_with_xla():
    config = load_config("mae_cifar10", {"data.batch_size": 32, "train.precision": "float32"})
    assert abs(check_flops(config, CIFAR).error_percent) < 3


def test_an_error_is_relative_to_the_measurement():
    check = PlanCheck("bytes", 110.0, 100.0)
    assert check.error_percent == pytest.approx(10) and check.line() == "check: bytes: predicted 110, 100 (+10.00 %)"


def test_a_peak_is_checked_only_on_the_gpu_it_is_for():
    plan = Planner(LineCompiler(), TABLE).plans([Request(load_config("rapid"), TABLE["h100"])], variants=False)[0]
    with pytest.raises(UserError, match="the plan is for 1 x NVIDIA H100 80GB HBM3, this machine has 8 x cpu"):
        check_peak(plan, CIFAR)

"""The fit of shares: planted ones are found, and unseen measurements are predicted."""

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.compiled.kernels import ATTENTION, CONVOLUTION, ELEMENTWISE, MATMUL, Kernel
from jepa_jax.planning.factors import TRAFFIC
from jepa_jax.runtime.hardware import load_table
from profiling.fit_speed import (
    Measurement,
    card_measurements,
    effect_names,
    error_summary,
    fit,
    left_out_errors,
    refitted,
)

TABLE = load_table()
PLANTED = {CONVOLUTION: 0.7, MATMUL: 0.9, ATTENTION: 0.4, TRAFFIC: 0.5}
ARCHITECTURE = {"rtx3090": 1.0, "rtx4090": 0.8}  # of the share of convolutions


def measured(gpu, products, traffic, group, noise=0.0):
    kernels = tuple(Kernel(kind, "bf16", round(flops), 0, 10**6, "") for kind, flops in products.items())
    kernels += (Kernel(ELEMENTWISE, "", 0, 0, round(traffic), ""),)
    one = Measurement(TABLE[gpu], "train", "eager nhwc", "1.12", group, 1, 1.0, kernels)
    shares = {**PLANTED, CONVOLUTION: PLANTED[CONVOLUTION] * ARCHITECTURE[gpu]}
    speed = np.exp(noise) / one.predicted_seconds(shares)
    return Measurement(TABLE[gpu], "train", "eager nhwc", "1.12", group, 1, speed, kernels)


@pytest.fixture(scope="module")
def measurements():
    random = np.random.default_rng(0)
    made = []
    for group in range(8):
        products = {kind: 10 ** random.uniform(11, 12.5) for kind in (CONVOLUTION, MATMUL, ATTENTION)}
        traffic = 10 ** random.uniform(9, 10.5)
        made += [measured(gpu, products, traffic, group, 0.01 * random.normal()) for gpu in ARCHITECTURE]
    return made


@pytest.fixture(scope="module")
def found(measurements):
    return fit(measurements, effect_names(measurements))


def test_planted_shares_are_found(measurements, found):
    assert found.shares(measurements[0]) == pytest.approx(PLANTED, rel=0.1)
    assert found.shares(measurements[1])[CONVOLUTION] == pytest.approx(0.56, rel=0.1)


def test_unseen_measurements_are_predicted_and_one_that_is_off_is_seen(measurements, found):
    summary = error_summary(left_out_errors(measurements, found))
    assert summary["median_abs_error"] < 0.03 and summary["p90_abs_error"] < 0.1
    wrong = [*measurements[:-1], measured("rtx4090", {CONVOLUTION: 1e12}, 1e9, "odd", noise=0.5)]
    errors = left_out_errors(wrong, fit(wrong, effect_names(wrong)))
    assert errors[-1] == pytest.approx(-0.5, abs=0.1)  # the prediction is the slower one


def test_layouts_differ_in_convolutions_and_versions_in_attention():
    card = TABLE["rtx4090"]
    eager = Measurement(card, "infer", "eager nchw", "1.13", "", 1, 1.0, ())
    newer = Measurement(card, "infer", "eager nhwc", "2.40", "", 1, 1.0, ())
    assert eager.effects[MATMUL] == newer.effects[MATMUL]
    assert eager.effects[ATTENTION] != newer.effects[ATTENTION]
    assert eager.effects[CONVOLUTION] != newer.effects[CONVOLUTION]


def test_cards_of_the_check_are_fitted_into_the_table(measurements):
    ones = [m for m in measurements if m.gpu.key == "rtx4090"]
    rows = [
        {"config": str(m.group), "batch_size": 1, "samples_per_sec": m.samples_per_sec,
         "kernels": [kernel._asdict() for kernel in m.kernels]}
        for m in ones
    ]  # fmt: skip
    card = {"gpu": "rtx4090", "versions": {"jax": "0.10.2"}, "measurements": rows}
    old = {"source": "elsewhere", "train": {"shares": {"ampere": PLANTED}}, "infer": {}}
    new = refitted(card_measurements(card, TABLE), old)
    found = new["train"]["shares"]
    assert found["ampere"] == PLANTED and new["infer"] == {} and new["train"]["software"] == "XLA of jax 0.10.2"
    assert found["ada"][TRAFFIC] == pytest.approx(PLANTED[TRAFFIC], rel=0.15)
    assert found["ada"][CONVOLUTION] == pytest.approx(0.8 * PLANTED[CONVOLUTION], rel=0.15)


def test_a_file_without_a_known_gpu_is_refused():
    with pytest.raises(UserError, match="no measured speeds"):
        card_measurements({"gpu": None, "identity": {"device": "cpu"}, "measurements": []}, TABLE)

"""Seconds of kernels, and the errors that a prediction carries."""

import math

import pytest

from jepa_jax.compiled.kernels import CONVOLUTION, ELEMENTWISE, KINDS, MATMUL, Kernel
from jepa_jax.planning.factors import FULL, LAUNCH_SECONDS, TRAFFIC, factors_of, kernel_seconds, predict
from jepa_jax.runtime.hardware import load_table

TABLE = load_table()
CARD = TABLE["rtx3090"]  # 71 TFLOP/s, 936 GB/s


def test_a_kernel_takes_the_longer_of_its_products_and_its_traffic():
    products = Kernel(MATMUL, "bf16", 71 * 10**9, 0, 936 * 10**5, "")
    assert kernel_seconds(products, CARD, FULL) == pytest.approx(1e-3)
    assert kernel_seconds(products._replace(bytes=936 * 10**7), CARD, FULL) == pytest.approx(1e-2)
    assert kernel_seconds(products, CARD, {**FULL, MATMUL: 0.5}) == pytest.approx(2e-3)
    assert kernel_seconds(products._replace(dtype="f32"), CARD, FULL) == pytest.approx(71 / 35.6 * 1e-3)
    units = 82 * 128 * 1.695e9
    assert kernel_seconds(Kernel(ELEMENTWISE, "", 0, 10**9, 1, ""), CARD, FULL) == pytest.approx(2e9 / units)


def test_kernels_run_one_after_the_other():
    """The maximum of all products and all traffic would be too optimistic."""
    kernels = [Kernel(CONVOLUTION, "bf16", 10**12, 0, 1, "", runs=2), Kernel(ELEMENTWISE, "", 0, 0, 10**9, "", runs=3)]
    made = predict(kernels, CARD, samples=10, exchange_seconds=0.5, shares=FULL)
    seconds = {CONVOLUTION: 2 / 71, ELEMENTWISE: 3 / 936, "launches": 5 * LAUNCH_SECONDS, "exchange": 0.5}
    assert made.parts == pytest.approx(seconds)
    assert made.images_per_sec == pytest.approx(10 / sum(seconds.values())) and made.limit == "exchange"


def test_no_prediction_is_faster_than_its_bound():
    for card in TABLE.values():
        for kind in KINDS:
            made = predict([Kernel(kind, "bf16", 10**12, 0, 10**6, "")], card, samples=1)
            assert made.seconds >= made.bound_seconds > 0
            low, high = made.predicted
            assert low <= made.images_per_sec <= high <= made.bound_images_per_sec


def test_the_time_of_what_xla_computes_again_is_known():
    kernels = [Kernel(ELEMENTWISE, "", 0, 0, 936 * 10**6, "", runs=4, recomputed=1)]
    assert predict(kernels, CARD, samples=1, shares=FULL).recomputing_seconds == pytest.approx(1e-3)


def test_every_gpu_has_factors_and_unmeasured_architectures_a_larger_error():
    for gpu in TABLE.values():
        for mode in ("train", "infer"):
            shares = factors_of(gpu, mode).shares
            geforce = 1.5 if "GeForce" in gpu.name else 0.9  # above their advertised clock
            assert all(0.1 < shares[kind] <= geforce for kind in (*KINDS, TRAFFIC) if kind in shares)
            assert TRAFFIC in shares
    # Training was measured on one card alone.
    assert not factors_of(TABLE["rtx4090"]).measured and factors_of(TABLE["rtx4090"], "infer").measured
    assert not factors_of(TABLE["a6000"]).measured  # the same architecture, another clock
    known, unknown = factors_of(TABLE["rtx3090"]), factors_of(TABLE["h100"])
    assert known.measured and not unknown.measured
    assert unknown.p90_error == pytest.approx(2 * known.p90_error)
    made = predict([Kernel(ELEMENTWISE, "", 0, 0, 10**9, "")], TABLE["h100"], samples=1)
    assert made.images_per_sec / made.predicted[0] == pytest.approx(math.exp(unknown.p90_error))
    assert "doubled" in made.error_text

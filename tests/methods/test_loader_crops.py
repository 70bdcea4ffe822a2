"""Every method learns from crops that the loader cuts out of full photographs."""

import os
import signal

import jax
import jax.numpy as jnp
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.data.contract import abstract_batch, image_spec
from jepa_jax.data.photos.crops import batch_spec
from jepa_jax.methods.contract import build_method
from tests.data.photos.pictures import write_photos
from tests.runs import Silent, run
from tests.tiny import tiny_config, tiny_masked_config

CONFIGS = {
    "image_jepa": lambda **o: tiny_config(method__views=3, method__view_groups=("small",), method__small__count=4,
                                          method__small__crop__size=8, **o),
    "byol": lambda **o: tiny_config(method__name="byol", **o),
    "simclr": lambda **o: tiny_config(method__name="simclr", method__view_groups=("second",), **o),
    "simsiam": lambda **o: tiny_config(method__name="simsiam", **o),
    "barlow_twins": lambda **o: tiny_config(method__name="barlow_twins", **o),
    "dino": lambda **o: tiny_config(method__name="dino", method__prototypes=16, **o),
    "ijepa": lambda **o: tiny_masked_config("ijepa", **o),
    "mae": lambda **o: tiny_masked_config("mae", **o),
    "hjepa": lambda **o: tiny_masked_config("hjepa", **o),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_needs_the_crops_alone(name):
    """The batch has no "image": a method that read it would fail."""
    config = CONFIGS[name](data__crops="loader", data__source="folder")
    method = build_method(config, total_steps=10)
    sample = {"image": jnp.zeros((4, 16, 16, 3), jnp.uint8)}
    spec = batch_spec(config, image_spec(16, labelled=False))
    assert "image" not in spec and len(spec) == 1 + len(config.view_groups)

    def loss(batch):
        model = method.init(jax.random.key(0), sample)
        target = method.init(jax.random.key(0), sample) if method.ema else None
        return method.loss(model, target, batch, jax.random.key(1), jnp.zeros([], jnp.int32)).loss

    assert jax.eval_shape(loss, abstract_batch(spec, 4)).shape == ()


def test_a_method_without_loader_views_and_a_resident_set_are_refused():
    for overrides, why in (
        ({"method__name": "tests.fixtures.byol:Byol"}, "makes no views that a loader can cut"),
        ({"data__pipeline": "device"}, "reads them once; use grain"),
    ):
        with pytest.raises(UserError, match=why):
            tiny_config(data__crops="loader", **overrides)


@pytest.mark.slow
def test_training_on_photographs_resumes_bit_for_bit_with_workers(tmp_path):
    write_photos(tmp_path / "photos", 60)
    photos = dict(data__source="folder", data__dir=str(tmp_path / "photos"), data__crops="loader", data__num_train=48,
                  data__num_test=0, data__num_workers=2)  # fmt: skip
    whole = run(tmp_path / "whole", **photos)
    assert whole["steps"] == 6 and whole["skipped_images"] == 0 and (tmp_path / "whole/views.png").exists()

    def interrupt(text):
        if text.startswith("epoch 1"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(tmp_path / "cut", Silent(interrupt), **photos)
    photos["data__num_workers"] = 1
    resumed = run(tmp_path / "cut", resume="must", **photos)
    assert resumed["params_sha256"] == whole["params_sha256"]

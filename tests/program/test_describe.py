"""What a config describes, without labels and with numbers that are not trained."""

import numpy as np
import pytest

from jepa_jax.program.describe import describe
from tests.sequence_methods import padded_config
from tests.tiny import tiny_config


def test_parameters_are_counted_by_module_and_kind():
    result = describe(tiny_config())
    filters = 4 * 4 * 3 * 8  # of the whitening stem, not trained
    assert result["params_total"] == result["params_trainable"] + filters
    assert sum(result["params_by_module"].values()) == result["params_trainable"]
    assert result["params_probe"] == 16 * 10 + 10 and result["feature_dim"] == 16
    assert (result["steps_per_epoch"], result["steps_total"]) == (6, 12)


def test_unlabelled_images_of_one_channel_have_no_probe(tmp_path):
    images = np.zeros((96, 16, 16, 1), np.uint8)
    np.savez(tmp_path / "set.npz", x_train=images, x_test=images)
    one_channel = dict(data__channels=1, data__augment__mean=(0.5,), data__augment__std=(0.2,))
    colour = dict(data__augment__grayscale__probability=0.0, data__augment__jitter__probability=0.0)
    source = dict(data__source="npz", data__dir=str(tmp_path / "set.npz"))
    result = describe(tiny_config(**source, **one_channel, **colour))
    assert (result["params_probe"], result["feature_dim"], result["images_per_epoch"]) == (0, 16, 96)


@pytest.mark.slow
def test_macs_of_a_known_encoder_are_the_published_ones():
    macs = describe(tiny_config(model__name="resnet18", data__image_size=32))["encoder_macs_per_image"]
    assert macs == pytest.approx(0.5554e9, rel=1e-3)  # ResNet-18 for 32 pixels, without its last layer


def test_a_config_whose_data_is_not_there_is_described(tmp_path):
    result = describe(padded_config(data__dir=str(tmp_path / "absent")))
    assert result["data_found"] is False and result["params_total"] > 0 and result["flops_per_image"] > 0
    assert (result["feature_dim"], result["images_per_epoch"]) == (None, 64)

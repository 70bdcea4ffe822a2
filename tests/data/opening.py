"""Opens sources as a config names them, and reads all of them."""

import pickle

import numpy as np

from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_source


def config(source, directory, **kwargs):
    return DataConfig(source=source, dir=str(directory), **kwargs)


def opened(source, directory, split="train", **kwargs):
    return open_source(config(source, directory, **kwargs), split)


def everything(source):
    return source.batch(np.arange(len(source)))


def assert_survives_pickling(source):
    data = pickle.dumps(source)
    assert len(data) < 3000
    np.testing.assert_array_equal(everything(pickle.loads(data))["image"], everything(source)["image"])

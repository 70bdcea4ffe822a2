"""Programs that tests share, so that what several of them compute is traced and compiled once per process."""

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from jax.sharding import Mesh

from jepa_jax.base.classes import references
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import flatten
from jepa_jax.program import build
from jepa_jax.training import setup

# Keys that decide what is looked at and written and who loads the data, not what is computed.
_OF_HOST = ("log.", "profile.", "train.checkpoint_", "eval.untrained", "eval.every_", "eval.knn_every_")
_OF_HOST += ("data.num_workers", "data.worker_", "data.prefetch")
_REMEMBERED = 8
_programs: collections.OrderedDict[str, build.Program] = collections.OrderedDict()


def build_program(
    config: Config, *, num_train: int, num_classes: int, sample: Mapping[str, Any], mesh: Mesh
) -> build.Program:
    """Returns what the function of the package does, or the program of another test that computes the same.

    A program with a class of a test in it, or with weights of elsewhere, is always built: tests change those.
    """
    values = {name: value for name, value in flatten(config).items() if not name.startswith(_OF_HOST)}
    size: dict[str, Any] = dict(num_train=num_train, num_classes=num_classes)
    source = values.pop("data.source")
    if values.get("model.init_from") or list(references(values.values())):
        return build.build_program(config, **size, sample=sample, mesh=mesh)
    shapes = {name: (array.shape, array.dtype) for name, array in sample.items()}
    key = repr((values, source, size, shapes, mesh.shape, mesh.device_ids.tolist()))
    program = _programs.pop(key, None) or build.build_program(config, **size, sample=sample, mesh=mesh)
    _programs[key] = program
    if len(_programs) > _REMEMBERED:
        _programs.popitem(last=False)
    return program


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Lets runs inside the block share their programs."""
    with mock.patch.object(setup, "build_program", build_program):
        yield

"""The scalar metrics that a training step returns."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepMetrics(Mapping[str, jax.Array]):
    """Scalar metrics of a step by name, held in one array: to read many small arrays takes longer than to read one."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    packed: jax.Array

    @classmethod
    def of(cls, metrics: Metrics) -> "StepMetrics":
        return cls(tuple(metrics), jnp.stack([jnp.asarray(value, jnp.float32) for value in metrics.values()]))

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.names:
            raise KeyError(name)
        return self.packed[self.names.index(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.names  # also where the metrics are abstract

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def floats(self) -> dict[str, float]:
        """Returns the values by name; reads them from the device in one go, faster than `jax.device_get`."""
        with jax.transfer_guard_device_to_host("allow"):
            return dict(zip(self.names, np.asarray(self.packed).tolist(), strict=True))

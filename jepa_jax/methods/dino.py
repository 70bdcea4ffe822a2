"""DINO: self-distillation with a slowly following teacher, whose outputs are centred and sharpened.

Reference: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021. The defaults are the
paper's for ViT-S, without its local crops, which are a group of views; what it gives in epochs is a part of the run.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.config.augment import Operations, ViewGroup
from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import PROBABILITY, Problem, following, key
from jepa_jax.losses.cosine import unit
from jepa_jax.losses.dino import dino_loss
from jepa_jax.methods.contract import Batch, Ema, Output, ParamGroup
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.methods.schedules import cosine, linear
from jepa_jax.models.rngs import init_rngs


@dataclasses.dataclass(frozen=True)
class DinoConfig(NamedGroup):
    num_views: ClassVar[int] = 2

    view_groups: tuple[str, ...] = key(
        (),
        "names of groups of views that only the student sees, e.g. local; each has keys of its own",
        members=following(ViewGroup, Operations, "data.augment"),
    )
    head: tuple[int, ...] = key((2048, 2048), "hidden widths of the head, with GELU", least=1)
    bottleneck: int = key(256, "width before the last layer, where vectors get length 1", least=1)
    prototypes: int = key(65536, "outputs of the last layer, whose columns have length 1", least=2)
    student_temperature: float = key(0.1, "divisor of the student's logits", least=1e-3)
    teacher_temperature_start: float = key(0.04, "divisor of the teacher's logits at the first step", least=1e-3)
    teacher_temperature: float = key(0.07, "divisor of the teacher's logits after its warm-up", least=1e-3)
    teacher_warmup: float = key(0.3, "part of the run in which the teacher's temperature rises linearly", **PROBABILITY)
    centre_momentum: float = key(0.9, "momentum of the mean of the teacher's logits", **PROBABILITY)
    frozen_last_layer: float = key(0.01, "part of the run, at its start, in which the last layer stays", **PROBABILITY)
    ema_start: float = key(0.996, "momentum of the teacher at the first step", **PROBABILITY)
    ema_end: float = key(1.0, "momentum of the teacher at the last step, reached by half a cosine", **PROBABILITY)

    def problems(self, config: Config) -> Iterator[Problem]:
        for name in ("teacher_temperature_start", "teacher_temperature"):
            if getattr(self, name) > self.student_temperature:
                limit = f"above method.student_temperature = {self.student_temperature}"
                yield Problem(f"method.{name}", f"{limit}: a teacher that is not sharper than its student collapses")
        for name, group in config.view_groups.items():
            yield from group.colour_problems(config.data.channels, f"method.{name}")
            if group.role != "context":
                yield Problem(f"method.{name}.role", "the teacher sees the views of data.augment alone; use context")


class DinoHead(nnx.Module):
    """Applies an MLP, scales its output to length 1 and compares it with prototypes of length 1; returns float32."""

    def __init__(self, inputs: int, config: Any, *, dtype: Any, rngs: nnx.Rngs):
        sizes = [inputs, *config.head, config.bottleneck]
        initial = nnx.initializers.truncated_normal(0.02)
        self.layers = nnx.List([
            nnx.Linear(i, o, kernel_init=initial, dtype=dtype, rngs=rngs)
            for i, o in zip(sizes[:-1], sizes[1:], strict=True)
        ])  # fmt: skip
        self.last = nnx.Linear(config.bottleneck, config.prototypes, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b inputs"]) -> Float[Array, "b prototypes"]:
        for layer in self.layers[:-1]:
            x = jax.nn.gelu(layer(x), approximate=False)
        x = unit(self.layers[-1](x).astype(jnp.float32))
        prototypes = unit(self.last.kernel[...].T).T  # the direction of each column; its length means nothing
        return (x.astype(self.last.dtype) @ prototypes.astype(self.last.dtype)).astype(jnp.float32)


class Centre(nnx.Variable):
    """Running mean of the teacher's logits: part of the state, not trained."""


class Dino(ImageMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = DinoConfig

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        own = self.config
        self.ema = Ema(("encoder", "head"), cosine(own.ema_start, own.ema_end, total_steps))
        self.teacher_temperature = linear(
            own.teacher_temperature_start, own.teacher_temperature, round(own.teacher_warmup * total_steps)
        )
        if frozen := round(own.frozen_last_layer * total_steps):
            self.param_groups = (ParamGroup("^head/last/", frozen_steps=frozen),)

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = init_rngs(key)
        encoder = self.encoder(sample, rngs)
        head = DinoHead(encoder.feature_dim, self.config, dtype=self.dtype, rngs=rngs)
        return EncoderWith(encoder, head=head, centre=Centre(jnp.zeros(self.config.prototypes)))

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        views = self.batch_views(batch, key, 2)
        local = [
            self.batch_views(batch, jax.random.fold_in(key, index), group.count, name)
            for index, (name, group) in enumerate(self.run_config.view_groups.items())
        ]
        with jax.named_scope("encoder"):
            encoded = [self.encode(model.encoder, view) for same_size in (views, *local) for view in same_size]
        with jax.named_scope("projector"):
            student = jnp.stack([model.head(x) for x, _ in encoded])  # [V, B, K]
        with jax.named_scope("target"):
            slow = [self.encode(target.encoder, view) for view in views]
            teacher = jnp.stack([target.head(x) for x, _ in slow])
        with jax.named_scope("loss"):
            centre, temperature = model.centre[...], self.teacher_temperature(step)
            loss, terms = dino_loss(
                student,
                teacher,
                centre,
                student_temperature=self.config.student_temperature,
                teacher_temperature=temperature,
            )
            # Over the global batch, also where it is split over devices; this step's loss has read the centre before.
            momentum = self.config.centre_momentum
            model.centre[...] = momentum * centre + (1 - momentum) * jnp.mean(teacher, axis=(0, 1))
        read = slow if self.run_config.eval.weights == "target" else encoded
        return Output(loss, terms, read[0][1])

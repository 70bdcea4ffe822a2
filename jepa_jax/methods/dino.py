"""DINO: self-distillation with a slowly following teacher, whose outputs are balanced and sharpened.

References: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021; what DINOv2 adds
(Oquab et al., TMLR 2024) are choices: hidden patches (iBOT), KoLeo and Sinkhorn-Knopp. The defaults are DINO's for
ViT-S, without its local crops, which are a group of views; what it gives in epochs is a part of the run.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from jepa_jax.config.augment import FurtherViews, Operations
from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import PROBABILITY, Group, Problem, following, key
from jepa_jax.losses.cosine import unit
from jepa_jax.losses.dino import dino_loss, masked_patch_loss, sinkhorn
from jepa_jax.losses.koleo import koleo_loss
from jepa_jax.methods.contract import Batch, Ema, ParamGroup, Terms
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.methods.schedules import cosine, linear
from jepa_jax.methods.whole_batch import Encoded, WholeBatchMethod
from jepa_jax.models.pooling import pooled
from jepa_jax.models.rngs import init_rngs
from jepa_jax.models.tokens import take_tokens
from jepa_jax.models.vit import Hidden, VitConfig


@dataclasses.dataclass(frozen=True)
class CentreKeys(Group):
    centre_momentum: float = key(0.9, "momentum of the mean of the teacher's logits", **PROBABILITY)


@dataclasses.dataclass(frozen=True)
class SinkhornKeys(Group):
    sinkhorn_steps: int = key(3, "times that prototypes and images are balanced in turn", least=1)


@dataclasses.dataclass(frozen=True)
class PatchKeys(Group):
    """Hidden patches, as in iBOT: the student predicts what the teacher says of them."""

    patch_weight: float = key(1.0, "weight of the loss of hidden patches; 0 = none are hidden", least=0)
    masked_images: float = key(0.5, "share of the teacher's views that the student sees in part", **PROBABILITY)
    masked_share: tuple[float, ...] = key(
        (0.1, 0.5), "smallest and largest share of hidden patches, in one block", least=0, most=1, length=2,
        increasing=True,
    )  # fmt: skip

    def problems(self, config: Config) -> Iterator[Problem]:
        if not isinstance(config.model, VitConfig):
            yield Problem("method.patches", "needs patches to hide; use a model of them, e.g. vit_tiny, or none")


@dataclasses.dataclass(frozen=True)
class DinoConfig(NamedGroup):
    views: int = key(2, "views per image that data.augment describes; the teacher sees them", least=1)
    view_groups: tuple[str, ...] = key(
        (),
        "names of groups of further views, e.g. local; the teacher sees those whose role is both; each has its keys",
        members=following(FurtherViews, Operations, "data.augment"),
    )
    head: tuple[int, ...] = key((2048, 2048), "hidden widths of the head, with GELU", least=1)
    bottleneck: int = key(256, "width before the last layer, where vectors get length 1", least=1)
    prototypes: int = key(65536, "outputs of the last layer, whose columns have length 1", least=2)
    student_temperature: float = key(0.1, "divisor of the student's logits", least=1e-3)
    teacher_temperature_start: float = key(0.04, "divisor of the teacher's logits at the first step", least=1e-3)
    teacher_temperature: float = key(0.07, "divisor of the teacher's logits after its warm-up", least=1e-3)
    teacher_warmup: float = key(0.3, "part of the run in which the teacher's temperature rises linearly", **PROBABILITY)
    centring: str = key(
        "mean",
        "how prototypes are kept in use: a running mean is subtracted from the teacher's logits, or each batch is "
        "spread evenly over them (Sinkhorn-Knopp)",
        variants={"mean": CentreKeys, "sinkhorn": SinkhornKeys},
    )
    patches: str = key(
        "none", "whether hidden patches are predicted too (iBOT)", variants={"none": None, "ibot": PatchKeys}
    )
    koleo_weight: float = key(0.0, "weight of KoLeo, which spreads the features of a view; 0 = none", least=0)
    frozen_last_layer: float = key(0.01, "part of the run, at its start, in which the last layer stays", **PROBABILITY)
    ema_start: float = key(0.996, "momentum of the teacher at the first step", **PROBABILITY)
    ema_end: float = key(1.0, "momentum of the teacher at the last step, reached by half a cosine", **PROBABILITY)

    @property
    def num_views(self) -> int:  # type: ignore[override]
        return self.views

    def problems(self, config: Config) -> Iterator[Problem]:
        for name in ("teacher_temperature_start", "teacher_temperature"):
            if getattr(self, name) > self.student_temperature:
                limit = f"above method.student_temperature = {self.student_temperature}"
                yield Problem(f"method.{name}", f"{limit}: a teacher that is not sharper than its student collapses")
        for name, group in config.view_groups.items():
            if group.role == "target":
                yield Problem(f"method.{name}.role", "the student sees every view; use context, or both")
        if self.views + sum(group.count for group in config.view_groups.values()) < 2:
            yield Problem("method.views", "leaves one view, which would be compared with itself; use 2")


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

    def __call__(self, x: Float[Array, "*b inputs"]) -> Float[Array, "*b prototypes"]:
        for layer in self.layers[:-1]:
            x = jax.nn.gelu(layer(x), approximate=False)
        x = unit(self.layers[-1](x).astype(jnp.float32))
        prototypes = unit(self.last.kernel[...].T).T  # the direction of each column; its length means nothing
        return (x.astype(self.last.dtype) @ prototypes.astype(self.last.dtype)).astype(jnp.float32)


class Centre(nnx.Variable):
    """Running mean of the teacher's logits: part of the state, not trained."""


class Dino(WholeBatchMethod, ImageMethod):
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
        self.compares_elements = own.centring == "sinkhorn" or own.koleo_weight > 0
        self.hides_patches = own.patches == "ibot" and own.patch_weight > 0
        groups = config.view_groups.items()
        self._seen = ["", *(name for name, group in groups if group.role == "both")]  # groups that the teacher sees
        self._local = [name for name, group in groups if group.role != "both"]

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = init_rngs(key)
        encoder = self.encoder(sample, rngs)
        parts: dict[str, Any] = {"head": DinoHead(encoder.feature_dim, self.config, dtype=self.dtype, rngs=rngs)}
        if self.config.centring == "mean":
            parts["centre"] = Centre(jnp.zeros(self.config.prototypes))
        if self.hides_patches:
            parts["mask_token"] = nnx.Param(jnp.zeros(encoder.feature_dim), decay=False)
            if self.config.centring == "mean":
                parts["patch_centre"] = Centre(jnp.zeros(self.config.prototypes))
        return EncoderWith(encoder, **parts)

    def encode_batch(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        del step
        groups = self.views_by_group(batch, key)
        seen, local = ([view for name in names for view in groups[name]] for names in (self._seen, self._local))
        if self.hides_patches:
            return self._encode_hidden(model, target, seen, local, jax.random.fold_in(key, 0))
        with jax.named_scope("encoder"):
            student = [self.encode(model.encoder, view) for view in (*seen, *local)]
        with jax.named_scope("target"):
            teacher = [self.encode(target.encoder, view) for view in seen]
        probed = teacher if self.run_config.eval.weights == "target" else student
        embeddings = {"student": [read for read, _ in student], "teacher": [read for read, _ in teacher]}
        return Encoded(embeddings, probed[0][1])

    def _encode_hidden(
        self, model: Any, target: Any, seen: list[jax.Array], local: list[jax.Array], key: jax.Array
    ) -> Encoded:
        """Returns what `encode_batch` does where the student sees a part of the teacher's views.

        The online probe reads features of whole views, which only the teacher computes.
        """
        side = self.view_size // self.run_config.model.patch_size
        drawn = [hidden_blocks(k, len(seen[0]), side, self.config) for k in jax.random.split(key, len(seen))]
        with jax.named_scope("encoder"):
            student = [
                model.encoder.outputs(view, train=True, hidden=Hidden(places, model.mask_token[...]))
                for view, (places, _, _) in zip(seen, drawn, strict=True)
            ]
            small = [self.encode(model.encoder, view)[0] for view in local]
        with jax.named_scope("target"):
            teacher = [target.encoder.outputs(view, train=True) for view in seen]

        def hidden_patches(outputs: list[Any]) -> jax.Array:
            each = [one.cells.reshape(len(one.cells), side**2, -1) for one in outputs]
            taken = [take_tokens(cells, index) for cells, (_, index, _) in zip(each, drawn, strict=True)]
            return jnp.stack(taken, axis=1)  # [B, G, n, D]

        pool = model.encoder.pool
        embeddings = {
            "student": [*(pooled(one, pool) for one in student), *small],
            "teacher": [pooled(one, pool) for one in teacher],
            "student_patches": hidden_patches(student),
            "teacher_patches": hidden_patches(teacher),
            "weights": jnp.stack([weights for _, _, weights in drawn], axis=1),
        }
        return Encoded(embeddings, self.pooled(teacher[0]) if self.run_config.eval.weights == "target" else None)

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del key
        temperature, sharpness = self.teacher_temperature(step), self.config.student_temperature
        with jax.named_scope("projector"):
            student = jnp.stack([model.head(x) for x in embeddings["student"]])  # [V, B, K]
        with jax.named_scope("target"):
            teacher = jnp.stack([target.head(x) for x in embeddings["teacher"]])
        with jax.named_scope("loss"):
            wanted = self._balanced(model, "centre", teacher, jnp.ones(teacher.shape[:-1]), temperature)
            loss, terms = dino_loss(student, wanted, student_temperature=sharpness)
            if self.config.koleo_weight > 0:
                terms["koleo"] = jnp.stack([koleo_loss(x) for x in embeddings["student"][: len(teacher)]]).sum()
                loss += self.config.koleo_weight * terms["koleo"]
        if self.hides_patches:
            with jax.named_scope("projector"):
                student = model.head(embeddings["student_patches"])
            with jax.named_scope("target"):
                teacher = target.head(embeddings["teacher_patches"])
            with jax.named_scope("loss"):
                weights = embeddings["weights"]
                wanted = self._balanced(model, "patch_centre", teacher, weights, temperature)
                terms["patches"] = masked_patch_loss(student, wanted, weights, student_temperature=sharpness)
                loss += self.config.patch_weight * terms["patches"]
        return loss, terms

    def _balanced(
        self, model: Any, centre: str, logits: jax.Array, weights: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        """Returns the teacher's distributions; moves the centre, over the global batch, after it was subtracted."""
        if self.config.centring == "sinkhorn":
            return sinkhorn(logits / temperature, weights, self.config.sinkhorn_steps)
        variable, momentum = getattr(model, centre), self.config.centre_momentum
        old, several = variable[...], tuple(range(weights.ndim))
        mean = jnp.sum(weights[..., None] * logits, axis=several) / jnp.sum(weights)
        variable[...] = momentum * old + (1 - momentum) * mean
        return jax.nn.softmax((logits - old) / temperature)


def hidden_blocks(
    key: jax.Array, batch: int, side: int, config: Any
) -> tuple[Bool[Array, "b n"], Integer[Array, "b m"], Float[Array, "b m"]]:
    """Returns which patches are hidden, the indices of those that may be, and 1 for those of them that are.

    A fixed share of the images, of one at least, each has one block: of a random share of the patches, somewhere, with
    a random aspect.
    """
    low, high = (max(1, round(share * side**2)) for share in config.masked_share)
    image, area, place, aspect = jax.random.split(key, 4)
    order = jnp.argsort(jnp.argsort(jax.random.uniform(image, (batch,))))
    chosen = order < max(1, round(config.masked_images * batch))
    count = jnp.where(chosen, jax.random.randint(area, (batch,), low, high + 1), 0)  # [B]
    at = jnp.stack(jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij"), axis=-1).reshape(-1, 2)
    away = jnp.abs(at - jax.random.uniform(place, (batch, 1, 2), maxval=side - 1.0))  # [B, n, 2]
    stretch = jnp.exp(jax.random.uniform(aspect, (batch, 1), minval=-0.6, maxval=0.6))  # side to side: .3 to 3.3
    index = jnp.argsort(jnp.maximum(away[..., 0] * stretch, away[..., 1] / stretch), axis=-1)
    places = jnp.argsort(index, axis=-1) < count[:, None]
    return places, index[:, :high], (jnp.arange(high) < count[:, None]).astype(jnp.float32)

"""A world model with fixed weights: encodes frames, rolls latents out, and plans."""

import dataclasses
import pathlib
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_atomically
from jepa_jax.evals.inference import FrozenModel
from jepa_jax.methods.contract import build_method
from jepa_jax.models.kernels import without_gpu_kernels
from jepa_jax.program.config import changed_config
from jepa_jax.program.restore import restore_state, run_config
from jepa_jax.program.step import evaluated_variables
from jepa_jax.projects.world_models.control.energy import goal_energy, model_energy, time_weights
from jepa_jax.projects.world_models.control.planners import plan
from jepa_jax.runtime.mesh import make_mesh

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@runtime_checkable
class DynamicsMethod(Protocol):
    """A method whose model encodes frames and predicts the latents that follow under actions."""

    def encode(self, model: Any, frames: jax.Array) -> jax.Array:
        """Returns latents [*B, D] of frames uint8 [*B, H, W, C]."""
        ...

    def rollout(self, model: Any, latents: jax.Array, actions: jax.Array) -> jax.Array:
        """Returns latents [B, K, D] that follow latents [B, n, D] under actions [B, n - 1 + K, A]."""
        ...


class Bound(NamedTuple):
    """A method and its model inside of a traced function."""

    method: DynamicsMethod
    model: Any

    def encode(self, frames: jax.Array) -> jax.Array:
        return self.method.encode(self.model, frames)

    def rollout(self, latents: jax.Array, actions: jax.Array) -> jax.Array:
        return self.method.rollout(self.model, latents, actions)


class Plan(NamedTuple):
    """Actions [N, H, A], the latents [N, H, D] that they are predicted to lead to, and their energy [N]."""

    actions: np.ndarray
    latents: np.ndarray
    energy: np.ndarray


@dataclasses.dataclass(frozen=True)
class FrozenWorldModel(FrozenModel):
    """A world model of a run; its functions take and return arrays of numpy with any number N of elements."""

    def __post_init__(self) -> None:
        if not isinstance(self.program.method, DynamicsMethod):
            raise UserError(
                f"config.method.name = {self.config.method.name!r}: has no encode and rollout; no world model"
            )

    def bound(self, params: Any, stats: Any) -> Bound:
        """Returns the model inside of a traced function."""
        method = self.program.method
        assert isinstance(method, DynamicsMethod)
        return Bound(method, self.program.factory.merge(params, stats))

    @property
    def action_width(self) -> int:
        """Numbers of an action."""
        return self.program.spec["actions"].shape[-1]

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """Returns latents [N, D] of frames uint8 [N, H, W, C]."""
        frames, wanted = np.asarray(frames), self.program.spec["frames"].shape[1:]
        if frames.dtype != np.uint8 or frames.shape[1:] != wanted:
            raise UserError(
                f"frames: {frames.dtype} {frames.shape}; this model takes uint8 [N, {', '.join(map(str, wanted))}]"
            )
        return self.in_batches(self._made("encode", "frames"), {"frames": frames})

    def rollout(self, latents: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Returns the latents [N, K, D] that follow.

        Args:
          latents: [N, D] of the present, or [N, n, D] of the last n times.
          actions: [N, n - 1 + K, A], from that of the first latent on.
        """
        latents, actions = np.asarray(latents, np.float32), self._checked_actions(actions)
        latents = latents[:, None] if latents.ndim == 2 else latents
        if len(latents) != len(actions) or actions.shape[1] < latents.shape[1]:
            raise UserError(
                f"actions: {actions.shape} with latents {latents.shape}; give one action for each latent, and more"
            )
        made = self._made("rollout", "latents", "actions")
        return self.in_batches(made, {"latents": latents, "actions": actions})

    def energy(self, latents: np.ndarray, goal: np.ndarray, kind: str = "") -> np.ndarray:
        """Returns energies [N] of latents [N, H, D] for goals [N, D]; `kind` is that of the run, "sum" or "last"."""
        kind = kind or self.config.method.control.energy
        weights = time_weights(kind, latents.shape[-2])
        return np.asarray(goal_energy(jnp.asarray(latents), jnp.asarray(goal), weights))

    def plan(
        self,
        frames: np.ndarray,
        goals: np.ndarray,
        *,
        longest: float,
        previous: np.ndarray | None = None,
        seed: int = 0,
        **changes: Any,
    ) -> Plan:
        """Returns plans from frames to goals, both uint8 [N, H, W, C].

        Args:
          longest: largest norm of an action; 2 for example, or that of the environment.
          previous: plans [N, H, A] to begin with; zeros if there are none.
          seed: of the search.
          **changes: keys of `method.control` with other values, e.g. horizon=20.
        """
        control = changed_config(self.config, {f"method.control.{k}": v for k, v in changes.items()}).method.control
        start = np.zeros((len(frames), control.horizon, self.action_width), np.float32)
        start = start if previous is None else self._checked_actions(previous)
        now, goal = self.encode(frames), self.encode(goals)

        def search(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, ...]:
            model = self.bound(params, stats)
            weights = time_weights(control.energy, control.horizon, ramp=control.ramp)
            energy = model_energy(model.rollout, batch["now"], batch["goal"], weights)
            actions, history = plan(energy, batch["start"], batch["key"], control, longest)
            return actions, model.rollout(batch["now"][:, None], actions), history[-1]

        function = self.once(("plan", control, longest), lambda: jax.jit(search))
        batch = {"now": now, "goal": goal, "start": start, "key": jax.random.key(seed)}
        return Plan(*map(np.asarray, function(self.params, self.stats, batch)))

    def export(self, folder: str | pathlib.Path) -> list[pathlib.Path]:
        """Writes `encode` and `rollout` as StableHLO with their weights, for any N and K; returns the files.

        `jax.export.deserialize(file).call` runs them without this package: encode takes frames uint8 [N, H, W, C],
        rollout latents [N, 1, D] and actions [N, K, A]; for a predictor that sees several latents K is that of
        `method.control.horizon`.
        """
        variables, spec = jax.tree.map(np.asarray, (self.params, self.stats)), self.program.spec
        (count,) = jax.export.symbolic_shape("n")
        horizon, width = self.config.method.control.horizon, self.config.method.latent_width
        shapes = {
            "encode": (jax.ShapeDtypeStruct((count, *spec["frames"].shape[1:]), np.uint8),),
            "rollout": (
                jax.ShapeDtypeStruct((count, 1, width), np.float32),
                jax.ShapeDtypeStruct((count, horizon, self.action_width), np.float32),
            ),
        }
        paths = []
        for name, arguments in shapes.items():

            def function(*arrays: jax.Array, name: str = name) -> jax.Array:
                model = self.bound(*jax.tree.map(jnp.asarray, variables))  # constants of the program
                return getattr(model, name)(*arrays)

            with without_gpu_kernels():
                artifact = jax.export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)
            paths.append(pathlib.Path(folder) / f"{name}.stablehlo")
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            write_atomically(paths[-1], bytes(artifact.serialize()))
        return paths

    def _made(self, name: str, *arguments: str) -> Any:
        def function(params: Any, stats: Any, batch: Any) -> jax.Array:
            return getattr(self.bound(params, stats), name)(*(batch[argument] for argument in arguments))

        return self.once(name, lambda: jax.jit(function))

    def _checked_actions(self, actions: np.ndarray) -> np.ndarray:
        actions = np.asarray(actions, np.float32)
        if actions.ndim != 3 or actions.shape[-1] != self.action_width:
            raise UserError(f"actions: {actions.shape}; this model takes [N, K, {self.action_width}]")
        return actions


def load_world_model(workdir: str | pathlib.Path, *, batch_size: int = 256) -> FrozenWorldModel:
    """See `jepa_jax.projects.world_models.load_world_model`."""
    config = changed_config(run_config(workdir), {"eval.batch_size": batch_size})
    if not isinstance(build_method(config, total_steps=1), DynamicsMethod):
        name = config.method.name
        raise UserError(f"{workdir}: config.method.name = {name!r} learns no world model; use jepa_jax.load_encoder")
    program, state = restore_state(config, workdir, make_mesh(1, 1, jax.local_devices()))
    return FrozenWorldModel(config, program, *evaluated_variables(state, config.eval.weights))

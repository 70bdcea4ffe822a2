"""Environments that run on the host, such as those of Gymnasium: recordings to learn from, and episodes of a planner.

    env = gymnasium.make("Pendulum-v1", render_mode="rgb_array")
    np.savez("data/train.npz", **record(env, episodes=200, size=32, seed=0))     # for data.source = trajectories
    played = play(env, jepa_jax.load_world_model(workdir), goal, steps=200)

Any object with Gymnasium's `reset`, `step`, `render` and a box as `action_space` will do: nothing of it is imported.
"""

from typing import Any, NamedTuple

import cv2
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.in_memory import Arrays
from jepa_jax.projects.world_models.control.model import FrozenWorldModel


class Played(NamedTuple):
    """Frames [T + 1, H, W, C] and actions [T, A] of an episode, its rewards [T] and what `info` said at its end."""

    frames: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    info: dict[str, Any]


def record(env: Any, *, episodes: int, size: int, seed: int, steps: int = 1000) -> Arrays:
    """Returns episodes of random actions, as files of `trajectories` hold them: frames, actions, states and ends.

    Args:
      size: pixels per side of the frames.
      seed: of the first episode; the others follow.
      steps: most actions of an episode.
    """
    arrays: dict[str, list[np.ndarray]] = {"frames": [], "actions": [], "states": []}
    ends = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        rng, over = np.random.default_rng([seed, episode]), False
        for _ in range(steps):
            action = rng.uniform(env.action_space.low, env.action_space.high).astype(np.float32)
            for name, value in (("frames", seen(env, size)), ("actions", action), ("states", observation)):
                arrays[name].append(np.asarray(value))
            if over:
                break
            observation, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        ends.append(len(arrays["frames"]))
    return {name: np.stack(values) for name, values in arrays.items()} | {"ends": np.array(ends)}


def play(env: Any, model: FrozenWorldModel, goal: np.ndarray, *, steps: int, seed: int = 0, **changes: Any) -> Played:
    """Returns an episode in which a model plans towards a picture of the goal, uint8 [H, W, C].

    Args:
      steps: most actions.
      **changes: keys of `method.control` with other values, e.g. executed=1.
    """
    executed = changes.get("executed", model.config.method.control.executed)
    low, high, size = env.action_space.low, env.action_space.high, goal.shape[0]
    longest = float(np.linalg.norm(np.maximum(np.abs(low), np.abs(high))))
    env.reset(seed=seed)
    frames, info, previous = [seen(env, size)], {}, None
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    while len(actions) < steps:
        found = model.plan(
            frames[-1][None], goal[None], longest=longest, previous=previous, seed=seed + len(actions), **changes
        )
        plan = found.actions[0]
        for action in np.clip(plan[: min(executed, steps - len(actions))], low, high):
            _, reward, terminated, truncated, info = env.step(action)
            frames.append(seen(env, size))
            actions.append(action)
            rewards.append(reward)
            if terminated or truncated:
                return Played(np.stack(frames), np.stack(actions), np.array(rewards), info)
        previous = np.pad(plan[executed:], ((0, executed), (0, 0)))[None]
    return Played(np.stack(frames), np.stack(actions), np.array(rewards), info)


def seen(env: Any, size: int) -> np.ndarray:
    """Returns the rendered frame uint8 [size, size, 3]."""
    frame = env.render()
    if not isinstance(frame, np.ndarray):
        raise UserError(
            f"env.render() returns {type(frame).__name__}; make the environment with render_mode='rgb_array'"
        )
    return cv2.resize(frame, (size, size), interpolation=cv2.INTER_AREA)

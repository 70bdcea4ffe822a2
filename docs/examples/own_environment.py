"""An environment of one's own: a pendulum that is pushed, seen in pictures of 16 pixels, and planned in.

cd docs/examples; PYTHONPATH=. jepa-jax train --config=./own_environment.py --workdir=pendulum
"""

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.configs import two_rooms_cpu


class Pendulum:  # jepa_jax.projects.world_models.control.environment.Environment
    action_width, longest_action, steps, success_distance = 1, 1.0, 40, 0.4

    def __init__(self, data, groups):
        """Takes the `data` group of the config, and the groups of the elements of a split."""

    def task(self, key):
        return jnp.zeros(2), jnp.stack([jax.random.uniform(key, minval=-2.0, maxval=2.0), 0.0])

    def step(self, state, action, key):  # [angle, speed], [push]
        speed = 0.9 * state[1] + 0.2 * action[0] - 0.1 * jnp.sin(state[0])
        return jnp.stack([state[0] + speed, speed])

    def frame(self, state):
        bob = 7.5 + 5 * jnp.stack([-jnp.cos(state[0]), jnp.sin(state[0])])  # row and column
        near = jnp.exp(-((jnp.arange(16.0) - bob[:, None]) ** 2) / 3)
        return (255 * near[0][:, None, None] * near[1][None, :, None]).astype(jnp.uint8)

    def distance(self, state, goal):
        return jnp.abs(state[0] - goal[0])


def swings(data, split):  # what is learned from: random pushes
    count = data.num_train if split == "train" else data.num_test
    of_start, of_push = jax.random.split(jax.random.key(len(split)))
    states = [jax.random.uniform(of_start, (count, 2), minval=-1.0)]
    actions = jax.random.uniform(of_push, (data.max_frames, count, 1), minval=-1.0)
    pendulum = Pendulum(data, None)
    for push in actions[:-1]:
        states.append(jax.vmap(pendulum.step, (0, 0, None))(states[-1], push, None))
    frames = [jax.vmap(pendulum.frame)(one) for one in states]
    arrays = {"frames": frames, "actions": list(actions), "states": states}
    return {name: np.stack(jax.device_get(array), 1) for name, array in arrays.items()}


def get_config():
    config = two_rooms_cpu.get_config()
    config.data.source, config.method.control.environment = "own_environment:swings", "own_environment:Pendulum"
    config.data.image_size, config.data.channels, config.data.max_frames, config.data.frame_stride = 16, 1, 13, 1
    config.method.pixel_mean = config.method.pixel_std = ()
    return config

"""Groups of views: their keys, their sizes, their roles in the loss, and batch norm over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.program.config import changed_config, load_config
from tests.stepping import BATCH, STILL, build_program
from tests.tiny import tiny_config

CROPS = {
    "method.view_groups": ("small", "tiny"), "method.small.count": 3, "method.small.crop.size": 8,
    "method.small.crop.scale": (0.05, 0.3), "method.tiny.count": 2, "method.tiny.crop.size": 0,
    "method.tiny.role": "target", "data.augment.crop.size": 0, "method.per_view_statistics": False,
}  # fmt: skip


def cropped(**overrides):
    return changed_config(tiny_config(method__views=2), CROPS | {k.replace("__", "."): v for k, v in overrides.items()})


def test_a_group_is_made_as_data_augment_says_unless_it_says_otherwise():
    config = cropped(data__augment__jitter__probability=0.3, method__tiny__jitter__hue=0.0)
    small, tiny = config.view_groups["small"], config.view_groups["tiny"]
    assert (small.count, small.role, small.crop.scale) == (3, "context", (0.05, 0.3))
    assert vars(small.jitter) == vars(config.data.augment.jitter) and tiny.crop.scale == config.data.augment.crop.scale
    assert tiny.jitter.probability == 0.3 and tiny.jitter.hue == 0.0 != config.data.augment.jitter.hue
    assert config.view_sizes == (16, 8)
    assert load_config("quickstart").view_groups == {}


def test_groups_can_be_named_on_the_command_line():
    config = load_config("quickstart", {"method.view_groups": "small", "method.small.count": "6"})
    assert config.view_groups["small"].count == 6
    assert config.to_dict()["method"]["small"]["crop"]["size"] == 16
    again = changed_config(config, {"method.view_groups": "('small', 'other')"})
    assert again.view_groups["small"].count == 6 and again.view_groups["other"].count == 1


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"method.smal.count": 3}, "config.method.smal.count"),
        ({"method.view_groups": ("views",)}, "config.method.view_groups: 'views' cannot be the name"),
        ({"method.view_groups": ("global",)}, "config.method.view_groups: 'global' cannot be the name"),
        ({"method.view_groups": ("small", "small")}, "config.method.view_groups: 'small' cannot be the name"),
        ({"method.small.role": "teacher"}, "config.method.small.role = 'teacher': not one of context, target, both"),
        ({"method.small.crop.size": 2}, "the 2 pixels of a view"),
    ],
)
def test_mistakes_are_named(changes, said):
    with pytest.raises(UserError, match="^[^~]*" + said.replace("(", r"\(")):
        cropped(**{name.replace(".", "__"): value for name, value in changes.items()})


def test_a_vit_needs_whole_patches_of_every_size():
    with pytest.raises(UserError, match="does not divide the 10-pixel views"):
        cropped(model__name="vit", model__patch_size=8, method__small__crop__size=10)


def loss_of(config):
    """Returns the loss of a model as a function of its parameters and statistics, and the program."""
    program = build_program(config)

    def compute(params, stats, wrap=lambda encoder: encoder):
        model = program.factory.merge(params, stats)
        model.encoder = wrap(model.encoder)
        return program.method.loss(model, None, jax.tree.map(jnp.asarray, BATCH), jax.random.key(0), jnp.zeros([]))

    return compute, program.factory


def test_views_of_one_size_pass_the_encoder_together():
    seen = []

    class Watched:
        def __init__(self, encoder):
            self.encoder = encoder

        def __call__(self, images, *, train):
            seen.append(images.shape[:2])
            return self.encoder(images, train=train)

    loss, factory = loss_of(cropped())
    abstract = factory.abstract
    output = jax.eval_shape(lambda *state: loss(*state, Watched), abstract.params["model"], abstract.stats)
    assert seen == [(16 * 4, 16), (16 * 3, 8)]  # 2 + 2 views of 16 pixels, 3 of 8
    assert output.features.shape[0] == 16 and output.loss.shape == ()
    method = build_program(cropped()).method
    assert jax.eval_shape(method.example_views, BATCH, jax.random.key(0)).shape == (7, 16, 16, 16, 3)


def test_roles_reach_the_loss():
    """Without randomness large views are equal, and the small ones are all as far from them: at a distance s."""
    names = [name.removeprefix("data.augment.") for name in STILL]
    still = STILL | {f"method.{group}.{name}": 0.0 for group in ("small", "tiny") for name in names}
    config = changed_config(cropped(method__per_view_statistics=True), still)
    (context, factory), (target, _) = map(loss_of, (config, changed_config(config, {"method.small.role": "target"})))
    state = factory.create(0, BATCH)
    both = jax.jit(lambda *state: [loss(*state).terms["invariance"] for loss in (context, target)])
    as_context, as_target = both(state.params["model"], state.stats)  # 3 of 5 contexts are s away from the mean target
    # The mean of 4 large and 3 small targets is 3 / 7 s away from both contexts.
    np.testing.assert_allclose(as_context / (3 / 5), as_target / (3 / 7) ** 2, rtol=1e-3)

"""Losses against the reference's values, closed forms, and a sharded batch."""

import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.losses import barlow_twins, cosine, dino, infonce, koleo, nt_xent, tcr, vicreg
from jepa_jax.losses import sigreg as gaussian_slices
from jepa_jax.losses.roles import Roles

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "eb_jepa.npz")
VIEWS = np.stack([GOLDEN["z1"], GOLDEN["z2"]])


def compiled(function):
    """Returns the function as one program; operation by operation it compiles dozens."""
    parameters = inspect.signature(function).parameters.values()
    static = [parameter.name for parameter in parameters if parameter.annotation in (float, int, str, Roles)]
    return jax.jit(function, static_argnames=static)


barlow_twins_loss, batch_standardised = (
    compiled(barlow_twins.barlow_twins_loss),
    compiled(barlow_twins.batch_standardised),
)
bcs_loss, sigreg_loss = compiled(gaussian_slices.bcs_loss), compiled(gaussian_slices.sigreg_loss)
sigreg, random_slices = compiled(gaussian_slices.sigreg), compiled(gaussian_slices.random_slices)
vicreg_loss, invariance = compiled(vicreg.vicreg_loss), compiled(vicreg.invariance)
off_diagonal_covariance = compiled(vicreg.off_diagonal_covariance)
tcr_loss, coding_rate = compiled(tcr.tcr_loss), compiled(tcr.coding_rate)
dino_loss, infonce_loss, mean_cosine = map(compiled, (dino.dino_loss, infonce.infonce_loss, cosine.mean_cosine))
masked_patch_loss, sinkhorn = compiled(dino.masked_patch_loss), compiled(dino.sinkhorn)
koleo_loss, nt_xent_loss = compiled(koleo.koleo_loss), compiled(nt_xent.nt_xent_loss)


def value_terms_grad(loss):
    (value, terms), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(VIEWS)
    return value, terms, gradient[0]


@pytest.mark.parametrize("case", ["a", "b"])
def test_vicreg_equals_the_reference(case):
    std, cov = map(float, GOLDEN[f"vicreg_{case}_coeffs"])
    value, terms, gradient = value_terms_grad(lambda z: vicreg_loss(z, std_weight=std, cov_weight=cov))
    np.testing.assert_allclose(value, GOLDEN[f"vicreg_{case}_loss"], rtol=1e-5)
    np.testing.assert_allclose(terms["invariance"], GOLDEN[f"vicreg_{case}_invariance_loss"], rtol=1e-5)
    np.testing.assert_allclose(terms["variance"], GOLDEN[f"vicreg_{case}_var_loss"], rtol=1e-5)
    np.testing.assert_allclose(terms["covariance"], GOLDEN[f"vicreg_{case}_cov_loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, GOLDEN[f"vicreg_{case}_grad_z1"], atol=1e-5, rtol=1e-5)


def test_bcs_equals_the_reference():
    value, terms, gradient = value_terms_grad(lambda z: bcs_loss(z, GOLDEN["bcs_A"], weight=10.0))
    np.testing.assert_allclose(terms["bcs"], GOLDEN["bcs_loss"], rtol=1e-5)
    np.testing.assert_allclose(terms["invariance"], GOLDEN["bcs_invariance"], rtol=1e-5)
    np.testing.assert_allclose(value, GOLDEN["bcs_total"], rtol=1e-5)
    np.testing.assert_allclose(gradient, GOLDEN["bcs_grad_z1"], atol=1e-5, rtol=1e-5)


def test_the_two_covariance_normalisations_differ_by_the_number_of_other_dimensions():
    z = VIEWS[0]
    ratio = off_diagonal_covariance(z, "dimensions") / off_diagonal_covariance(z, "pairs")
    np.testing.assert_allclose(ratio, z.shape[1] - 1, rtol=1e-5)


def test_invariance_of_many_views_is_the_mean_over_pairs():
    z = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    pairs = [np.mean((z[i] - z[j]) ** 2) for i in range(4) for j in range(i)]
    np.testing.assert_allclose(invariance(z), np.mean(pairs), rtol=1e-5)


def test_collapsed_embeddings_pay_the_full_variance_term_and_no_other():
    value, terms = vicreg_loss(np.ones((2, 8, 4), np.float32), std_weight=25.0, cov_weight=1.0)
    np.testing.assert_allclose(terms["variance"], 2 * (1 - 0.01), rtol=1e-5)  # sqrt(eps) = 0.01
    assert terms["invariance"] == 0 and terms["covariance"] == 0 and value > 49


def test_sigreg_of_a_point_mass_has_a_closed_form():
    # All samples at 0: the empirical characteristic function is 1, so the integrand is phi (1 - phi)^2.
    t = np.linspace(0, 3, 17)
    phi = np.exp(-(t**2) / 2)
    weights = np.full(17, 2 * 3 / 16)
    weights[[0, -1]] /= 2
    expected = 8 * np.sum(weights * phi * (1 - phi) ** 2)
    np.testing.assert_allclose(
        sigreg(np.zeros((8, 5), np.float32), random_slices(jax.random.key(0), 5, 7)), expected, rtol=1e-5
    )


def test_sigreg_prefers_a_gaussian_to_anything_else_of_the_same_variance():
    slices = random_slices(jax.random.key(2), 8, 64)
    gaussian = np.random.default_rng(1).normal(size=(2048, 8)).astype(np.float32)
    line = np.repeat(gaussian[:, :1], 8, axis=1)
    binary = np.sign(line)
    statistic = [float(sigreg(z, slices)) for z in (gaussian, line, binary)]
    assert statistic[0] < 2 < 20 < statistic[1] < statistic[2]


def test_slices_have_unit_length():
    slices = random_slices(jax.random.key(0), 16, 32)
    np.testing.assert_allclose(np.linalg.norm(slices, axis=0), 1, rtol=1e-5)


def test_infonce_of_indistinguishable_images_is_the_log_of_the_batch():
    loss, terms = infonce_loss(np.ones((3, 8, 4), np.float32), temperature=0.2)
    np.testing.assert_allclose(loss, np.log(8), rtol=1e-5)
    np.testing.assert_allclose(terms["similarity"], 1, rtol=1e-5)


def test_infonce_of_two_orthogonal_images_has_a_closed_form():
    z = np.stack([np.eye(2, dtype=np.float32)] * 2)
    loss, terms = infonce_loss(z, temperature=0.5)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-2)), rtol=1e-5)
    assert terms["retrieval"] == 100


def test_the_cosine_ignores_lengths():
    a, b = np.float32([[3, 0], [0, 2]]), np.float32([[0.5, 0], [1, 1]])
    np.testing.assert_allclose(mean_cosine(a, b), (1 + np.sqrt(0.5)) / 2, rtol=1e-5)


def test_barlow_twins_of_a_known_cross_correlation():
    """Two uncorrelated dimensions: with themselves C is the identity, and swapped it is all off the diagonal."""
    z = np.float32([[1, 1], [-1, 1], [1, -1], [-1, -1]])
    same, _ = barlow_twins_loss(5 * z + 3, z, redundancy_weight=0.1)  # scale and offset of a dimension do not count
    swapped, terms = barlow_twins_loss(z, z[:, ::-1], redundancy_weight=0.1)
    np.testing.assert_allclose(same, 0, atol=1e-6)
    np.testing.assert_allclose([terms["invariance"], terms["redundancy"], swapped], [2, 2, 2.2], rtol=1e-4)
    first, second = np.float32([[2, 0], [-2, 0]]), np.float32([[1, 3], [-1, -3]])
    standard = np.asarray(batch_standardised(first))
    np.testing.assert_allclose(standard, [[1, 0], [-1, 0]], rtol=1e-4)  # a constant dimension stays zero
    _, terms = barlow_twins_loss(first, second, redundancy_weight=0.1)  # C = [[1, 1], [0, 0]]
    np.testing.assert_allclose([terms["invariance"], terms["redundancy"]], [1, 1], rtol=1e-4)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def test_dino_equals_its_definition():
    """Two views for both networks and a third for the student alone, against loops over pairs of views."""
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(3, 4, 5)), rng.normal(size=(2, 4, 5))
    centre = rng.normal(size=5)

    wanted, seen = softmax((teacher - centre) / 0.04), softmax(student / 0.1)
    pairs = [-(wanted[g] * np.log(seen[v])).sum(-1).mean() for g in range(2) for v in range(3) if g != v]
    arrays = (array.astype(np.float32) for array in (student, wanted))
    loss, terms = dino_loss(*arrays, student_temperature=0.1)
    np.testing.assert_allclose(loss, np.mean(pairs), rtol=1e-5)
    np.testing.assert_allclose(terms["teacher_entropy"], -(wanted * np.log(wanted)).sum(-1).mean(), rtol=1e-4)


def test_dino_of_networks_that_say_nothing_is_the_log_of_the_prototypes():
    loss, terms = dino_loss(
        np.zeros((2, 6, 4), np.float32), np.full((2, 6, 4), 0.25, np.float32), student_temperature=0.1
    )
    np.testing.assert_allclose([loss, terms["teacher_entropy"]], np.log(4), rtol=1e-5)


def test_the_loss_of_hidden_patches_is_the_mean_over_images_of_the_mean_over_their_patches():
    rng = np.random.default_rng(1)
    student, wanted = rng.normal(size=(2, 3, 4, 5)), softmax(rng.normal(size=(2, 3, 4, 5)))
    weights = (rng.random((2, 3, 4)) < 0.5).astype(float)
    weights[0, 0] = 0  # an image of which nothing is hidden
    each = [
        np.mean([-(wanted[g, b, n] * np.log(softmax(student[g, b, n] / 0.1))).sum() for n in np.flatnonzero(w)] or [0])
        for (g, b), w in ((place, weights[place]) for place in np.ndindex(2, 3))
    ]
    arrays = (array.astype(np.float32) for array in (student, wanted, weights))
    np.testing.assert_allclose(masked_patch_loss(*arrays, student_temperature=0.1), np.mean(each), rtol=1e-5)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1, 1), (1, 0, 1, 1, 0, 1)])
def test_sinkhorn_balances_prototypes_and_samples_in_turn(counts):
    """The published loop on a matrix [prototypes, samples] of exponentials in float64, without weights of 0."""
    logits, chosen = np.random.default_rng(2).normal(size=(2, 3, 4)) / 0.3, np.array(counts, bool)
    q = np.exp(logits.reshape(6, 4)[chosen].T)
    q /= q.sum()
    for _ in range(3):
        q /= 4 * q.sum(axis=1, keepdims=True)
        q /= q.shape[1] * q.sum(axis=0, keepdims=True)
    found = sinkhorn(logits.astype(np.float32), np.float32(counts).reshape(2, 3), 3).reshape(6, 4)
    np.testing.assert_allclose(found[chosen], (q * q.shape[1]).T, rtol=1e-4, atol=1e-7)
    assert np.isfinite(found).all()


def test_koleo_is_the_mean_log_distance_to_the_nearest_image():
    x = np.random.default_rng(3).normal(size=(9, 5))
    z = x / np.linalg.norm(x, axis=1, keepdims=True)
    distances = np.linalg.norm(z[:, None] - z[None], axis=-1) + 9 * np.eye(9)
    np.testing.assert_allclose(koleo_loss(x.astype(np.float32)), -np.log(distances.min(axis=1)).mean(), rtol=1e-5)
    np.testing.assert_allclose(koleo_loss(np.eye(4, dtype=np.float32)), -np.log(2) / 2, rtol=1e-5)  # right angles
    assert np.isfinite(jax.grad(koleo.koleo_loss)(jnp.ones((4, 3)))).all()  # collapsed


def test_nt_xent_contrasts_each_view_with_all_others():
    x = np.random.default_rng(4).normal(size=(2, 5, 3))
    z = (x / np.linalg.norm(x, axis=-1, keepdims=True)).reshape(10, 3)
    similar = np.exp(z @ z.T / 0.2) * (1 - np.eye(10))  # 2 B - 1 others
    expected = np.mean([-np.log(similar[i, (i + 5) % 10] / similar[i].sum()) for i in range(10)])
    loss, terms = nt_xent_loss(x.astype(np.float32), temperature=0.2)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(terms["similarity"], np.mean(np.sum(z[:5] * z[5:], axis=-1)), rtol=1e-5)
    alike, _ = nt_xent_loss(np.ones((2, 5, 3), np.float32), temperature=0.2)
    np.testing.assert_allclose(alike, np.log(9), rtol=1e-5)


def test_values_and_gradients_do_not_depend_on_how_the_batch_is_split():
    slices = random_slices(jax.random.key(0), VIEWS.shape[-1], 16)
    losses = {
        "vicreg": lambda z: vicreg_loss(z, std_weight=1.0, cov_weight=80.0)[0],
        "sigreg": lambda z: sigreg_loss(z, slices, weight=0.05)[0],
        "bcs": lambda z: bcs_loss(z, slices, weight=10.0)[0],
        "infonce": lambda z: infonce_loss(z, temperature=0.2)[0],
        "barlow_twins": lambda z: barlow_twins_loss(z[0], z[1], redundancy_weight=0.01)[0],
        "dino": lambda z: dino_loss(z, jax.nn.softmax(z), student_temperature=1.0)[0],
        "sinkhorn": lambda z: dino_loss(z, sinkhorn(z, jnp.ones(z.shape[:2]), 3), student_temperature=1.0)[0],
        "koleo": lambda z: koleo_loss(z[0]),
        "nt_xent": lambda z: nt_xent_loss(z, temperature=0.2)[0],
    }
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(VIEWS, NamedSharding(mesh, P(None, "data")))
    compute = jax.jit(lambda z: {name: jax.value_and_grad(loss)(z) for name, loss in losses.items()})
    one, eight = compute(VIEWS), compute(split)
    for name in losses:
        for of_one, of_eight in zip(one[name], eight[name], strict=True):
            np.testing.assert_allclose(of_one, of_eight, rtol=1e-5, atol=1e-6, err_msg=name)


# Two views that are context and target, two that are context alone, one that is a target alone.
MIXED = Roles(context=(0, 1, 2, 3), target=(0, 1, 4))
FIVE = np.random.default_rng(3).normal(size=(5, 6, 4)).astype(np.float32)


def test_invariance_with_roles_is_the_mean_over_pairs_of_context_and_target():
    pairs = [np.mean((FIVE[i] - FIVE[j]) ** 2) for i in MIXED.context for j in MIXED.target if i != j]
    np.testing.assert_allclose(invariance(FIVE, MIXED), np.mean(pairs), rtol=1e-5)


def test_lejepa_compares_context_views_with_the_mean_target_and_tests_all_views():
    slices = random_slices(jax.random.key(0), 4, 8)
    _, terms = sigreg_loss(FIVE, slices, weight=0.05, roles=MIXED)
    centre = (FIVE[0] + FIVE[1] + FIVE[4]) / 3
    np.testing.assert_allclose(terms["invariance"], np.mean([np.mean((v - centre) ** 2) for v in FIVE[:4]]), rtol=1e-5)
    np.testing.assert_allclose(terms["sigreg"], np.mean([sigreg(v, slices) for v in FIVE]), rtol=1e-5)


@pytest.mark.parametrize("name", ["vicreg", "sigreg", "bcs", "infonce", "tcr"])
def test_roles_that_name_every_view_change_nothing(name):
    slices = random_slices(jax.random.key(0), 4, 8)
    loss = {
        "vicreg": lambda **roles: vicreg_loss(FIVE, std_weight=1.0, cov_weight=1.0, **roles),
        "sigreg": lambda **roles: sigreg_loss(FIVE, slices, weight=0.05, **roles),
        "bcs": lambda **roles: bcs_loss(FIVE, slices, weight=1.0, **roles),
        "infonce": lambda **roles: infonce_loss(FIVE, temperature=0.2, **roles),
        "tcr": lambda **roles: tcr_loss(FIVE, similarity_weight=2.0, distortion=0.2, **roles),
    }[name]
    every = tuple(range(5))
    np.testing.assert_allclose(loss(roles=Roles(every, every))[0], loss()[0], rtol=1e-6)
    assert abs(loss(roles=MIXED)[0] - loss()[0]) > 1e-4


def test_infonce_with_one_context_finds_it_by_the_mean_of_the_targets():
    unit = FIVE / np.linalg.norm(FIVE, axis=-1, keepdims=True)
    mean = unit[0] + unit[1]
    logits = unit[4] @ (mean / np.linalg.norm(mean, axis=-1, keepdims=True)).T / 0.2
    expected = np.mean(np.log(np.exp(logits).sum(axis=1)) - np.diagonal(logits))
    value, _ = infonce_loss(FIVE, temperature=0.2, roles=Roles(context=(4,), target=(0, 1)))
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("batch, dims", [(8, 8), (4, 8), (8, 4)])
def test_the_coding_rate_has_its_closed_form(batch, dims):
    z = np.eye(max(batch, dims), dtype=np.float32)[:batch, :dims]
    rank = min(batch, dims)
    spread = rank / 2 * np.log(1 + dims / (batch * 0.2))  # orthogonal vectors of length 1 (or 0)
    np.testing.assert_allclose(coding_rate(z, 0.2), spread, rtol=1e-5)
    equal = np.tile(np.eye(dims, dtype=np.float32)[:1], (batch, 1))
    np.testing.assert_allclose(coding_rate(equal, 0.2), 0.5 * np.log(1 + dims / 0.2), rtol=1e-5)


def test_tcr_reads_directions_alone_and_prefers_images_that_differ():
    apart = np.tile(np.eye(4, dtype=np.float32), (3, 1, 1))  # 3 equal views of 4 orthogonal images
    value, terms = tcr_loss(7 * apart, similarity_weight=200.0, distortion=0.2)
    np.testing.assert_allclose(terms["similarity"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(value, -(200 + 2 * np.log(6)), rtol=1e-5)
    collapsed, _ = tcr_loss(np.tile(apart[:1, :1], (3, 4, 1)), similarity_weight=200.0, distortion=0.2)
    assert value < collapsed - 1

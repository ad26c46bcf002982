"""Log-determinant rules: orders of convergence, z-scores of estimators, gradients, any field and solver."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddnf
from ddnf import DDNF, Divergence, Exact, MLPField, PrintedTaylor, Taylor, Unbiased, euler, midpoint, rk4, with_key

FIELDS = {
    "factored": MLPField(jr.key(3), 4, hidden=(9, 3, 8), output_scale=1.0),
    "autodiff": eqx.nn.MLP(4, 4, 8, 1, activation=jnp.tanh, key=jr.key(1)),
}


def velocity(name):
    field = FIELDS[name]
    return field.bind() if isinstance(field, MLPField) else field


def step(rule, name, solver, dt, z=None):
    z = jr.normal(jr.key(2), (4,)) if z is None else z
    return rule.apply(solver.step(velocity(name), dt), z, cell=0)[1]


every_field = pytest.mark.parametrize("name", FIELDS)
every_solver = pytest.mark.parametrize("solver", [euler, midpoint, rk4])


@every_field
@every_solver
@pytest.mark.parametrize(
    ("rule", "order"),
    [(Taylor(1), 2), (Taylor(2), 3), (Taylor(3), 4), (Taylor(4), 5), (PrintedTaylor(), 2)],
    ids=["first", "second", "third", "fourth", "printed"],
)
def test_order_of_the_series(name, solver, rule, order):
    """The error per cell of n terms falls as dt^(n + 1); that of the printed second order only as dt^2."""
    # The higher the order, the larger the steps at which the error still stands clear of rounding.
    small = 0.005 if order < 5 else 0.04
    points = jr.normal(jr.key(5), (20, 4))

    @partial(jax.jit, static_argnums=0)  # dt is a plain number in the flow, too
    def error(dt):
        gaps = jax.vmap(lambda z: step(rule, name, solver, dt, z) - step(Exact(), name, solver, dt, z))(points)
        return jnp.median(jnp.abs(gaps))

    assert_allclose(np.log(error(4 * small) / error(small)) / np.log(4), order, atol=0.3)


def test_printed_second_order_is_right_for_symmetric_jacobians():
    matrix = jnp.array([[0.3, 0.1], [0.1, -0.2]])
    z = jnp.ones(2)
    printed, right = (
        rule.apply(euler.step(lambda z: matrix @ z, 0.5), z, cell=0)[1] for rule in (PrintedTaylor(), Taylor(2))
    )
    assert_allclose(printed, right, atol=1e-14)


def test_erratum_of_the_printed_second_order():
    """Medians of the error on random 2 x 2 Jacobians: the printed form gains nothing in order over the first."""
    matrices = 0.5 * jr.normal(jr.key(0), (4000, 2, 2))

    def median(rule, dt):
        def error(matrix):
            steps = [r.apply(euler.step(lambda z: matrix @ z, dt), jnp.ones(2), cell=0)[1] for r in (rule, Exact())]
            return jnp.abs(steps[0] - steps[1])

        return float(jnp.median(jax.vmap(error)(matrices)))

    first, printed, right = ([median(r, dt) for dt in (1 / 8, 1 / 32)] for r in (Taylor(1), PrintedTaylor(), Taylor(2)))
    assert 10 < first[0] / first[1] < 22
    assert 10 < printed[0] / printed[1] < 22
    assert 45 < right[0] / right[1] < 90
    assert_allclose([first[1], printed[1], right[1]], [2.3e-4, 1.2e-4, 2.0e-6], rtol=0.2)


@every_field
def test_divergence_with_euler_is_the_first_order(name):
    assert_allclose(step(Divergence(), name, euler, 0.1), step(Taylor(1), name, euler, 0.1), atol=1e-14)


def z_score(samples, truth):
    return (samples.mean() - truth) / (samples.std() / np.sqrt(len(samples)))


PROBED = {
    "taylor": (Taylor(3, probes=2), Taylor(3)),
    "taylor, rademacher": (Taylor(2, probes=1, kind="rademacher"), Taylor(2)),
    "printed": (PrintedTaylor(probes=1), PrintedTaylor()),
    "divergence": (Divergence(probes=1), Divergence()),
    "unbiased": (Unbiased(), Exact()),
    "unbiased, two probes": (Unbiased(terms=1, keep=0.7, probes=2, kind="rademacher"), Exact()),
}


@pytest.mark.parametrize("rule", PROBED)
@pytest.mark.parametrize(("name", "solver"), [("factored", euler), ("autodiff", midpoint)])
def test_estimators_and_their_gradients_are_unbiased(rule, name, solver):
    """The mean over many keys agrees with the rule without probes, in value and in gradient."""
    random, sure = PROBED[rule]
    z = jr.normal(jr.key(2), (4,))

    @jax.jit
    @jax.vmap
    def estimate(key):
        return jax.value_and_grad(lambda z: step(with_key(random, key), name, solver, 0.3, z))(z)

    values, gradients = estimate(jr.split(jr.key(9), 20_000))
    truth, slope = jax.jit(jax.value_and_grad(lambda z: step(sure, name, solver, 0.3, z)))(z)
    values, gradients, slope = map(np.asarray, (values, gradients, slope))
    assert values.std() > 1e-3
    assert abs(z_score(values, truth)) < 4
    for i in range(4):
        assert abs(z_score(gradients[:, i], slope[i])) < 4


RULES = {
    "exact": Exact(),
    "taylor": Taylor(2),
    "taylor, probes": Taylor(3, probes=1),
    "printed": PrintedTaylor(),
    "printed, probes": PrintedTaylor(probes=2),
    "divergence": Divergence(),
    "divergence, probes": Divergence(probes=1),
    "unbiased": Unbiased(),
}


@pytest.mark.parametrize(("name", "solver"), [*((name, euler) for name in RULES), ("exact", rk4), ("unbiased", rk4)])
def test_gradients_reach_every_parameter_through_every_rule(name, solver):
    """The log-determinant alone, of a flow with context, under vmap with a key for each sample."""
    flow = DDNF(
        jr.key(0),
        3,
        blocks=2,
        steps=2,
        hidden=(5, 2),
        output_scale=0.5,
        condition_dim=2,
        context_rank=1,
        log_det=RULES[name],
        solver=solver,
    )
    x, condition = jr.normal(jr.key(1), (4, 3)), jr.normal(jr.key(2), (4, 2))

    def loss(flow):
        def one(key, x, condition):
            return with_key(flow, key).transform_and_log_det(x, condition)[1]

        return jnp.sum(jax.vmap(one)(jr.split(jr.key(3), 4), x, condition))

    gradient = eqx.filter_jit(eqx.filter_grad(loss))(flow)
    # The last bias and shift move all points alike and leave volumes alone, but the steps after them do not.
    for leaf in jax.tree.leaves(eqx.filter(gradient.fields, eqx.is_inexact_array)):
        assert np.isfinite(leaf).all()
        assert (leaf != 0).any()


def test_probes_differ_by_sample_cell_and_flow():
    flow = DDNF(jr.key(0), 2, blocks=2, steps=3, output_scale=1.0, log_det=Divergence(probes=1))
    keys = jr.split(jr.key(1), 2)
    _, path = jax.vmap(lambda key: with_key(flow, key).path(jnp.ones(2)))(keys)
    assert np.abs(path.log_dets[0] - path.log_dets[1]).min() > 1e-6
    pair = with_key((flow, flow), jr.key(2))
    first, second = (f.transform_and_log_det(jnp.ones(2))[1] for f in pair)
    assert first != second
    again = with_key(flow, keys[0]).transform_and_log_det(jnp.ones(2))[1]
    assert_allclose(again, jnp.sum(path.log_dets[0]), atol=1e-12)


def test_with_key_leaves_the_rest_alone():
    flow = DDNF(jr.key(0), 2)
    assert eqx.tree_equal(with_key(flow, jr.key(1)), flow)


def test_a_rule_of_ones_own():
    class Half(ddnf.LogDet):
        def apply(self, step, z, *, cell):
            return step.apply(z), jnp.asarray(0.5)

    flow = DDNF(jr.key(0), 2, blocks=2, steps=3, log_det=Half())
    for batch in (jax.vmap(flow.transform_and_log_det), flow.batch_transform_and_log_det):
        assert_allclose(batch(jnp.ones((4, 2)))[1], 3.0)


def test_a_rule_of_version_0_1_still_works():
    class Half(ddnf.LogDet):
        def step(self, solver, velocity, z, *, dt, cell):
            return solver(velocity, z, dt), jnp.asarray(0.5)

    flow = DDNF(jr.key(0), 2, blocks=2, steps=3, log_det=Half())
    with pytest.warns(DeprecationWarning, match="apply"):
        assert_allclose(flow.transform_and_log_det(jnp.ones(2))[1], 3.0)
    with pytest.warns(DeprecationWarning, match="apply"):
        assert_allclose(Exact().step(euler, lambda z: z, jnp.ones(2), dt=0.5, cell=0)[1], 2 * np.log(1.5))

"""Bad input gets one clear line, before anything is traced."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import pytest

from ddnf import DDNF, MLPField, PrintedTaylor, Taylor, Unbiased, certify, sobolev

FLOW = DDNF(jr.key(0), 2)
CONDITIONAL = DDNF(jr.key(0), 2, condition_dim=3)


def broken_flow():
    return eqx.tree_at(lambda f: f.fields.weights[0], FLOW, replace_fn=lambda w: w.at[0].set(jnp.nan))


BAD = {
    "blocks": (lambda: DDNF(jr.key(0), 2, blocks=0), "Expected blocks to be an integer of at least 1; got 0"),
    "steps": (lambda: DDNF(jr.key(0), 2, steps=0), "Expected steps to be an integer of at least 1; got 0"),
    "dim": (lambda: DDNF(jr.key(0), 0), "Expected dim to be an integer of at least 1; got 0"),
    "width": (lambda: DDNF(jr.key(0), 2, hidden=(4, 0)), r"Expected hidden .* at least 1, .*; got \(4, 0\)"),
    "no layer": (lambda: MLPField(jr.key(0), 2, hidden=()), "Expected hidden to be one or more widths"),
    "one number for hidden": (lambda: DDNF(jr.key(0), 2, hidden=16), r"Expected hidden .* such as \(16, 16\); got 16"),
    "a seed for a key": (lambda: DDNF(0, 2), r"Expected a random key such as jax.random.key\(0\); got 0"),
    "half a step": (lambda: DDNF(jr.key(0), 2, steps=1.5), "Expected steps to be an integer of at least 1; got 1.5"),
    "field's shape": (
        lambda: DDNF(jr.key(0), 2, field=lambda key: lambda z, condition: z[:1]),
        r"Expected field\(key\) .* of shape \(2,\); got \(1,\)",
    ),
    "field's arguments": (
        lambda: DDNF(jr.key(0), 2, field=lambda key: lambda z: z),
        r"Expected field\(key\) to be a function \(z, condition\) .* it raised TypeError",
    ),
    "batch of other points": (
        lambda: FLOW.batch_transform_and_log_det(jnp.ones((4, 3))),
        r"Expected points of shape \(n, 2\); got \(4, 3\)",
    ),
    "batch with other conditions": (
        lambda: CONDITIONAL.batch_inverse_and_log_det(jnp.ones((4, 2)), jnp.ones((5, 3))),
        r"Expected condition of shape \(3,\), or one for each of 4 points; got \(5, 3\)",
    ),
    "activation": (
        lambda: DDNF(jr.key(0), 2, activation="relu"),
        "Expected activation to be one of tanh, .*; got 'relu'",
    ),
    "condition_dim": (
        lambda: DDNF(jr.key(0), 2, condition_dim=0),
        "Expected condition_dim to be an integer of at least 1",
    ),
    "context_rank": (lambda: DDNF(jr.key(0), 2, context_rank=1), "Expected a condition_dim with context_rank"),
    "inverse": (lambda: DDNF(jr.key(0), 2, inverse="fast"), "Expected inverse to be exact or reverse; got 'fast'"),
    "solver": (lambda: DDNF(jr.key(0), 2, solver="euler"), "Expected solver to be ddnf.euler, .*; got 'euler'"),
    "log_det": (lambda: DDNF(jr.key(0), 2, log_det="exact"), "Expected log_det to be a rule such as ddnf.Exact"),
    "recompute": (lambda: DDNF(jr.key(0), 2, recompute="all"), "Expected recompute to be"),
    "lipschitz": (lambda: DDNF(jr.key(0), 2, lipschitz=1.5), "Expected lipschitz between 0 and 1; got 1.5"),
    "own solver": (
        lambda: DDNF(jr.key(0), 2, lipschitz=0.5, solver=lambda v, z, dt: z),
        "Expected an MLPField and a solver",
    ),
    "point": (lambda: FLOW.transform(jnp.ones(3)), r"Expected input shape \(2,\); got \(3,\)"),
    "path's point": (lambda: FLOW.path(jnp.ones(3)), r"Expected input shape \(2,\); got \(3,\)"),
    "batch": (lambda: FLOW.inverse(jnp.ones((5, 2))), r"Expected input shape \(2,\); got \(5, 2\)"),
    "condition": (
        lambda: CONDITIONAL.transform(jnp.ones(2), jnp.ones(2)),
        r"Expected condition.shape \(3,\); got \(2,\)",
    ),
    "no condition": (lambda: CONDITIONAL.transform(jnp.ones(2)), "Expected condition to be provided"),
    "path's condition": (lambda: CONDITIONAL.path(jnp.ones(2)), "Expected condition to be provided; got None"),
    "integers": (lambda: FLOW.transform(jnp.ones(2, int)), "Expected floating-point input; got int"),
    "order": (lambda: Taylor(0), "Expected order of at least 1; got 0"),
    "probes": (lambda: Taylor(2, probes=0), "Expected probes of at least 1, or None; got 0"),
    "kind": (
        lambda: PrintedTaylor(probes=1, kind="uniform"),
        "Expected kind to be gaussian or rademacher; got 'uniform'",
    ),
    "keep": (lambda: Unbiased(keep=1.0), "Expected keep between 0 and 1; got 1.0"),
    "terms": (lambda: Unbiased(terms=0), "Expected terms of at least 1; got 0"),
    "no key": (
        lambda: DDNF(jr.key(0), 2, log_det=Taylor(2, probes=1)).transform(jnp.ones(2)),
        r"Expected a key for the probes of Taylor; got None. Set one for each sample with ddnf.with_key\(flow, key\)",
    ),
    "weights": (lambda: certify(broken_flow()), "Expected finite weights; got NaN or infinity"),
    "certified points": (lambda: certify(FLOW, jnp.ones(2)), r"Expected points of shape \(n, 2\); got \(2,\)"),
    "certified integers": (lambda: certify(FLOW, jnp.ones((3, 2), int)), "Expected floating-point points"),
    "certified condition": (
        lambda: certify(CONDITIONAL, jnp.ones((3, 2))),
        r"Expected conditions of shape \(n, 3\); got None",
    ),
    "certified conditions": (
        lambda: certify(CONDITIONAL, jnp.ones((3, 2)), jnp.ones((2, 3))),
        "Expected one condition for each of 3 points; got 2",
    ),
    "alpha": (lambda: sobolev(FLOW, jnp.ones(2), alpha=0.1), "Expected alpha of at most 0; got 0.1"),
    "power": (lambda: sobolev(FLOW, jnp.ones(2), alpha=-0.1, power=-1), "Expected power of at least 0; got -1"),
    "sobolev key": (lambda: sobolev(FLOW, jnp.ones(2), alpha=-0.1, probes=1), "Expected a key with probes; got None"),
}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("case", BAD)
def test_one_clear_line(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)

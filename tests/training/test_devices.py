"""Several devices give the result of one, up to rounding."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from ddnf.training import fit

RUN = """
import json, sys
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, jax.random as jr, numpy as np
from jax.flatten_util import ravel_pytree
import equinox as eqx
import ddnf
from ddnf.vae import VAE, Decoder, Encoder, fit_vae

rng = np.random.default_rng(0)
found = {}
for devices in (None, 1, 2, 4):
    x = np.concatenate([rng.gamma(2.0, size=(1001, 2)), rng.poisson(3.0, size=(1001, 1))], axis=1) if not found else x
    density = ddnf.fit_density(
        jr.key(0), x, support=["positive", "positive", "count"], steps=200, batch=64, devices=devices, progress=False
    )
    images = (rng.uniform(size=(120, 16)) < 0.5).astype(float) if not found else images
    vae = VAE(Encoder(jr.key(0), 16, 2), Decoder(jr.key(1), 2, 16))
    trained = fit_vae(
        jr.key(2), vae, images[:100], images[100:], epochs=10, batch=20, average=None, devices=devices, progress=False
    )
    flat = [ravel_pytree(eqx.filter(m, eqx.is_inexact_array))[0].tolist() for m in (density.flow, trained.vae)]
    losses = [*density.losses.tolist(), *trained.train.tolist()]
    found[str(devices)] = dict(losses=losses, parameters=[*flat[0], *flat[1]])
print(json.dumps(found))
"""


# Neither model is fitted: draws and log densities are what is compared.
EVALUATE = """
import json
import jax, jax.random as jr, numpy as np
jax.config.update("jax_enable_x64", True)
from flowjax.bijections import Invert
from ddnf import DDNF, Density, Posterior
from ddnf.density.columns import columns_from

flow = DDNF(jr.key(3), 2, blocks=1, steps=2, hidden=(4,))
nothing = np.zeros(0)
density = Density(
    Invert(flow), columns_from("real", 2), np.zeros(2), np.eye(2), None, None, 0.0, 0.0, nothing, nothing, nothing
)
posterior = Posterior(flow, None, 0.0, 0.0, 0.0, 0.0, 0.0, (), nothing, nothing)
points, found = np.random.default_rng(0).normal(size=(1077, 2)), {}
for devices in (None, 1, 2, 4):
    values = [
        density.log_prob(points, devices=devices),
        density.sample(jr.key(4), 100, devices=devices),
        posterior.log_prob(points, devices=devices),
        posterior.sample_unconstrained(jr.key(5), 100, devices=devices),
    ]
    found[str(devices)] = np.concatenate([np.ravel(value) for value in values]).tolist()
print(json.dumps(found))
"""


POSTERIOR = """
import json
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, jax.random as jr, numpy as np
from jax.flatten_util import ravel_pytree
import equinox as eqx
import ddnf
from ddnf.posterior.hmc import Kernel, Space, nowhere, run
from ddnf.training.devices import mesh_of

rng = np.random.default_rng(0)
x = rng.normal(size=(1001, 3))
y = (rng.uniform(size=1001) < 1 / (1 + np.exp(-x @ [0.5, -1.0, 0.3]))).astype(float)

def row(z, row):
    x, y = row
    return y * (x @ z) - jax.nn.softplus(x @ z)

tall = ddnf.Target(lambda z: -jnp.sum(z**2) / 8, 3, rows=(x, y), log_likelihood=row)
curved = ddnf.Target(
    lambda z: -(z[0] ** 2) / 2 - (z[1] - z[0] ** 2 / 2) ** 2 - jnp.mean((jnp.asarray(y) - z[2]) ** 2), 3
)
flow = ddnf.DDNF(jr.key(0), 3, blocks=1, steps=2, hidden=(4,))
kernel = Kernel(jnp.ones(3), jnp.array(-1.0), jnp.array(4))
options = dict(steps=200, rounds=1, exact="never", progress=False)
found, points = {}, rng.normal(size=(21, 3)) / 4
for devices in (None, 1, 2, 4):
    result = {}
    for gradient in ("path", "total"):
        posterior = ddnf.fit_posterior(jr.key(0), curved, flow=flow, gradient=gradient, devices=devices, **options)
        flat = ravel_pytree(eqx.filter(posterior.flow, eqx.is_inexact_array))[0]
        result[gradient] = [*posterior.losses.tolist(), *flat.tolist(), posterior.elbo, posterior.ess]
    there = tall.on(mesh_of(devices)).programs
    parts = there.values(points), *there.gradients(points), there.hessian(points[0])
    result["rows"] = np.concatenate([np.ravel(part) for part in parts]).tolist()
    target = curved.on(mesh_of(devices))
    space = Space(target.programs.density, flow, None, target.mesh)
    result["chains"] = np.ravel(run(space, jr.key(1), kernel, nowhere(8, 3), jnp.array(0.1))[2].z).tolist()
    found[str(devices)] = result
    assert posterior.target is curved
print(json.dumps(found))
"""


ONE_EXCHANGE = """
import json
import jax, jax.numpy as jnp, numpy as np
from ddnf.training.devices import mean_of_devices, mesh_of, share_rows

def value_and_gradient(weights, rows):
    def loss(weights):
        z = jax.lax.scan(lambda z, w: (jnp.tanh(z @ w), None), rows, weights["layers"])[0]
        return jnp.mean((z - weights["mean"]) ** 2)
    return jax.value_and_grad(loss)(weights)

weights = dict(layers=jnp.linspace(-1, 1, 27).reshape(3, 3, 3), mean=jnp.ones(3))
rows, mesh = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), mesh_of(4)
shared = jax.jit(lambda w, x: mean_of_devices(mesh, value_and_gradient, w, x)).lower(weights, share_rows(mesh, rows))
compiled = shared.compile()
results = compiled(weights, share_rows(mesh, rows)), jax.jit(value_and_gradient)(weights, rows)
flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result)]).tolist() for result in results]
print(json.dumps(dict(exchanges=compiled.as_text().count(" all-reduce("), flat=flat)))
"""


def on_four_devices(code: str) -> dict:
    environment = os.environ | dict(XLA_FLAGS="--xla_force_host_platform_device_count=4", DDNF_CACHE="off")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_devices_exchange_one_vector_of_means():
    """Also where the gradient comes from a loop."""
    found = on_four_devices(ONE_EXCHANGE)
    assert found["exchanges"] == 1
    np.testing.assert_allclose(found["flat"][0], found["flat"][1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_draws_and_log_densities_of_several_devices():
    found = on_four_devices(EVALUATE)
    for devices in ("1", "2", "4"):
        np.testing.assert_allclose(found[devices], found["None"], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_posteriors_of_several_devices():
    found = on_four_devices(POSTERIOR)
    for devices in ("1", "2", "4"):
        for name, values in found["None"].items():
            np.testing.assert_allclose(found[devices][name], values, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.slow
def test_virtual_devices_agree_with_one():
    found = on_four_devices(RUN)
    for devices in ("1", "2", "4"):
        for name in ("losses", "parameters"):
            np.testing.assert_allclose(found[devices][name], found["None"][name], rtol=1e-6, atol=1e-8)


def run(devices, data):
    def loss(x, draw):
        return jnp.mean((draw.rows - x) ** 2)

    options = dict(data=data, devices=devices, batch=8, progress=False)
    return fit(jax.random.key(0), jnp.zeros(()), loss, steps=20, optimizer=optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("some", "Expected devices to be 'all', a number from 1 to .*; got some"),
        (10_000, "got 10000"),
        (Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b")), "a mesh with one axis; got Mesh"),
    ],
)
def test_bad_devices_are_one_clear_error(devices, message, as_users_run_it):
    with pytest.raises(ValueError, match=message) as caught:
        run(devices, jnp.ones(8))
    assert "\n" not in str(caught.value)


def test_devices_share_a_batch_evenly(as_users_run_it):
    two = Mesh(np.array(jax.devices() * 2)[:2], ("rows",))
    with pytest.raises(ValueError, match="Expected a batch that 2 devices can share evenly; got 7 rows"):
        run(two, jnp.ones(7))


def test_one_device_is_a_mesh_of_one():
    results = [run(devices, jnp.arange(9.0)).parameters for devices in (None, "all", 1)]
    np.testing.assert_allclose(results, float(results[0]))

# %% [hidden]
import argparse
import os

parser = argparse.ArgumentParser(description="Many rows, checkpoints, and several devices.")
parser.add_argument("--rows", type=int, default=200_000, help="rows of the table")
parser.add_argument("--steps", type=int, default=1000, help="training steps")
options = parser.parse_args()
# Two devices on any machine: the CPU's cores. On a machine with GPUs, leave this out.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

# %% [markdown]
# # Large data and many devices
#
# ## Many rows
#
# `fit_density` sees a batch of rows per step, so that the time of a step does not depend on their number. The rows are an argument of the compiled
# program: nothing is compiled again for another table of the same shape.

# %%
import tempfile

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import ddnf

rng = np.random.default_rng(0)
angle = rng.uniform(0, 2 * np.pi, options.rows)
rows = np.stack([np.cos(angle), np.sin(angle), 0.5 * angle], axis=1) + 0.1 * rng.normal(size=(options.rows, 3))

# %% [markdown]
# ## Checkpoints
#
# With `checkpoint=` a run that is stopped continues where it was when it is started again with the same arguments. The folder gets a subfolder of
# ours; other files in it are not touched.

# %%
with tempfile.TemporaryDirectory() as folder:
    density = ddnf.fit_density(jr.key(0), rows, steps=options.steps, batch=1024, checkpoint=folder, progress=False)
print(density)

# %% [markdown]
# ## A cache of compiled programs
#
# In a new process the first call compiles for some seconds. `ddnf.cache_compilation()`, before the first fit, keeps compiled programs on disk for the next
# time.
#
# ## Several devices
#
# Shard the rows over the devices, and JAX runs each part where it is. Flows have no state and no communication between points, so that evaluation
# and sampling scale with the number of devices.

# %%
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("rows",))
sharding = NamedSharding(mesh, PartitionSpec("rows"))
noise = jax.device_put(jr.normal(jr.key(1), (10_000, 3)), sharding)
flow = ddnf.DDNF(jr.key(2), 3, blocks=4, steps=4, hidden=(16, 16))
y, log_det = jax.jit(jax.vmap(flow.transform_and_log_det))(noise)
print(len(jax.devices()), "devices;", "sharded result:", len(y.sharding.device_set) == len(jax.devices()))

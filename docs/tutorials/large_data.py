# %% [hidden]
import argparse
import os

parser = argparse.ArgumentParser(description="Many rows, checkpoints, and several devices.")
parser.add_argument("--rows", type=int, default=200_000, help="rows of the table")
parser.add_argument("--steps", type=int, default=1000, help="training steps")
options = parser.parse_args()
# Splits the CPU into two devices. Leave this out on a machine with GPUs.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

# %% [markdown]
# # Large data and many devices
#
# ## Many rows
#
# `fit_density` uses one batch of rows per step, so the time per step does not depend on the number of rows. The rows are an argument of the
# compiled program, so a second table of the same shape does not trigger a new compilation.

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
# With `checkpoint=`, you can interrupt a run and resume it by starting it again with the same arguments. Checkpoints are written to their
# own subfolder; other files in the folder are not touched.

# %%
with tempfile.TemporaryDirectory() as folder:
    density = ddnf.fit_density(jr.key(0), rows, steps=options.steps, batch=1024, checkpoint=folder, progress=False)
print(density)

# %% [markdown]
# ## A cache of compiled programs
#
# In a new process, the first call spends several seconds compiling. Call `ddnf.cache_compilation()` before the first fit to keep compiled
# programs on disk for later processes.
#
# ## Several devices
#
# If you shard the points over the devices, JAX evaluates each shard on its own device. Flows have no state and need no communication
# between points, so evaluation and sampling scale with the number of devices.

# %%
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("rows",))
sharding = NamedSharding(mesh, PartitionSpec("rows"))
noise = jax.device_put(jr.normal(jr.key(1), (10_000, 3)), sharding)
flow = ddnf.DDNF(jr.key(2), 3, blocks=4, steps=4, hidden=(16, 16))
y, log_det = jax.jit(jax.vmap(flow.transform_and_log_det))(noise)
print(len(jax.devices()), "devices;", "sharded result:", len(y.sharding.device_set) == len(jax.devices()))

# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="A variational auto-encoder with a flow.")
parser.add_argument("--epochs", type=int, default=60, help="epochs of training")
parser.add_argument("--images", type=int, default=1200, help="training images")
options = parser.parse_args()

# %% [markdown]
# # An auto-encoder
#
# This page trains a variational auto-encoder on scikit-learn's small digits. Its posterior is a diagonal Gaussian followed by a flow that
# depends on the image. Training pixels are re-binarised every epoch; validation and test images are binarised once.

# %%
import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np

import ddnf
from ddnf.vae import Decoder, Encoder
from sklearn.datasets import load_digits

pixels = (load_digits().images.reshape(-1, 64) * 255 / 16).astype(np.uint8)
train, valid, test = pixels[: options.images], pixels[1200:1500] > 127, pixels[1500:] > 127

# %% [markdown]
# The networks can be any Equinox modules. `lipschitz=0.97` guarantees that no step of the flow folds.

# %%
latent, context = 4, 16
keys = jr.split(jr.key(0), 4)


def make(flow):
    encoder = Encoder(keys[0], 64, latent, context=context)
    return ddnf.VAE(encoder, Decoder(keys[1], latent, 64, mean=train.mean(axis=0) / 255), flow)


flow = ddnf.DDNF(keys[2], latent, blocks=4, steps=1, hidden=(8,), condition_dim=context, lipschitz=0.97)
results = {}
for name, vae in (("Gaussian", make(None)), ("DDNF", make(flow))):
    trained = ddnf.fit_vae(keys[3], vae, train, valid, pixels="dynamic", epochs=options.epochs, progress=False)
    results[name] = trained.vae
    judged = ddnf.judge_vae(jr.key(1), trained.vae, test, importance_draws=100)
    print(
        f"{name:9} -ELBO {judged.negative_elbo:.2f}, -log p(x) {judged.negative_log_prob:.2f}, folded {judged.folded:.0%}"
    )

# %% [markdown]
# `judge_vae` uses the exact log-determinant, whatever rule the model was trained with. The difference between -ELBO and -log p(x) is the
# most that a better posterior could gain with this decoder.

# %%
samples = np.asarray(results["DDNF"].sample(jr.key(2), 20)).reshape(2, 10, 8, 8)
figure, axes = plt.subplots(figsize=(7, 1.6))
axes.imshow(np.concatenate([np.concatenate(list(row), axis=1) for row in samples]), cmap="gray")
axes.set_axis_off()

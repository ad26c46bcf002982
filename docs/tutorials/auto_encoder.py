# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="A variational auto-encoder with a flow.")
parser.add_argument("--epochs", type=int, default=60, help="epochs of training")
parser.add_argument("--images", type=int, default=1200, help="training images")
options = parser.parse_args()

# %% [markdown]
# # An auto-encoder
#
# A variational auto-encoder of scikit-learn's small digits, whose posterior is a diagonal Gaussian followed by a flow that depends on the image.
# Training pixels are binarised again for every epoch; validation and test images have one fixed binarisation.

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
# Any Equinox modules do for the networks. `lipschitz=0.97` keeps every step of the flow from folding.

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
# `judge_vae` uses the exact log-determinant whatever trained the model. The distance between the -ELBO and -log p(x) is what a better posterior
# could still gain for this decoder.

# %%
samples = np.asarray(results["DDNF"].sample(jr.key(2), 20)).reshape(2, 10, 8, 8)
figure, axes = plt.subplots(figsize=(7, 1.6))
axes.imshow(np.concatenate([np.concatenate(list(row), axis=1) for row in samples]), cmap="gray")
axes.set_axis_off()

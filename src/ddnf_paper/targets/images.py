"""Images for the auto-encoders: MNIST, Omniglot, Frey faces, and scikit-learn's small digits.

Training images are grey values from 0 to 255. Held-out images also have one fixed binarisation: the published one for
MNIST's test images if its file is found, else one drawn with a fixed seed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8

_SEED = 20190
_MNIST = (
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
    "sha256:731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
)


class Split(NamedTuple):
    """Images of one split: grey values, and the fixed binarisation (`lit` where a pixel is 1)."""

    grey: UInt8[np.ndarray, "n pixels"]
    lit: Bool[np.ndarray, "n pixels"]


class Images(NamedTuple):
    """A set of images.

    Attributes:
        name: name of the set.
        shape: rows and columns of an image.
        train: grey values, for training.
        valid: held out to select the epoch.
        test: held out for the tables.
        labels: class of each test image; None if there are no classes.
        is_binary: whether pixels are modelled as binary; else they are real numbers.
        binarisation: origin of the fixed binarisation of the test images.
    """

    name: str
    shape: tuple[int, int]
    train: UInt8[np.ndarray, "n pixels"]
    valid: Split
    test: Split
    labels: Int[np.ndarray, " n"] | None
    is_binary: bool
    binarisation: str


def load(name: str, folder: Path | None = None) -> Images:
    """Loads a set of images: "mnist", "omniglot", "frey" or "digits".

    Args:
        name: name of the set. "digits" needs scikit-learn and no file; the others are read from `folder`.
        folder: folder of the files; None for `data_folder()`. MNIST is downloaded if it is missing (needs pooch).

    Example:
        >>> digits = load("digits")
        >>> digits.shape, digits.train.shape
        ((8, 8), (1197, 64))
    """
    if name not in SETS:
        raise ValueError(f"Expected images of {', '.join(SETS)}; got {name!r}.")
    return SETS[name](data_folder() if folder is None else Path(folder))


def data_folder() -> Path | None:
    """The folder of data files: the variable DDNF_DATA, else `shared/data` beside a checkout, else None."""
    if named := os.environ.get("DDNF_DATA"):
        return Path(named)
    beside = Path(__file__).parents[4] / "shared" / "data"
    return beside if beside.is_dir() else None


def best_at_hand(folder: Path | None = None) -> str:
    """ "mnist" if its file is found, else "digits": real digits without a download.

    Example:
        >>> best_at_hand(Path("no such folder"))
        'digits'
    """
    return "mnist" if _find("mnist.npz", data_folder() if folder is None else folder) else "digits"


def binarised(grey: UInt8[np.ndarray, "n pixels"], seed: int = _SEED) -> Bool[np.ndarray, "n pixels"]:
    """Binarises images: each pixel is 1 with the probability of its grey value; fixed by the seed.

    Example:
        >>> binarised(np.array([[0, 255]], np.uint8)).tolist()
        [[False, True]]
    """
    return np.random.default_rng(seed).random(grey.shape, np.float32) * 255 < grey


def _mnist(folder: Path | None) -> Images:
    path = _find("mnist.npz", folder) or _download()
    with np.load(path, allow_pickle=False) as file:
        train, test, labels = _flat(file["x_train"]), _flat(file["x_test"]), file["y_test"].astype(int)
    published = _find("mnist_binarized_fixed.npz", folder)
    if published is None:
        lit, origin = binarised(test), f"drawn with seed {_SEED}"
    else:
        # Its test images are sorted by digit: sort ours too, so that labels and images agree.
        with np.load(published, allow_pickle=False) as file:
            lit = file["test"].astype(bool)
        order = np.argsort(labels, kind="stable")
        test, labels, origin = test[order], labels[order], "Larochelle and Murray, 2011"
    return Images("mnist", (28, 28), train[:58_000], _split(train[58_000:]), Split(test, lit), labels, True, origin)


def _omniglot(folder: Path | None) -> Images:
    path = _needed("omniglot_28x28.npz", folder, "images (32460, 28, 28), ink bright, and alphabet (32460,)")
    with np.load(path, allow_pickle=False) as file:
        images, alphabet = _flat(file["images"]), file["alphabet"].astype(int)
    order = np.random.default_rng(_SEED).permutation(len(images))[: 24_345 + 8_070]
    train, test = images[order[:23_000]], images[order[24_345:]]
    origin, valid = f"drawn with seed {_SEED}", images[order[23_000:24_345]]
    return Images("omniglot", (28, 28), train, _split(valid), _split(test), alphabet[order[24_345:]], True, origin)


def _frey(folder: Path | None) -> Images:
    path = _needed("freyfaces.npz", folder, "images (1965, 28, 20)")
    with np.load(path, allow_pickle=False) as file:
        images = _flat(file["images"])
    order = np.random.default_rng(_SEED).permutation(len(images))
    train, valid, test = np.split(images[order], [1565, 1765])
    return Images("frey", (28, 20), train, _split(valid), _split(test), None, False, "none: real values")


def _digits(folder: Path | None) -> Images:
    from sklearn.datasets import load_digits

    values, target = load_digits(return_X_y=True)
    images = np.round(np.asarray(values) * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(_SEED).permutation(len(images))
    train, valid, test = np.split(images[order], [1197, 1397])
    labels, origin = np.asarray(target)[order[1397:]].astype(int), f"drawn with seed {_SEED}"
    return Images("digits", (8, 8), train, _split(valid), _split(test), labels, True, origin)


SETS: dict[str, Callable[[Path | None], Images]] = {
    "mnist": _mnist,
    "omniglot": _omniglot,
    "frey": _frey,
    "digits": _digits,
}


def _split(grey: np.ndarray) -> Split:
    return Split(grey, binarised(grey))


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1).astype(np.uint8)


def _find(file: str, folder: Path | None) -> Path | None:
    path = None if folder is None else folder / file
    return path if path is not None and path.is_file() else None


def _needed(file: str, folder: Path | None, content: str) -> Path:
    path = _find(file, folder)
    if path is None:
        raise ValueError(
            f"Expected {file} (NumPy arrays: {content}) in the folder given by --data or DDNF_DATA; got "
            f"{'no folder' if folder is None else repr(str(folder))}."
        )
    return path


def _download() -> str:
    address, checksum = _MNIST
    try:
        import pooch

        return pooch.retrieve(address, checksum, fname="mnist.npz", path=pooch.os_cache("ddnf"), progressbar=True)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            "Expected mnist.npz in the folder given by --data or DDNF_DATA; there is none, and it could not be "
            f"downloaded ({type(error).__name__}: {error}). Install pooch for the download, or give the folder."
        ) from error

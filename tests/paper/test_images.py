"""Images: what is where, what is held out, and what happens without the files."""

import os

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ddnf_paper.targets import images

SIZES = {
    "mnist": ((28, 28), 58_000, 2_000, 10_000),
    "omniglot": ((28, 28), 23_000, 1_345, 8_070),
    "frey": ((28, 20), 1_565, 200, 200),
    "digits": ((8, 8), 1_197, 200, 400),
}


def loaded(name):
    try:
        return images.load(name)
    except ValueError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_values(name):
    data = loaded(name)
    shape, train, valid, test = SIZES[name]
    assert data.shape == shape
    assert data.train.shape == (train, shape[0] * shape[1]) and data.train.dtype == np.uint8
    assert data.valid.grey.shape[0] == valid and data.test.lit.shape[0] == test
    assert data.labels is None or len(data.labels) == test
    for split in (data.valid, data.test):
        # No pixel is lit where there is no ink, none is dark where there is nothing else.
        assert not split.lit[split.grey == 0].any() and split.lit[split.grey == 255].all()
        assert abs(split.lit.mean() - split.grey.mean() / 255) < 0.003


@pytest.mark.parametrize("name", ["omniglot", "digits"])
def test_splits_do_not_overlap(name):
    data = loaded(name)
    rows = [{row.tobytes() for row in part} for part in (data.train, data.valid.grey, data.test.grey)]
    shared = max(len(rows[i] & rows[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert shared <= 2  # a drawing may be there twice


def test_mnist_labels_go_with_the_published_binarisation():
    data = loaded("mnist")
    assert data.labels is not None
    assert data.binarisation.startswith("Larochelle")
    means = np.stack([data.test.lit[data.labels == digit].mean(axis=0) for digit in range(10)])
    distances = ((data.test.grey[:, None] / 255.0 - means) ** 2).sum(axis=2)
    assert np.mean(distances.argmin(axis=1) == data.labels) > 0.75


def test_binarisation_is_fixed():
    grey = np.full((3, 1000), 100, np.uint8)
    assert_array_equal(images.binarised(grey), images.binarised(grey))
    assert abs(images.binarised(grey).mean() - 100 / 255) < 0.03


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match=r"Expected omniglot_28x28.npz .* in the folder given by --data or DDNF_DATA"):
        images.load("omniglot", tmp_path)
    with pytest.raises(ValueError, match="Expected images of mnist"):
        images.load("faces")


def test_mnist_without_the_published_binarisation(tmp_path):
    rng = np.random.default_rng(0)
    few = {
        f"x_{part}": rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for part, n in (("train", 60_000), ("test", 5))
    }
    np.savez(tmp_path / "mnist.npz", **few, y_train=np.zeros(60_000, np.uint8), y_test=np.arange(5, dtype=np.uint8))
    data = images.load("mnist", tmp_path)
    assert data.binarisation.startswith("drawn") and data.test.lit.shape == (5, 784)


def test_folder_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DDNF_DATA", str(tmp_path))
    assert images.data_folder() == tmp_path and images.best_at_hand() == "digits"

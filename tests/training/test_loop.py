"""The training loop: finds optima, survives NaN and SIGKILL, stops in time, and does not compile twice."""

import os
import random
import signal
import subprocess
import sys
import time
from threading import Thread

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import paramax
import pytest
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

from ddnf.training import loop as train


def quadratic(x, draw):
    return jnp.sum((x - 3.0) ** 2) + 0.1 * jnp.sum(x * jr.normal(draw.key, x.shape))


def fit(loss=quadratic, start=None, **options):
    start = jnp.zeros(3) if start is None else start
    settings = dict(steps=300, optimizer=train.adam(0.1, 300), chunk=50, progress=False) | options
    return train.fit(jr.key(0), start, loss, **settings)


def test_finds_the_optimum():
    result = fit()
    assert_allclose(result.parameters, 3.0, atol=0.05)
    assert result.steps == 300 and result.skipped == 0 and result.reason == "finished"
    assert result.losses.shape == (6,) and result.losses[-1] < result.losses[0]
    assert result.seconds.shape == (6,) and (result.seconds > 0).all()


def test_steps_need_not_fill_the_last_chunk():
    counted = fit(lambda x, draw: jnp.sum(x), jnp.zeros(()), steps=130, optimizer=optax.sgd(1.0))
    assert float(counted.parameters) == -130.0 and counted.steps == 130


def test_every_row_is_seen_equally():
    rows = jnp.arange(10.0)
    seen = fit(
        lambda x, draw: -jnp.sum(x[draw.rows.astype(int)]),
        jnp.zeros(10),
        data=rows,
        batch=5,
        steps=100,
        chunk=50,
        optimizer=optax.sgd(1.0),
    )
    assert_array_equal(seen.parameters, jnp.full(10, 50.0))


def test_steps_without_a_finite_gradient_change_nothing():
    def sometimes(x, draw):
        return jnp.where(draw.step % 10 == 3, jnp.nan, 1.0) * jnp.sum((x - 3.0) ** 2)

    with pytest.warns(RuntimeWarning, match="30 of 300 steps"):
        result = fit(sometimes)
    assert result.skipped == 30
    assert_allclose(result.parameters, 3.0, atol=0.05)


def test_infinite_gradients_are_skipped_too():
    def root(x, draw):  # finite at 0, with an infinite slope
        return lax.cond(draw.step == 0, lambda: jnp.sum(jnp.sqrt(x)), lambda: jnp.sum(x))

    with pytest.warns(RuntimeWarning, match="1 of 10 steps"):
        result = fit(root, jnp.zeros(2), steps=10, chunk=10, optimizer=optax.sgd(0.1))
    assert_allclose(result.parameters, -0.9)


def test_stops_after_too_many_and_returns_the_best():
    def breaks(x, draw):
        return jnp.where(draw.step >= 100, jnp.nan, 1.0) * jnp.sum((x - 3.0) ** 2)

    with pytest.warns(RuntimeWarning, match="stopped after 150 steps"):
        result = fit(breaks)
    assert result.reason == train.TOO_MANY_BAD and result.steps == 150
    assert np.isfinite(result.parameters).all() and float(jnp.abs(result.parameters - 3).max()) < 1


def test_early_stopping_keeps_the_best_parameters():
    """The validation value falls to x = 1 and rises beyond, while the loss goes on to 3."""
    result = fit(validate=lambda x, target: jnp.sum((x - target) ** 2), held_out=jnp.ones(3), patience=2, chunk=5)
    assert result.reason == "stopped early" and result.steps < 300
    best = int(np.argmin(result.values))
    assert len(result.values) == best + 3
    assert_allclose(np.sum((result.parameters - 1.0) ** 2), result.values[best])


def test_without_validation_a_loss_that_rises_for_good_is_not_returned():
    def rises(x, draw):
        return jnp.sum(jnp.where(draw.step < 100, (x - 3.0) ** 2, -1e3 * x**2)) + jnp.where(draw.step < 100, 0, 1e6)

    result = fit(rises, steps=300)
    assert_allclose(result.parameters, 3.0, atol=0.5)


def test_frozen_parameters_stay():
    tree = dict(a=jnp.zeros(2), b=paramax.NonTrainable(jnp.zeros(2)), c="text")
    result = fit(lambda t, draw: jnp.sum((t["a"] - 1) ** 2) + jnp.sum(paramax.unwrap(t["b"]) + 1), tree)
    assert_allclose(result.parameters["a"], 1.0, atol=0.05)
    assert_array_equal(result.parameters["b"].tree, 0.0)


def test_a_second_fit_does_not_compile_again():
    traces = []

    def loss(x, draw):
        traces.append(1)
        return quadratic(x, draw)

    fit(loss)
    first = len(traces)
    fit(loss, jnp.ones(3))
    assert len(traces) == first


def test_bar_shows_loss_and_speed(capfd):
    fit(progress=True, description="a fit")
    err = capfd.readouterr().err
    assert "a fit" in err and "loss=" in err and "it/s" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(steps=0), "steps to be an integer of at least 1"),
        (dict(chunk=0), "chunk"),
        (dict(batch=0), "batch"),
        (dict(patience=0), "patience"),
        (dict(data=(jnp.zeros(3), jnp.zeros(4))), "common number of rows"),
        (dict(data=jnp.zeros((0, 2))), "common number of rows"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_resumes_bit_for_bit(tmp_path):
    whole = fit()

    class StopError(Exception):
        pass

    calls = []

    def interrupted(folder, monkeypatch):
        original = train.run_chunk

        def run(*arguments, **options):
            calls.append(1)
            if len(calls) == 4:
                raise StopError
            return original(*arguments, **options)

        monkeypatch.setattr(train, "run_chunk", run)
        with pytest.raises(StopError):
            fit(checkpoint=folder, checkpoint_seconds=0.0)

    with pytest.MonkeyPatch.context() as patch:
        interrupted(tmp_path / "run", patch)
    resumed = fit(checkpoint=tmp_path / "run", checkpoint_seconds=0.0)
    assert_array_equal(whole.parameters, resumed.parameters)
    assert_array_equal(whole.losses, resumed.losses)
    with pytest.raises(ValueError, match="of this run"):
        fit(start=jnp.ones(3), checkpoint=tmp_path / "run")


def scaled(rate):
    return lambda x, draw: rate * quadratic(x, draw)


@pytest.mark.parametrize("option", ["optimizer", "our optimizer", "average", "loss", "validate"])
def test_a_run_with_other_settings_is_not_resumed(tmp_path, option):
    values = {
        "optimizer": (optax.sgd(0.1), optax.sgd(0.2)),
        "our optimizer": (train.adam(0.1, 50), train.adam(0.2, 50)),
        "average": (None, 0.9),
        "loss": (scaled(1.0), scaled(2.0)),
        "validate": (None, lambda x, _: jnp.sum(x)),
    }[option]
    settings = dict(steps=50, checkpoint=tmp_path / "run")
    first, again = (fit(**settings | {option.split()[-1]: values[0]}) for _ in range(2))
    assert_array_equal(first.losses, again.losses)
    assert np.isnan(again.seconds).all()
    with pytest.raises(ValueError, match="of this run"):
        fit(**settings | {option.split()[-1]: values[1]})


def test_checkpoint_needs_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Expected a folder that may be written"):
        fit(checkpoint=tmp_path / "file")


SCRIPT = """
import sys, jax.numpy as jnp, jax.random as jr, numpy as np
from ddnf.training import loop as train
def loss(x, draw):
    return jnp.sum((x - 3.0) ** 2) + 0.1 * jnp.sum(x * jr.normal(draw.key, x.shape))
print("ready", flush=True)
result = train.fit(jr.key(0), jnp.zeros(3), loss, steps=40_000, chunk=400, optimizer=train.adam(1e-2, 40_000),
                   checkpoint=sys.argv[1], checkpoint_seconds=0.0, progress=False)
np.save(sys.argv[2], np.asarray(result.parameters))
"""


@pytest.mark.slow
def test_sigkill_at_twenty_random_moments(tmp_path):
    """Killed twenty times, at any moment, and resumed each time: the same parameters, bit for bit."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}

    def start(folder, out):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / folder), str(tmp_path / out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)

    began = time.monotonic()
    with start("whole", "whole.npy") as process:
        assert process.wait() == 0
    length = time.monotonic() - began
    rng, kills = random.Random(0), 0
    while kills < 20:
        with start("killed", "killed.npy") as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0, length / 3))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
                continue
        assert process.returncode == 0  # it got to the end: begin anew
        (tmp_path / "killed").rename(tmp_path / f"done-{kills}")
    with start("killed", "killed.npy") as process:
        assert process.wait() == 0
    assert_array_equal(np.load(tmp_path / "whole.npy"), np.load(tmp_path / "killed.npy"))


def test_runs_under_debug_nans():
    with jax.debug_nans(True):
        result = fit(validate=lambda x, target: jnp.sum((x - target) ** 2), held_out=jnp.ones(3))
    assert np.isfinite(result.losses).all() and np.isfinite(result.values).all()


@pytest.mark.usefixtures("as_users_run_it")
def test_keys_and_counts_are_checked_before_tracing():
    with pytest.raises(ValueError, match=r"random key such as jax.random.key\(0\); got 0"):
        train.fit(0, jnp.zeros(3), quadratic, steps=10, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"steps to be an integer of at least 1; got 1\.5"):
        fit(steps=1.5)


def test_two_threads_do_not_wait_for_each_other():
    """Two compiled chunks at once can block the thread pool of a CPU with few cores."""
    results = []
    threads = [Thread(target=lambda: results.append(fit().steps), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == [300, 300]

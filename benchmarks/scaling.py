"""Strong and weak scaling of an auto-encoder: one process, and two processes pinned to a core each.

    python -m benchmarks.scaling --cores 1 0
    chrt --fifo 1 python -m benchmarks.scaling --cores 1 0

Pixels are re-binarised every epoch, as in the paper. With "ddnf+context" it is the paper's, with "wide" one without a
flow and with 500 hidden units. Strong: the same batch, shared. Weak: the same batch for each process. Times are the
fastest epoch of three runs after the first epoch, which compiles; the processor's time of an epoch is given too. Two
processes that wait for each other lose most where other programs run on the same cores: `chrt`, which needs privileges,
keeps these off.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.random as jr
import numpy as np

import ddnf
from ddnf.vae import Decoder, Encoder, fit_vae
from ddnf_paper.vae_models import make

RESULTS = Path(__file__).parents[1] / "results" / "scaling.json"
IMAGES, PIXELS, LATENT, WIDTH, EPOCHS = 8000, 784, 40, 500, 8
SIZES = (8, 64, 256, 1000)
LONGEST = 58  # seconds of a run
RUNS = 3
MODELS = ("ddnf+context", "wide")
# A network between machines, for the model: seconds per message and bytes per second of each link.
LATENCY, BANDWIDTH = 20e-6, 1.25e9


def build(model: str) -> ddnf.VAE:
    if model != "wide":
        return make(model, jr.key(0), latent=LATENT, mean=np.full(PIXELS, 0.3))
    encoder, decoder = Encoder(jr.key(0), PIXELS, LATENT, width=WIDTH), Decoder(jr.key(1), LATENT, PIXELS, width=WIDTH)
    return ddnf.VAE(encoder, decoder)


def work(model: str, rank: int, processes: int, port: int, batch: int) -> dict:
    if processes > 1:
        ddnf.initialize(f"localhost:{port}", processes, rank, timeout=60)
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, PIXELS), np.uint8)
    valid = (images[:100] > 127).astype(np.float32)
    vae = build(model)
    devices = "all" if processes > 1 else None
    began, used = time.perf_counter(), time.process_time()
    trained = fit_vae(
        jr.key(3), vae, images, valid, pixels="dynamic", epochs=EPOCHS, batch=batch, devices=devices, progress=False
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(vae) if hasattr(leaf, "nbytes"))
    share = 1 - trained.seconds[0] / (time.perf_counter() - began)
    return dict(
        seconds=float(trained.seconds[1:].min()),
        processor_seconds=float((time.process_time() - used) * share / (EPOCHS - 1)),
        steps=IMAGES // batch,
        parameter_bytes=size,
    )


def run(model: str, cores: list[int], batch: int, cache: str) -> list[dict]:
    """What each process measured, in the fastest of some runs."""
    runs = [run_once(model, cores, batch, cache) for _ in range(RUNS)]
    return min(runs, key=lambda found: max(r["seconds"] for r in found))


def run_once(model: str, cores: list[int], batch: int, cache: str) -> list[dict]:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    environment = dict(JAX_COMPILATION_CACHE_DIR=cache, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0") | os.environ
    command = [sys.executable, "-m", "benchmarks.scaling", "--model", model, "--work"]
    running = [
        subprocess.Popen(
            ["taskset", "-c", str(core), *command, *map(str, (rank, len(cores), port, batch))],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for rank, core in enumerate(cores)
    ]
    try:
        return [json.loads(process.communicate(timeout=LONGEST)[0].splitlines()[-1]) for process in running]
    finally:
        for process in running:
            process.kill()


def predicted(one: dict, two: list[dict]) -> dict:
    """Seconds per step of P devices: the measured compute, shared, and a ring all-reduce over a given network."""
    compute, size = one["seconds"] / one["steps"], one["parameter_bytes"]
    fixed = max(0.0, max(r["seconds"] for r in two) / two[0]["steps"] - compute / 2)

    def exchange(p):
        return 2 * (p - 1) * LATENCY + 2 * (p - 1) / p * size / BANDWIDTH

    strong = {str(p): compute / (compute / p + exchange(p)) for p in SIZES}
    weak = {str(p): compute / (compute + exchange(p)) for p in SIZES}
    return dict(
        step_seconds=compute,
        exchange_seconds_measured=fixed,
        bytes_per_step_and_device={str(p): 2 * (p - 1) / p * size for p in (2, *SIZES)},
        latency=LATENCY,
        bandwidth=BANDWIDTH,
        speedup_of_one_batch=strong,
        efficiency_of_a_batch_each=weak,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--work", type=int, nargs=4)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.model, *options.work)), flush=True)
        return
    with tempfile.TemporaryDirectory() as cache:
        one = run(options.model, options.cores[:1], options.batch, cache)[0]
        strong = run(options.model, options.cores, options.batch, cache)
        weak = run(options.model, options.cores, 2 * options.batch, cache)
    cores = " ".join(map(str, options.cores))
    is_alone = os.sched_getscheduler(0) == os.SCHED_FIFO
    command = f"python -m benchmarks.scaling --cores {cores} --batch {options.batch} --model {options.model}"
    found = dict(
        command=f"chrt --fifo 1 {command}" if is_alone else command,
        load_average=os.getloadavg()[0],
        one=one,
        strong=strong,
        weak=weak,
        strong_ratio=max(r["seconds"] for r in strong) / one["seconds"],
        weak_ratio=max(r["seconds"] / r["steps"] for r in weak) / (one["seconds"] / one["steps"]),
        strong_ratio_of_processor_time=max(r["processor_seconds"] for r in strong) / one["processor_seconds"],
        model=predicted(one, strong),
    )
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[options.model] = found
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

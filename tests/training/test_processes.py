"""Several processes give the result of one; one that dies ends the others, and the run goes on from its checkpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ddnf import cli, initialize
from ddnf.training import processes
from tests.training import worker

STEPS = 200


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start(folder: Path, count: int = 2, steps: int = STEPS) -> list[subprocess.Popen]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | dict(DDNF_CACHE="off")
    port = free_port()
    command = [sys.executable, worker.__file__, str(folder)]
    return [
        subprocess.Popen([*command, *map(str, (rank, count, port, steps))], env=environment, stderr=subprocess.PIPE)
        for rank in range(count)
    ]


def ends(running: list[subprocess.Popen]) -> list[str]:
    """What each process wrote to standard error."""
    return [process.communicate(timeout=300)[1].decode() for process in running]


def checkpoints(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("checkpoints/*/*") if path.name.isdecimal()]


def assert_same(found: dict, expected: dict) -> None:
    for name in ("losses", "parameters"):
        for one, other in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)  # compiled with other options here


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path):
    running = start(tmp_path)
    expected = worker.run(tmp_path / "one", None, STEPS)
    errors = ends(running)
    assert [process.returncode for process in running] == [0, 0], errors
    assert_same(json.loads((tmp_path / "found.json").read_text()), expected)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path):
    steps = 1000
    running = start(tmp_path, steps=steps)
    while not checkpoints(tmp_path):
        assert running[0].poll() is None, ends(running)
        time.sleep(0.05)
    running[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    line = ends(running)[0]
    assert time.monotonic() - killed < 60 and running[0].returncode == 1
    assert "ddnf: Process 1 of this run has ended, so this one ends too." in line
    assert 0 < max(checkpoints(tmp_path)) < steps // 10
    # It is resumed with one process, where there were two.
    assert_same(worker.run(tmp_path, None, steps), worker.run(tmp_path / "one", None, steps))


def meet(
    port: int, *ranks: int, timeout: float = 10.0, later: float = 0.0, totals: dict | None = None
) -> dict[int, str]:
    """What each process is told, by its place in `ranks`; "ready" if all is well. Others than rank 0 wait for `later`
    seconds more."""
    told: dict[int, str] = {}

    def one(place, rank):
        try:
            limit = timeout + (later if rank else 0.0)
            for link in processes._meet("localhost", port, (totals or {}).get(place, 3), rank, limit).values():
                link.close()
            told[place] = "ready"
        except ValueError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_processes_meet():
    assert meet(free_port(), 2, 0, 1) == {0: "ready", 1: "ready", 2: "ready"}


def test_a_rank_given_twice_is_one_clear_line():
    told = meet(free_port(), 0, 1, 1)
    assert set(told.values()) == {"Expected each rank from 0 to 2 once; rank 1 is given twice."}


def test_processes_that_disagree_on_their_number():
    told = meet(free_port(), 0, 1, totals={1: 5})
    assert told[0] == "Expected each rank from 0 to 2 once; one process expects 5 processes, another 3."


def test_a_process_that_does_not_come():
    told = meet(free_port(), 0, 2, timeout=0.5, later=30.0)
    assert told[0] == "Expected 3 processes; rank 1 did not come within 0.5 seconds."


def test_a_process_that_ends_before_all_have_come():
    port, told, began = free_port(), {}, time.monotonic()

    def first():
        told[0] = meet(port, 0, timeout=60.0)[0]

    waiting = threading.Thread(target=first)
    waiting.start()
    while True:
        try:
            link = socket.create_connection(("localhost", port))
            break
        except OSError:
            time.sleep(0.01)
    link.sendall(b"1 3\n")
    time.sleep(0.1)
    link.close()
    waiting.join()
    assert told[0] == "Expected each rank from 0 to 2 once; rank 1 has ended before all have come."
    assert time.monotonic() - began < 30


def test_a_coordinator_that_does_not_answer():
    port = free_port()
    expected = f"Expected a coordinator at localhost:{port}; none answered within 0.5 seconds."
    assert meet(port, 1, timeout=0.5) == {0: expected}


def test_rank_zero_twice():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        told = meet(port, 0, timeout=0.5)[0]
    assert told.startswith(f"Expected a free port for the coordinator; {port} is in use") and "twice?" in told


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
@pytest.mark.parametrize(
    ("cores", "policy", "expected"), [(1, "OTHER", "BATCH"), (1, "IDLE", "IDLE"), (2, "OTHER", "OTHER")]
)
def test_one_core_is_a_batch_job(monkeypatch, cores, policy, expected):
    """Else Gloo's thread would interrupt the one that sends."""
    found = []

    def schedule():
        # Policies are those of a thread; this one ends.
        os.sched_setscheduler(0, getattr(os, f"SCHED_{policy}"), os.sched_param(0))
        processes._keep_sender_running()
        found.append(os.sched_getscheduler(0))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    thread = threading.Thread(target=schedule)
    thread.start()
    thread.join()
    assert found == [getattr(os, f"SCHED_{expected}")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1234", 2, 2), "Expected a rank from 0 to 1; got 2"),
        (("localhost:1234", 2, -1), "Expected rank to be an integer of at least 0; got -1"),
        (("localhost:1234", 0, 0), "Expected processes to be an integer of at least 1; got 0"),
        (("localhost:many", 2, 0), "Expected coordinator to be an address and a port"),
        (
            ("localhost:1234",),
            "Expected coordinator, processes and rank, or none of them; got processes=None, rank=None",
        ),
        ((), "Expected Slurm, Kubernetes or MPI to provide|Expected initialize to be called before JAX computes"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)


@pytest.mark.slow
def test_fit_command_of_two_processes(tmp_path):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(400, 2)))
    port = free_port()
    words = [sys.executable, "-m", "ddnf", "fit", str(tmp_path / "a.npy"), "--steps", "20", "--distributed"]
    words += ["--coordinator", f"localhost:{port}", "--processes", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | dict(DDNF_CACHE="off")
    running = [
        subprocess.Popen(
            [*words, "--rank", str(rank), "-o", str(tmp_path / f"{rank}.ddnf")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert b"log-likelihood" in said[0][0] and b"log-likelihood" not in said[1][0]
    assert (tmp_path / "0.ddnf").is_file() and not (tmp_path / "1.ddnf").exists()


def test_rank_without_distributed(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["fit", "a.npy", "-o", str(tmp_path / "m.ddnf"), "--rank", "0"])
    assert "ddnf: Expected --distributed with --coordinator" in capsys.readouterr().err

"""Several processes that share one fit, over `jax.distributed`.

If the coordinator, the number of processes and the rank are given, the processes first connect to the coordinator's
address over their own sockets. A wrong rank or a missing process then raises a clear error, where JAX's runtime would
abort. The connections stay open. If one closes before its process is done, the other processes exit too.
"""

import atexit
import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from ddnf.system.checks import check_count

# Seconds after which a machine that does not answer counts as lost.
LOST = 30
# Seconds to wait for others: at a given address, and where a scheduler starts them, perhaps one after the other.
_WAIT, _WAIT_FOUND = 60.0, 300
_FAILED = threading.Event()


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    *,
    timeout: float | None = None,
) -> None:
    """Connects this process to others that run the same program, so that `devices="all"` means the devices of all.

    Call this before JAX computes anything. With Slurm, Kubernetes, TPUs and Open MPI, JAX finds the arguments itself.
    If a process dies, the others exit with a message.

    Args:
        coordinator: address and port of the first process, such as "10.0.0.1:1234".
        processes: number of processes.
        rank: number of this process, from 0.
        timeout: seconds to wait for the others; None for 60, or 300 if JAX finds the arguments.

    Example:
        >>> initialize("localhost", 2, 0)
        Traceback (most recent call last):
        ValueError: Expected coordinator to be an address and a port such as '10.0.0.1:1234'; got 'localhost'.
        >>> initialize("localhost:1234", 2)
        Traceback (most recent call last):
        ValueError: Expected coordinator, processes and rank, or none of them; got rank=None.
    """
    known = dict(coordinator=coordinator, processes=processes, rank=rank)
    lacking = [f"{name}=None" for name, value in known.items() if value is None]
    if 0 < len(lacking) < 3:
        raise ValueError(f"Expected coordinator, processes and rank, or none of them; got {', '.join(lacking)}.")
    if jax.distributed.is_initialized():
        raise ValueError("Expected initialize to be called once; this process has joined others already.")
    limits = dict(heartbeat_timeout_seconds=LOST)
    _keep_sender_running()
    if coordinator is None or processes is None or rank is None:
        _start(limits | dict(initialization_timeout=_WAIT_FOUND if timeout is None else max(1, int(timeout))))
        return
    timeout = _WAIT if timeout is None else timeout
    host, port = _check(coordinator, processes, rank)
    links = _meet(host, port, processes, rank, timeout)
    _watch(links)
    told = dict(coordinator_address=coordinator, num_processes=processes, process_id=rank)
    _start(limits | told | dict(initialization_timeout=max(1, int(timeout))))
    # Runs before JAX's own, which waits for all processes.
    atexit.register(_leave, links)
    shown = sys.excepthook
    sys.excepthook = lambda *error: (_FAILED.set(), shown(*error))


def is_first() -> bool:
    """Whether this process is the one that writes: the first of several, or the only one.

    Example:
        >>> is_first()
        True
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def fail() -> None:
    """Tells the other processes that this process failed, when it ends."""
    _FAILED.set()


def from_first(processes: int, tree: PyTree) -> PyTree:
    """Arrays of the first process, in all of them."""
    return tree if processes == 1 else multihost_utils.broadcast_one_to_all(tree)


@contextlib.contextmanager
def one_clear_end(processes: int) -> Iterator[None]:
    """Turns errors of the connections between processes into one that explains what happened."""
    try:
        yield
    except Exception as error:
        if processes == 1 or not any(word in str(error) for word in ("Gloo", "UNAVAILABLE", "DEADLINE", "collective")):
            raise
        time.sleep(5.0)  # the thread that watches the connections ends this process, if it runs
        fail()
        raise ConnectionError(_line("Another process")) from error


def _line(who: str) -> str:
    return f"{who} of this run has ended, so this one ends too. Restart all processes; with a checkpoint, they resume."


def _keep_sender_running() -> None:
    """Sets the batch scheduling policy of Linux, if this process has one core and the default policy.

    Gloo holds a lock while it sends. On one core, its receiving thread would preempt the sender and poll for the lock
    until its time slice ends, which takes 4 ms per message. Threads with the batch policy do not preempt each other
    when they wake up. Later threads inherit the policy.
    """
    if not hasattr(os, "SCHED_BATCH") or len(os.sched_getaffinity(0)) > 1:
        return
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _start(how: dict[str, Any]) -> None:
    try:
        jax.distributed.initialize(**how)
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise ValueError("Expected initialize to be called before JAX computes anything; it already has.") from error
    except ValueError as error:
        raise ValueError(
            "Expected Slurm, Kubernetes or MPI to provide the addresses of the processes; found none of these. Pass "
            "the coordinator, the number of processes and the rank."
        ) from error


def _check(coordinator: str, processes: int, rank: int) -> tuple[str, int]:
    check_count(processes=processes)
    check_count(0, rank=rank)
    if rank >= processes:
        raise ValueError(f"Expected a rank from 0 to {processes - 1}; got {rank}.")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"Expected coordinator to be an address and a port such as '10.0.0.1:1234'; got {coordinator!r}."
        )
    return host.strip("[]"), int(port)


def _meet(host: str, port: int, processes: int, rank: int, timeout: float) -> dict[int, socket.socket]:
    """Connections by rank: of the first process to all others, of these to the first."""
    deadline = time.monotonic() + timeout
    if rank:
        return {0: _join(host, port, processes, rank, deadline, timeout)}
    return _gather(port, processes, deadline, timeout)


def _gather(port: int, processes: int, deadline: float, timeout: float) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as closed_after_an_error:
        try:
            listener = socket.create_server(("", port))
        except OSError as error:
            raise ValueError(
                f"Expected a free port for the coordinator; {port} is in use ({error.strerror}). Is rank 0 given twice?"
            ) from error
        with listener:
            while len(links) < processes - 1:
                left = max(0.01, deadline - time.monotonic())
                ready = select.select([listener, *links.values()], [], [], left)[0]
                if not ready:
                    lacking = ", ".join(str(rank) for rank in range(1, processes) if rank not in links)
                    raise ValueError(
                        f"Expected {processes} processes; rank {lacking} did not come within {timeout:g} seconds."
                    )
                # Connected processes send nothing more, so a readable connection has closed.
                if gone := [rank for rank, link in links.items() if link in ready]:
                    _refuse(f"rank {gone[0]} has ended before all have come", links.values(), processes)
                try:
                    link = closed_after_an_error.enter_context(listener.accept()[0])
                    theirs, total = (int(word) for word in _receive(link, deadline).split())
                except (TimeoutError, ValueError):
                    continue  # a client that is not one of the processes
                _check_newcomer(theirs, total, link, links, processes)
                links[theirs] = link
        for link in links.values():
            link.sendall(b"ready\n")
        closed_after_an_error.pop_all()
    return links


def _check_newcomer(theirs: int, total: int, link: socket.socket, links: dict[int, socket.socket], processes: int):
    """Raises, and informs all processes, if a new process does not match the connected ones."""
    fault = f"rank {theirs} is given twice" if theirs in links else None
    fault = f"one process expects {total} processes, another {processes}" if total != processes else fault
    if fault is not None:
        _refuse(fault, (*links.values(), link), processes)


def _refuse(fault: str, links: Iterable[socket.socket], processes: int) -> NoReturn:
    """Tells the other processes why this run does not start, and raises."""
    for link in links:
        with contextlib.suppress(OSError):
            link.sendall(f"{fault}\n".encode())
    raise ValueError(f"Expected each rank from 0 to {processes - 1} once; {fault}.")


def _join(host: str, port: int, processes: int, rank: int, deadline: float, timeout: float) -> socket.socket:
    while True:
        with contextlib.ExitStack() as closed_after_an_error:
            try:
                link = socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
                closed_after_an_error.enter_context(link)
                link.sendall(f"{rank} {processes}\n".encode())
                answer = _receive(link, deadline)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"Expected a coordinator at {host}:{port}; none answered within {timeout:g} seconds."
                    ) from error
                time.sleep(0.1)
                continue
            if answer != "ready":
                fault = answer or "the coordinator has ended"
                raise ValueError(f"Expected each rank from 0 to {processes - 1} once; {fault}.")
            closed_after_an_error.pop_all()
            return link


def _receive(link: socket.socket, deadline: float) -> str:
    link.settimeout(max(0.01, deadline - time.monotonic()))
    with link.makefile("r") as lines:
        line = lines.readline().strip()
    link.settimeout(None)
    return line


def _watch(links: dict[int, socket.socket]) -> None:
    """Ends this process as soon as another process has closed its connection unexpectedly."""
    waiting = [threading.Thread(target=_wait, args=(*link, links), daemon=True) for link in links.items()]
    for link in links.values():
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in dict(TCP_KEEPIDLE=LOST // 3, TCP_KEEPINTVL=LOST // 6, TCP_KEEPCNT=4).items():
            if hasattr(socket, name):  # not on every system
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    for thread in waiting:
        thread.start()


def _wait(theirs: int, link: socket.socket, links: dict[int, socket.socket]) -> None:
    try:
        word = link.recv(64).decode().strip()
    except OSError:
        word = ""
    if word == "done":
        return
    who = int(word) if word.isdecimal() else theirs
    for other in links.values():
        with contextlib.suppress(OSError):
            other.sendall(f"{who}\n".encode())
    print(f"ddnf: {_line(f'Process {who}')}", file=sys.stderr, flush=True)
    os._exit(1)


def _leave(links: dict[int, socket.socket]) -> None:
    for link in links.values():
        with contextlib.suppress(OSError):
            if not _FAILED.is_set():
                link.sendall(b"done\n")
            else:
                link.shutdown(socket.SHUT_RDWR)

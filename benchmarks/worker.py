"""Processes that hold peers and run one at a time on request, so that JAX and PyTorch take turns on one core."""

import gc
import importlib
import multiprocessing
import time
import traceback
from typing import Any


class PeerError(RuntimeError):
    """An error within a worker."""


class Worker:
    """A process that imports one module of this folder and calls its functions.

    The module has `prepare(work, peer, size) -> (run, facts)`: a function of no arguments that does the work once and
    waits for it, and facts about it.
    """

    def __init__(self, module: str):
        context = multiprocessing.get_context("spawn")
        self._line, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(far_end, module), daemon=True)
        self._process.start()

    def prepare(self, name: str, work: str, peer: str, size: dict[str, Any]) -> dict[str, Any]:
        """Builds a task under this name, runs it once, and returns facts about it."""
        return self._ask("prepare", name, work, peer, size)

    def seconds(self, name: str, count: int, *, warm: bool) -> list[float]:
        """The time of each of `count` runs; with `warm`, after one that does not count and warms the caches."""
        return self._ask("seconds", name, count, warm)

    def drop(self, name: str) -> None:
        self._ask("drop", name)

    def stop(self) -> None:
        self._line.send(None)
        self._process.join(10)

    def _ask(self, *question: Any) -> Any:
        self._line.send(question)
        try:
            answer, error = self._line.recv()
        except EOFError:
            raise PeerError("the process died, perhaps out of memory") from None
        if error is not None:
            raise PeerError(error)
        return answer


class _Tasks:
    """The tasks of a worker process."""

    def __init__(self, module: str):
        self._module = importlib.import_module(f"benchmarks.{module}")
        self._runs = {}

    def prepare(self, name, work, peer, size):
        run, facts = self._module.prepare(work, peer, size)
        start = time.perf_counter()
        run()
        self._runs[name] = run
        return dict(first_seconds=time.perf_counter() - start, **facts)

    def seconds(self, name, count, warm):
        run = self._runs[name]
        if warm:
            run()
        return [_timed(run) for _ in range(count)]

    def drop(self, name):
        self._runs.pop(name, None)
        gc.collect()


def _timed(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _serve(line, module: str) -> None:
    tasks = None
    while (question := line.recv()) is not None:
        method, *arguments = question
        try:
            tasks = _Tasks(module) if tasks is None else tasks
            line.send((getattr(tasks, method)(*arguments), None))
        except Exception as error:
            traceback.print_exc()
            line.send((None, f"{type(error).__name__}: {error}"[:300]))

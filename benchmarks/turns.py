"""Tasks in turn: each runs once, then each again, so that noise of the machine affects them alike."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.worker import PeerError, Worker


@dataclasses.dataclass(frozen=True)
class Task:
    """A peer's work of some size, in the worker with this module."""

    module: str
    peer: str
    work: str
    size: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.peer} | {self.work} | {self.size}"


@dataclasses.dataclass(frozen=True)
class Patience:
    """How often tasks run: `most` rounds; fewer for one that has used `seconds`, but `least` within five times that."""

    least: int
    most: int
    seconds: float


FULL, QUICK = Patience(3, 7, 2.0), Patience(1, 5, 1.0)


class Workers:
    """One worker per module, started when first used."""

    def __init__(self):
        self._workers: dict[str, Worker] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self._workers.values():
            worker.stop()

    def __getitem__(self, module: str) -> Worker:
        if module not in self._workers:
            self._workers[module] = Worker(module)
        return self._workers[module]


def take_turns(workers: Workers, tasks: Sequence[Task], patience: Patience, title: str) -> list[dict]:
    """Times all tasks; one row each, with an error if it failed."""
    rows = []
    for one in tqdm(tasks, desc=f"{title}, compiling", leave=False):
        row = dict(work=one.work, peer=one.peer, **one.size)
        try:
            row |= workers[one.module].prepare(one.name, one.work, one.peer, one.size)
        except PeerError as error:
            row["error"] = str(error)
        rows.append((one, row, []))
    for number in tqdm(range(patience.most), desc=title, leave=False):
        for one, row, times in rows:
            if "error" not in row and _goes_on(times, number, patience):
                times += _turn(workers[one.module], one, times[-1] if times else row["first_seconds"])
    for one, row, times in rows:
        workers[one.module].drop(one.name)
        if times:
            row |= _figures(times)
    return [row for _, row, _ in rows]


def _goes_on(times: Iterable[float], number: int, patience: Patience) -> bool:
    spent, times_over = sum(times), 5 if number < patience.least else 1
    return number == 0 < patience.most or spent * (number + 1) / max(1, number) < times_over * patience.seconds


def _turn(worker: Worker, one: Task, last: float) -> list[float]:
    # A long run warms the caches by itself; a short one is repeated.
    return worker.seconds(one.name, max(1, min(5, int(0.02 / last))), warm=last < 0.5)


def _figures(times: list[float]) -> dict[str, Any]:
    low, high = statistics.quantiles(times, n=4)[::2] if len(times) > 1 else (times[0], times[0])
    return dict(seconds=statistics.median(times), low=low, high=high, runs=len(times))

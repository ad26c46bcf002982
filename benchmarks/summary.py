"""The goals for speed, the measurements, and whether the goals are met: from the record alone."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Row = dict[str, Any]


class Verdict(NamedTuple):
    """One goal. `met` is None if the run has not measured it."""

    asked: str
    measured: str
    met: bool | None


def verdicts(record: dict) -> list[Verdict]:
    """All goals."""
    return [verdict for part in _PARTS for verdict in part(record)]


def rows(record: dict, part: str, **wanted: Any) -> list[Row]:
    """The rows of a part with these values."""
    found = record["parts"].get(part, dict(rows=[]))["rows"]
    return [row for row in found if all(row.get(name) == value for name, value in wanted.items())]


def slope(record: dict, axis: str, figure: str = "seconds") -> float | None:
    """The slope of log figure over log size, by least squares."""
    found = [(grown(row), row[figure]) for row in rows(record, "growth", axis=axis) if row.get(figure)]
    if len(found) < 2:
        return None
    x, y = zip(*[(math.log(size), math.log(value)) for size, value in found], strict=True)
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def grown(row: Row) -> float:
    """The size of a row on its axis; of hidden layers the width."""
    value = row[row["axis"]]
    return value[0] if isinstance(value, list) else value


def equal_steps(row: Row) -> float:
    """The seconds of a row; for an adaptive solver, scaled to as many evaluations of the field as we have cells."""
    cells = row["blocks"] * row["steps"]
    return row["seconds"] * (cells / row["evaluations"] if "evaluations" in row else 1.0)


def ratio(record: dict, peer: str, size: dict[str, Any]) -> float | None:
    """How many times longer than ours a peer takes for a training step."""
    ours, theirs = (_one(rows(record, "steps", peer=name, **size)) for name in ("ours", peer))
    return None if ours is None or theirs is None else equal_steps(theirs) / ours["seconds"]


def _one(found: list[Row]) -> Row | None:
    return next((row for row in found if "seconds" in row), None)


def _least(asked: str, value: float | None, bound: float, form: str = "{:.3g} times") -> Verdict:
    return _verdict(asked, value, lambda found: found >= bound, form)


def _most(asked: str, value: float | None, bound: float, form: str = "{:.3g}") -> Verdict:
    return _verdict(asked, value, lambda found: found <= bound, form)


def _verdict(asked: str, value: float | None, holds: Callable[[float], bool], form: str) -> Verdict:
    return Verdict(
        asked, "not measured" if value is None else form.format(value), None if value is None else holds(value)
    )


_SMALL, _WIDE, _HIGH = dict(dim=2, hidden=[2, 2]), dict(dim=2, hidden=[16, 16]), dict(dim=200, hidden=[16])
STEPS = (
    ("d=2, (2, 2) units: 25 times faster than torchflows' DDNF with 64 cells", "torchflows DDNF", _SMALL, 25),
    ("the same: 30 times faster than Zuko's exact CNF, at equal evaluations", "Zuko CNF, exact", _SMALL, 30),
    ("d=2, (16, 16) units: 3 times faster than Diffrax, Euler, exact", "Diffrax CNF, Euler, exact", _WIDE, 3),
    ("d=200, (16,) units: 1.5 times faster than Diffrax, one probe", "Diffrax CNF, Euler, Hutchinson", _HIGH, 1.5),
    ("the same: 20 times faster than Diffrax, exact", "Diffrax CNF, Euler, exact", _HIGH, 20),
)


def _steps(record: dict) -> Iterator[Verdict]:
    for asked, peer, size, bound in STEPS:
        yield _least(f"training step, {asked}", ratio(record, peer, size), bound)


def _race(record: dict) -> Iterator[Verdict]:
    for energy in ("energy1", "energy2"):
        asked = f"first to KL <= 0.01 on {energy}, compilation included"
        found = race_order(record, energy)
        if not rows(record, "race", energy=energy):
            yield Verdict(asked, "not measured", None)
            continue
        order = ", ".join(f"{peer} {seconds:.1f} s" for seconds, peer in found) or "no one"
        yield Verdict(asked, order, bool(found) and found[0][1].startswith("ours"))


def race_order(record: dict, energy: str) -> list[tuple[float, str]]:
    """The peers that reach the goal with most of the seeds, by median seconds; not reaching it counts as infinity."""
    times: dict[str, list[float]] = {}
    for row in rows(record, "race", energy=energy):
        times.setdefault(row["peer"], []).append(row["seconds"] if row.get("reached") else math.inf)
    medians = sorted((sorted(found)[len(found) // 2], peer) for peer, found in times.items())
    return [(seconds, peer) for seconds, peer in medians if seconds < math.inf]


def machine_share(record: dict, products: str = "products") -> float | None:
    """Our time over that of the products and tanh alone."""
    found = [_one(rows(record, "machine", peer=peer)) for peer in ("ours", products, "tanh")]
    times = [row["seconds"] for row in found if row is not None]
    return times[0] / (times[1] + times[2]) if len(times) == 3 else None


def _machine(record: dict) -> Iterator[Verdict]:
    yield _most("(64, 64) units, d=40, batch 1,024: at most 2 times the roofline", machine_share(record), 2.0)


def _growth(record: dict) -> Iterator[Verdict]:
    for axis, name in (("blocks", "K"), ("steps", "T"), ("batch", "the batch")):
        yield _most(f"time linear in {name}: log-log slope at most 1.05", slope(record, axis), 1.05)
    yield _most("time at most linear in d at fixed rank: slope at most 1.05", slope(record, "dim"), 1.05)
    for axis, name in (("blocks", "K"), ("steps", "T")):
        asked = f"compile time constant in {name}: of 32 over of 2 at most 1.3"
        yield _most(asked, _quotient(record, "compile", axis, 32, 2, "compile_seconds"), 1.3)
    asked = "memory with recomputation at T=1,024 below 1.3 times that at T=32"
    yield _most(asked, _quotient(record, "memory", "steps", 1024, 32, "bytes"), 1.3)


def _quotient(record: dict, of: str, axis: str, large: int, small: int, figure: str) -> float | None:
    """Of medians over repetitions."""
    found = [
        sorted(row[figure] for row in rows(record, "compiling", of=of, axis=axis) if row[axis] == count)
        for count in (large, small)
    ]
    return found[0][len(found[0]) // 2] / found[1][len(found[1]) // 2] if all(found) else None


def _vae(record: dict) -> Iterator[Verdict]:
    found = [_one(rows(record, "vae", peer=peer)) for peer in ("ours DDNF + context", "ours plain")]
    times = [row["seconds"] for row in found if row is not None]
    value = times[0] / times[1] if len(times) == 2 else None
    yield _most("an epoch of DDNF + context at most 2 times the plain auto-encoder's", value, 2.0)


_PARTS: tuple[Callable[[dict], Iterator[Verdict]], ...] = (_steps, _race, _machine, _growth, _vae)

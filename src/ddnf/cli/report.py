"""`ddnf report`: the report on the paper's experiments."""

from pathlib import Path

from tyro.conf import Positional


def report(results: Positional[Path], /) -> None:
    """Writes one page with all figures of the paper's experiments, and our results next to the paper's.

    Args:
        results: the output folder of `ddnf reproduce`.
    """
    from ddnf_paper.report import write

    print(f"report          {write(results)}")

"""`ddnf report`: the report on the paper's experiments."""

from pathlib import Path

from tyro.conf import Positional


def report(results: Positional[Path], /) -> None:
    """Writes the report on the paper's experiments: one page with all figures, ours beside the paper's numbers.

    Args:
        results: the folder that `ddnf reproduce` has written to.
    """
    from ddnf_paper.report import write

    print(f"report          {write(results)}")

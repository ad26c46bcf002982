"""What holds of each experiment's record."""

import json

from ddnf_paper.reproduce import draw


def check_shown(experiment, record, folder):
    """The file is JSON without NaN, small, and enough for all that is shown; each claim has a verdict."""
    text = (folder / f"{experiment.name}.json").read_text()
    assert len(text) < 2_000_000
    again = json.loads(text, parse_constant=lambda name: _no(name))
    assert again == record
    for claim in experiment.claims(again):
        assert claim.verdict in ("reproduced", "partly", "not reproduced")
        assert all(isinstance(word, str) and word for word in claim)
    for table in experiment.tables(again):
        assert table.rows and all(len(row) == len(table.header) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    for path in draw(experiment, folder):
        assert path.stat().st_size > 5000


def _no(name):
    raise AssertionError(f"{name} is no JSON")

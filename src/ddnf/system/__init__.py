"""Files, checks of arguments and optional libraries; imports no other room."""

from ddnf.system.checks import check_count, check_key
from ddnf.system.files import check_overwrite, claim_folder, contains_mark, open_atomic, write_atomic
from ddnf.system.optional import require

__all__ = [
    "check_count",
    "check_key",
    "check_overwrite",
    "claim_folder",
    "contains_mark",
    "open_atomic",
    "require",
    "write_atomic",
]

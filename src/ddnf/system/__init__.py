"""Files, checks of arguments and optional libraries; imports nothing else of ours."""

from ddnf.system.files import check_overwrite, write_atomic
from ddnf.system.optional import require

__all__ = ["check_overwrite", "require", "write_atomic"]

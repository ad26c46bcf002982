"""Optional libraries: imported on first use, with an error that explains how to install them."""

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Imports an optional library, or says how to install it.

    Example:
        >>> require("json", "all").dumps([1])
        '[1]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        raise ImportError(f"Expected {name} to be installed; try: pip install 'ddnf[{extra}]'") from error

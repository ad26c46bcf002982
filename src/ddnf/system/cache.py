"""JAX's compilation cache on disk, in a folder that only its user can write to."""

import os
import stat
import sys
import warnings
from pathlib import Path

import jax

_LARGEST = 2 * 1024**3


def cache_compilation(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keeps compiled programs on disk, so that later processes find them: a fit then starts in a second or two.

    The entries are executable code: whoever can write to the folder can run code as you. So it is made with permissions
    for its owner alone, and a folder that others can write to is not used. The cache costs no results: entries that
    cannot be read are compiled again. The oldest ones are removed beyond 2 GB. The `ddnf` command calls this by itself.

    Args:
        folder: where to keep them; None for the variable DDNF_CACHE, else `ddnf` in the user's own cache folder. With
            DDNF_CACHE=off (or 0, no, false, none) nothing is cached; DDNF_CACHE=on (1, yes, true) is the default.

    Returns the folder, or None, with a warning, where there is no cache.

    Example:
        >>> import jax, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache_compilation(folder) == Path(folder)
        True
        >>> jax.config.update("jax_compilation_cache_dir", None)
    """
    wanted = os.environ.get("DDNF_CACHE", "") if folder is None else os.fspath(folder)
    if folder is None and wanted.lower() in ("off", "0", "no", "false", "none"):
        return None
    if folder is None and wanted.lower() in ("on", "1", "yes", "true"):
        wanted = ""
    path = Path(wanted).expanduser() if wanted else _user_folder() / "ddnf" / "jax"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _problem(path)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        warnings.warn(f"Compiled programs are not cached in {str(path)!r}: {problem}.", RuntimeWarning, stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # Otherwise entries are found only under the path of the folder that they were written to.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    jax.config.update("jax_compilation_cache_max_size", _LARGEST)
    return path


def _user_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    variable, default = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or Path.home() / default)


def _problem(path: Path) -> str | None:
    if not os.access(path, os.W_OK | os.X_OK):
        return "the folder cannot be written to"
    if os.name == "nt":
        return None
    status = path.stat()
    if status.st_uid != os.getuid():
        return "the folder belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to the folder"
    return None

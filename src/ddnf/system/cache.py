"""JAX's compilation cache on disk, in a folder that only its user can write to."""

import os
import stat
import sys
import warnings
from pathlib import Path

import jax

_LARGEST = 2 * 1024**3


def cache_compilation(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keeps compiled programs on disk for later processes, so that a fit starts within a second or two.

    Cache entries are executable code, so anyone who can write to the folder can run code as you. The folder is created
    with permissions for its owner only, and is not used if others can write to it. Entries that cannot be read are
    compiled again. Beyond 2 GB, the oldest entries are removed. The `ddnf` command calls this function by default.

    Args:
        folder: the cache folder; None for the environment variable DDNF_CACHE, or else `ddnf` in the user's cache
            folder. With DDNF_CACHE=off (0, no, false, none) nothing is cached. DDNF_CACHE=on (1, yes, true) stands for
            the default folder.

    Returns the folder, or None with a warning if there is no cache.

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
        return "the folder is not writable"
    if os.name == "nt":
        return None
    status = path.stat()
    if status.st_uid != os.getuid():
        return "the folder belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to the folder"
    return None

"""Writes files atomically, and never overwrites files or folders that ddnf did not write."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = (".ddnf-", ".tmp")


@contextlib.contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `path` when the block ends; after an error `path` is unchanged.

    The data is on disk (fsync) before it gets its name. A symbolic link is kept and its target replaced; the
    permissions of an existing file are kept too.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.txt")
        >>> with open_atomic(path) as file:
        ...     _ = file.write(b"text")
        >>> path.read_text()
        'text'
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EISDIR, "Expected the path of a file; got a folder or device", str(path))
    prefix, suffix = _TEMPORARY
    temporary = target.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise OSError(error.errno, f"Could not write the file: {error.strerror or error}", str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Writes a file with `open_atomic`; text as UTF-8, with its line ends as they are.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.txt")
        >>> write_atomic(path, "text")
        >>> path.read_bytes()
        b'text'
    """
    with open_atomic(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def check_overwrite(
    path: str | os.PathLike[str],
    *,
    kind: str = "",
    is_ours: Callable[[Path], bool] = lambda _: False,
    hint: str = "Choose another name, or move this file.",
) -> None:
    """Raises a ValueError if `path` is an existing file that ddnf did not write.

    Args:
        path: the file that will be written.
        kind: the kind of file that may be replaced, such as "a ddnf model"; empty if none may.
        is_ours: whether ddnf wrote a given regular file.
        hint: advice for the user.

    Example:
        >>> check_overwrite("/etc/passwd")
        Traceback (most recent call last):
        ...
        ValueError: Expected a new file to write to; '/etc/passwd' exists. Choose another name, or move this file.
    """
    path = Path(path)
    if not path.is_file() or is_ours(path):  # folders and devices are refused by `open_atomic`
        return
    expected = f"a new file, or {kind} to replace" if kind else "a new file to write to"
    raise ValueError(f"Expected {expected}; {str(path)!r} {'is neither' if kind else 'exists'}. {hint}")


def contains_mark(path: Path, mark: bytes) -> bool:
    """Whether the first 4 KB of a file contain the bytes `mark`, which identify files that ddnf wrote.

    Example:
        >>> contains_mark(Path(__file__), b"Writes files atomically")
        True
    """
    with open(path, "rb") as file:
        return mark in file.read(4096)


def claim_folder(folder: Path, marker: str, content: str) -> str:
    """Marks a folder as written by ddnf, and returns the content of its marker file.

    The folder is created if needed. An existing folder must be empty or already contain the marker, which is then not
    changed. Any other folder raises an error, because its files must not be deleted.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> claim_folder(folder, "marker.txt", "first"), claim_folder(folder, "marker.txt", "second")
        ('first', 'first')
    """
    file = folder / marker
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            if not all(map(_is_temporary, folder.iterdir())):
                raise ValueError(
                    f"Expected a new or empty folder, or one with the marker file {marker}; got {str(folder)!r}, "
                    "which contains other files. Nothing was changed; choose another folder."
                )
            write_atomic(file, content)
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"Expected a folder that may be written; got {str(folder)!r} ({reason}).") from error


def _is_temporary(path: Path) -> bool:
    """Whether a file is left over from an `open_atomic` that was killed."""
    prefix, suffix = _TEMPORARY
    return path.name.startswith(prefix) and path.name.endswith(suffix) and path.is_file()


def _sync_folder(folder: Path) -> None:
    # Makes the new name durable too. Not every system can open or sync a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

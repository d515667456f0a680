"""Putting a finished folder in place so that a process killed at any moment leaves the old one, the new one or none."""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from kvfold.checkpoint.reasons import reason
from kvfold.errors import OutputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def replace_folder(new: Path, out: Path) -> None:
    """Rename `new` to `out`; a folder that is already there is replaced by it and removed."""
    if not out.exists():
        new.rename(out)
    elif _exchange(new, out):
        shutil.rmtree(new)
    else:
        # No exchange on this file system: between the two renames there is no folder at `out`.
        old = out.with_name(f".{out.name}.old-{os.getpid()}")
        out.rename(old)
        try:
            new.rename(out)
        except OSError:
            old.rename(out)
            raise
        shutil.rmtree(old)
    sync(out.parent)


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A folder under a temporary name, renamed to `place` when the block ends; removed if it raises.

    A folder that is at `place` is replaced.

    Raises:
        OutputError: the folder or a file in it cannot be written.
    """
    partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        clean_up_after_dead(place)
        partial.mkdir()
        yield partial
        _let_read(partial)
        replace_folder(partial, place)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {place}: {reason(error)}; make room or give another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _let_read(folder: Path) -> None:
    """Give files the rights that new files have: safetensors writes those of its own for this user alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def clean_up_after_dead(out: Path) -> None:
    """Remove what killed processes left beside `out`; put back an old folder that one had moved aside."""
    for partial in _left_by_dead(out, "partial"):  # earlier versions built in a folder per process
        shutil.rmtree(partial, ignore_errors=True)
    for old in _left_by_dead(out, "old"):
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)


def sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _left_by_dead(out: Path, kind: str) -> list[Path]:
    prefix = f".{out.name}.{kind}-"
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(out.parent.iterdir()):
            process = path.name.removeprefix(prefix)
            if path.name.startswith(prefix) and process.isdecimal() and not _is_other_process_alive(int(process)):
                found.append(path)
    return found


def _is_other_process_alive(process: int) -> bool:
    if process == os.getpid():  # left by an earlier process of the same id: usual in containers
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # alive, and of another user
        return True
    return True


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot (Linux has it since 3.15)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0

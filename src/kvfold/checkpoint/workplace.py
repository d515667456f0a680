"""The hidden folder beside an output folder in which that is built, or which keeps others away from it."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvfold.checkpoint.journal import INDEX_FILE
from kvfold.checkpoint.reasons import reason
from kvfold.errors import OutputError


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other processes away from `out`, which is written in place, while the block runs.

    Raises:
        OutputError: another process is there, or the folder of `out` cannot be written.
    """
    place = Workplace(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place.acquire()
    except OSError as error:
        raise OutputError(f"cannot write {out}: {reason(error)}; give a place you can write to") from error
    try:
        yield
    finally:
        place.release(keep_journal=False)


class Workplace:
    """The folder `.{name}.partial` beside `out`. Its name is stable, so the next process finds what a killed one left.

    Attributes:
        model: the folder that will be renamed to `out`; always begun anew.
        journal: the folder of the journal (see `Journal`), which outlives a killed process.
    """

    def __init__(self, out: Path):
        """Nothing is touched before `acquire`."""
        self._out = out
        self._folder = out.parent / f".{out.name}.partial"
        self._lock = self._folder / "lock"
        self._done = self._folder / "done"
        self._descriptor: int | None = None
        self.model = self._folder / "model"
        self.journal = self._folder / "journal"

    def acquire(self) -> None:
        """Lock the folder, which is created if need be. The kernel unlocks it when this process ends in whatever way.

        Raises:
            OutputError: another process has it, or the file system has no locks.
            OSError: it cannot be created.
        """
        self._folder.mkdir(exist_ok=True)
        self._descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former holder removes its lock at the end: a lock on a removed file keeps nobody out.
            free = os.path.samestat(os.fstat(self._descriptor), self._lock.stat())
        except (BlockingIOError, FileNotFoundError):
            free = False
        except OSError as error:
            self._unlock()
            raise OutputError(
                f"cannot lock {self._folder}: {reason(error)}; give an output folder on another file system"
            ) from error
        if not free:
            self._unlock()
            raise OutputError(
                f"another process is writing {self._out} at this moment; wait for it, or give another folder"
            )

    def begin(self) -> None:
        """Throw away what a killed process left, but for its journal, and create `model`.

        Raises:
            OSError: that cannot be done.
        """
        for leftover in (self.model, self._done):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.model.mkdir()

    def has_journal(self) -> bool:
        """Whether there is a journal to resume from."""
        # Not Path.is_file: a place that cannot be looked at has none, and why it cannot has been said already.
        return os.path.isfile(self.journal / INDEX_FILE)

    def retire_journal(self) -> None:
        """To call just before `model` is put in place: a process killed after that leaves no journal behind.

        Raises:
            OSError: the journal cannot be renamed.
        """
        if self.journal.exists():
            self.journal.rename(self._done)

    def release(self, *, keep_journal: bool) -> None:
        """Remove the folder, less the journal if that is to stay, and unlock it. Without the lock nothing happens."""
        if self._descriptor is None:
            return
        for folder in (self.model, self._done, *(() if keep_journal else (self.journal,))):
            shutil.rmtree(folder, ignore_errors=True)
        if not keep_journal:
            with contextlib.suppress(OSError):
                self._lock.unlink()
                self._folder.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None

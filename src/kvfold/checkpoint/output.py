"""The folder of a new model: built beside its place under a temporary name, renamed when it is complete."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxtyping import Shaped
from safetensors import SafetensorError
from torch import Tensor

from kvfold.checkpoint.journal import Journal
from kvfold.checkpoint.reasons import reason
from kvfold.checkpoint.renaming import clean_up_after_dead, replace_folder, sync
from kvfold.checkpoint.safetensors_folder import INDEX_FILE, WEIGHTS_FILE
from kvfold.checkpoint.tensor_file import owned, write_tensors
from kvfold.checkpoint.workplace import Workplace
from kvfold.checkpoint.writing import write_json
from kvfold.errors import OutputError

RESUME_NOTE = "what is finished is kept: run the same command again to resume"


class OutputFolder:
    """Context manager that writes a model folder: all of it or nothing.

    Inside the `with` block, `path` is the temporary folder: put the config and other small files there, and give the
    weights to `add`. When the block ends, the weights' index is written and the folder renamed to `out`. When it
    raises, the temporary folder is removed. A killed process leaves the temporary folder, which the next one with the
    same `out` removes; at `out` there is then the old folder or none.

    A long run keeps what it has finished in `journal`. The journal goes with success and with an error; it outlives a
    kill and Ctrl-C, and the next one with the same `out` and the same key finds it. It also outlives an error that
    comes before `journal` is called: a mistyped option must not cost hours of work.

    Attributes:
        out: the resolved final place.
        path: the temporary folder; `out` once the block has ended well.
    """

    def __init__(
        self,
        out: Path,
        *,
        source: Path | None,
        overwrite: bool = False,
        marker: str = "config.json",
        max_shard_bytes: int = 10**9,
    ):
        """Nothing is touched before the `with` block is entered.

        Args:
            out: the folder to create; missing parents are created.
            source: the folder or file that is read meanwhile, which `out` must not overlap.
            overwrite: replace an existing folder, at the end and in one step; one that is not empty must hold the file
                `marker`, or it is something else that must not be lost.
            max_shard_bytes: size at which a weight file is closed; also the memory held by tensors that wait.

        Raises:
            OutputError: `out` is in the home of an unknown user.
        """
        try:
            place = Path(out).expanduser()
        except RuntimeError as error:
            raise OutputError(f"output folder {out} is in the home of an unknown user; give another folder") from error
        self.out = Path(os.path.realpath(place))  # Path.resolve raises RuntimeError for a link to itself
        self._place = Workplace(self.out)
        self._journal: Journal | None = None
        self.path = self._place.model
        self._source = None if source is None else source.resolve()
        self._overwrite = overwrite
        self._marker = marker
        self._max_shard_bytes = max_shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._total_bytes = 0
        self._shards: list[tuple[str, ...]] = []
        self._created_parents: list[Path] = []

    def __enter__(self) -> Self:
        """Check that the folder can be written, before anything expensive.

        Raises:
            OutputError: `out` exists and `overwrite` is off, is a file, overlaps the source, cannot be created, or is
                being written by another process.
        """
        self._check_overlap()
        try:
            self._created_parents = [parent for parent in self.out.parents if not parent.exists()]
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._place.acquire()
            clean_up_after_dead(self.out)
            self._check_existing()
            self._place.begin()
        except OSError as error:
            self._abandon(error)
            raise OutputError(f"cannot create {self.out}: {reason(error)}; give a place you can write to") from error
        except BaseException as error:
            self._abandon(error)
            raise
        return self

    def journal(self, key: Mapping[str, Any]) -> Journal:
        """What earlier processes finished of the same work and were killed before its end; empty if there is nothing.

        Args:
            key: all that the work depends on, as JSON values. A journal with another key is thrown away.

        Raises:
            OutputError: a journal that must be thrown away cannot be removed.
        """
        assert self._journal is None
        self._journal = Journal(self._place.journal, key)
        return self._journal

    def add(self, name: str, tensor: Shaped[Tensor, "..."]) -> None:
        """Take over a tensor, which must not be changed afterwards; write a file when enough have come.

        Raises:
            OutputError: the file cannot be written, for instance because the disk is full.
        """
        assert name not in self._waiting
        assert all(name not in shard for shard in self._shards)
        tensor = owned(tensor)
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._max_shard_bytes:
            self._write_shard()
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish the folder, or remove it if the block raised."""
        if error is not None:
            self._abandon(error)
            return
        try:
            self._finish()
        except OSError as failure:
            self._abandon(failure)
            raise OutputError(f"cannot write {self.out}: {reason(failure)}") from failure
        except BaseException as failure:
            self._abandon(failure)
            raise

    def _check_overlap(self) -> None:
        if not self.out.name:
            raise OutputError(f"output folder {self.out} is the root of the file system; give a folder inside it")
        if self._source is None:
            return
        if self.out == self._source:
            raise OutputError(f"output folder {self.out} is the model itself; give another folder")
        if self.out.is_relative_to(self._source):
            raise OutputError(
                f"output folder {self.out} is inside the model folder {self._source}; give another folder"
            )
        if self._source.is_relative_to(self.out):
            raise OutputError(f"output folder {self.out} contains the model {self._source}; give another folder")

    def _check_existing(self) -> None:
        if not os.path.lexists(self.out):
            return
        if not self.out.is_dir():
            raise OutputError(f"output folder {self.out} is an existing file; give another name")
        if not self._overwrite:
            raise OutputError(
                f"output folder {self.out} already exists; give another name, or --overwrite to replace it"
            )
        refuse_other_content(self.out, self._marker)
        if not os.access(self.out, os.W_OK):  # it could be moved away, but not removed
            raise OutputError(f"output folder {self.out} may not be replaced by you; give another name")

    def _write_shard(self) -> None:
        file = self.path / _temporary_name(len(self._shards))
        try:
            write_tensors(file, self._waiting)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"cannot write weights for {self.out}: {reason(error)}") from error
        self._shards.append(tuple(self._waiting))
        self._waiting = {}
        self._waiting_bytes = 0

    def _finish(self) -> None:
        if self._waiting:
            self._write_shard()
        if len(self._shards) == 1:
            (self.path / _temporary_name(0)).rename(self.path / WEIGHTS_FILE)
        elif self._shards:
            self._name_shards()
        for file in self.path.iterdir():
            sync(file)
        sync(self.path)
        self._check_existing()  # again, for a folder that another process has put there meanwhile
        self._place.retire_journal()
        replace_folder(self.path, self.out)
        self.path = self.out
        self._place.release(keep_journal=False)

    def _name_shards(self) -> None:
        weight_map = {}
        for position, names in enumerate(self._shards):
            file = f"model-{position + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self.path / _temporary_name(position)).rename(self.path / file)
            weight_map |= dict.fromkeys(names, file)
        write_json(self.path / INDEX_FILE, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})

    def _abandon(self, error: BaseException) -> None:
        """Remove the folder. The journal stays if `error` is no error but Ctrl-C, or came before it was of use."""
        interrupted = not isinstance(error, Exception)
        keep_journal = self._place.has_journal() and (interrupted or self._journal is None)
        self._place.release(keep_journal=keep_journal)
        if keep_journal and interrupted:
            error.add_note(RESUME_NOTE)
        for parent in self._created_parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def refuse_other_content(folder: Path, marker: str) -> None:
    """Protect a folder from being replaced that has content, but not the file `marker`.

    Raises:
        OutputError: there is such a folder.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).is_file():
        raise OutputError(f"{folder} holds something else (it has no {marker}); give another folder")


def _temporary_name(position: int) -> str:
    # The number of files, part of their final names, is known at the end only.
    return f"model-shard-{position + 1:05d}.safetensors"

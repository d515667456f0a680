"""What a long run has finished, step by step on disk, so that a killed run resumes there with the same result."""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from kvfold.checkpoint.configs import read_object
from kvfold.checkpoint.fingerprint import sha256_of
from kvfold.checkpoint.reasons import reason
from kvfold.checkpoint.renaming import sync
from kvfold.checkpoint.tensor_file import owned, read_tensor, write_tensors
from kvfold.checkpoint.writing import write_json
from kvfold.errors import CheckpointError, OutputError

INDEX_FILE = "journal.json"
_FORMAT = 1
# Steps, the index and its temporary file, and those that the safetensors library writes to before it renames them.
_OWN_FILE = re.compile(r"\d{6,}\.safetensors|journal\.json|\.journal\.json\.partial-\d+|\.tmp\w{6}")

Step = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""The tensors and the facts of a step. Facts are what JSON can hold; finite floats keep every bit."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    file: str
    nbytes: int
    sha256: str
    tensors: list[str]
    facts: dict[str, Any]


class Journal:
    """Named steps in a folder: one safetensors file each, and an index, which is replaced in one step and last.

    Killed at any moment, a process leaves the journal as it was before or after the call that it was in. A journal is
    trusted as a whole or not at all: one that was made with another key, or in which a byte of the index or of any
    step has changed, is thrown away when it is opened, since steps may build on each other.

    Attributes:
        resumed_from: the last step that was there when the journal was opened; None if there was none.
        discarded: why an earlier journal was thrown away; None if there was none or it was taken over.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]):
        """Open the journal in `folder`, which is created with the first step.

        Args:
            key: all that the steps depend on, as JSON values: source, options, versions.

        Raises:
            OutputError: what must be thrown away cannot be removed.
        """
        self._folder = folder
        self._key = _as_read(key)
        self._entries, self.discarded = _sound_entries(folder, self._key)
        self.resumed_from = next(reversed(self._entries), None)
        try:
            self._remove_strays()
        except OSError as error:
            raise OutputError(f"cannot clean up {folder}: {reason(error)}; remove that folder") from error
        first = 1 + max((int(Path(entry.file).stem) for entry in self._entries.values()), default=0)
        self._numbers = itertools.count(first)

    @property
    def entries(self) -> tuple[str, ...]:
        """The finished steps in the order in which they were finished; a replaced step counts as new."""
        return tuple(self._entries)

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Add a step of a new name. Raises as `update` does."""
        assert name not in self._entries
        self.update({name: (tensors, facts or {})})

    def replace(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Add a step in place of the one of this name, if there is one. Raises as `update` does."""
        self.update({name: (tensors, facts or {})})

    def drop(self, name: str) -> None:
        """Remove a step. Raises as `update` does."""
        assert name in self._entries
        self.update({}, drop=(name,))

    def update(self, steps: Mapping[str, Step], *, drop: Collection[str] = ()) -> None:
        """Add or replace some steps and remove others, all at once.

        What is replaced or removed goes after the new steps are complete and on disk.

        Raises:
            OutputError: a step cannot be written, for instance because the disk is full. The journal on disk is then
                as before or as after.
        """
        kept = {name: entry for name, entry in self._entries.items() if name not in steps and name not in drop}
        try:
            self._folder.mkdir(exist_ok=True)
            new = {name: self._write(tensors, facts) for name, (tensors, facts) in steps.items()}
            self._write_index(kept | new)
            superseded = [entry.file for name, entry in self._entries.items() if name not in kept]
            self._entries = kept | new
            for file in superseded:
                (self._folder / file).unlink()
        except (OSError, SafetensorError) as error:
            raise OutputError(f"cannot write the journal in {self._folder}: {reason(error)}") from error

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of a step, in the order and with every bit as saved, each in memory of its own; and its facts.

        Raises:
            OutputError: the file has been damaged since the journal was opened.
        """
        entry = self._entries[name]
        file = self._folder / entry.file
        try:
            return {tensor: read_tensor(file, tensor) for tensor in entry.tensors}, _as_read(entry.facts)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"cannot read step {name!r} in {file}: {reason(error)}; start again") from error

    def _write(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> _Entry:
        # A file counts from the moment the index names it, and the index never names a file that is written again.
        file = self._folder / f"{next(self._numbers):06d}.safetensors"
        write_tensors(file, {name: owned(tensor) for name, tensor in tensors.items()})
        return _Entry(
            file=file.name,
            nbytes=file.stat().st_size,
            sha256=sha256_of(file),
            tensors=list(tensors),
            facts=_as_read(facts),
        )

    def _write_index(self, entries: Mapping[str, _Entry]) -> None:
        steps = {name: asdict(entry) for name, entry in entries.items()}
        content = {"format": _FORMAT, "key": self._key, "entries": steps}
        sync(self._folder)  # the names of the new files, before the index relies on them
        write_json(self._folder / INDEX_FILE, {"sha256": _digest(content), "journal": content})
        sync(self._folder)

    def _remove_strays(self) -> None:
        """Remove what a killed process had not finished, or all of a journal that is not trusted; no other files."""
        if not self._folder.is_dir():
            return
        kept = {INDEX_FILE, *(entry.file for entry in self._entries.values())} if self._entries else set()
        for path in self._folder.iterdir():
            if _OWN_FILE.fullmatch(path.name) and path.name not in kept:
                path.unlink()


def _sound_entries(folder: Path, key: dict[str, Any]) -> tuple[dict[str, _Entry], str | None]:
    """The steps of a journal with this key in which every byte is as written; else none, and why."""
    if not (folder / INDEX_FILE).is_file():
        return {}, None
    content = _read_index(folder / INDEX_FILE)
    if content is None:
        return {}, "it is damaged"
    if content["format"] != _FORMAT:
        return {}, "it was made by another version"
    ours, theirs = _texts(key), _texts(content["key"])
    if differing := sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)):
        return {}, f"it was made with another {', '.join(differing)}"
    entries = {name: _Entry(**entry) for name, entry in content["entries"].items()}
    if not all(_is_intact(folder / entry.file, entry) for entry in entries.values()):
        return {}, "it is damaged"
    return entries, None


def _read_index(path: Path) -> dict[str, Any] | None:
    """What the index holds; None if it is not as it was written."""
    try:
        stored = read_object(path)
    except CheckpointError:
        return None
    content = stored.get("journal")
    return content if isinstance(content, dict) and stored.get("sha256") == _digest(content) else None


def _is_intact(file: Path, entry: _Entry) -> bool:
    try:
        return file.stat().st_size == entry.nbytes and sha256_of(file) == entry.sha256
    except OSError:
        return False


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _as_read(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as JSON gives it back, for instance with lists for tuples: the same before and after a kill."""
    return json.loads(json.dumps(dict(value), allow_nan=False))


def _texts(key: dict[str, Any]) -> dict[str, str]:
    """Each entry as text, in which 1, 1.0 and true differ."""
    return {name: json.dumps(value, sort_keys=True) for name, value in key.items()}

"""Telling one set of files from another without reading them whole."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from kvfold.checkpoint.reasons import reason
from kvfold.errors import CheckpointError

_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


def fingerprint(files: Iterable[Path], content: str) -> str:
    """A hash over `content` and, of each file, the name, size, time of change and 16 samples of 64 KiB.

    A file of at most 1 MiB is covered whole. Where the files lie is all one.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256(content.encode())
    for file in files:
        try:
            state = file.stat()
            digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns}".encode())
            for sample in _samples(file, state.st_size):
                digest.update(sample)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {reason(error)}") from error
    return digest.hexdigest()


def sha256_of(file: Path) -> str:
    """Of all of a file.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _samples(file: Path, size: int) -> Iterable[bytes]:
    """Evenly spread parts of a file, its beginning (with the header) and its end among them."""
    last = max(0, size - _SAMPLE_BYTES)
    with file.open("rb", buffering=0) as stream:
        for sample in range(_SAMPLES):
            stream.seek(last * sample // (_SAMPLES - 1))
            yield stream.read(_SAMPLE_BYTES)

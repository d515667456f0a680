"""Training text of any kind as packed windows of token ids, tokenised once and kept on disk.

A source is a file (.txt .md .jsonl .json .parquet) or a dataset of the Hugging Face hub. Its documents
are streamed, tokenised, each closed by the end-of-text token, and laid end to end; windows are cut out of that row.
Inside a window positions begin anew with every document, which is how transformers is told that documents do not see
each other, and no document is asked to predict the next one's first token.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.checkpoint import new_folder
from kvfold.errors import OptionError, TextError
from kvfold.progress import Progress
from kvfold.texts import CALIBRATION, DEFAULT_TEXT, EVALUATION, check_vocabulary, share_windows
from kvfold.train.documents import documents

IGNORED = -100
"""The label that PyTorch's cross entropy leaves out."""

DOCUMENTS_AT_ONCE = 64

Place = tuple[int, int]
"""A source and a window in it."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Documents of one source laid end to end."""

    ids: Int32[np.ndarray, " tokens"]
    starts: Int64[np.ndarray, " documents"]


class PackedWindows(torch.utils.data.Dataset):
    """Windows of several sources, as many of each as its weight says, in an order that the seed decides.

    Args:
        sources: tokens by source; each is used from its beginning, in as many passes as it takes.
        counts: windows to take of each source.
        length: tokens per window.
        seed: of the order.
    """

    def __init__(self, sources: Sequence[Packed], counts: Sequence[int], length: int, seed: int) -> None:
        self._sources, self.length = sources, length
        places = [
            (index, window % (len(source.ids) // length))
            for index, (source, count) in enumerate(zip(sources, counts, strict=True))
            for window in range(count)
        ]
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        self.places: list[Place] = [places[place] for place in order]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """`input_ids`, `labels` and `position_ids`, each (length)."""
        return self.at(self.places[item])

    def different(self) -> list[Place]:
        """The places without repetitions, sorted."""
        return sorted(set(self.places))

    def at(self, place: Place) -> dict[str, Tensor]:
        """The window at a place, as above."""
        index, window = place
        source, length, first = self._sources[index], self.length, window * self.length
        ids = torch.from_numpy(source.ids[first : first + length].astype(np.int64))
        inside = np.searchsorted(source.starts, (first + 1, first + length))
        begins = torch.from_numpy(source.starts[slice(*inside)] - first)
        positions = torch.arange(length)
        last_begin = torch.zeros(length, dtype=torch.int64)
        last_begin[begins] = begins
        labels = ids.clone()
        labels[begins] = IGNORED
        return {"input_ids": ids, "labels": labels, "position_ids": positions - last_begin.cummax(0).values}


@dataclass(frozen=True, kw_only=True)
class WindowReader:
    """Reads windows for one model.

    Args:
        tokenizer: of the model; `vocabulary` is the number of its embeddings.
        length: tokens per window.
        cache: folder where tokens are kept; a source that is there is not read again.

    Sources are files, hub datasets (`name`, or `name:configuration` where a dataset has several; split `train`), and
    `default`, a shipped text.
    Every method may raise:
        OptionError: there are more sources than windows, or `datasets` is missing where it is needed.
        TextError: a source is missing, unreadable or empty, lacks the column or is shorter than one window.
        CheckpointError: the tokenizer belongs to another model.
    """

    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    length: int
    cache: Path
    progress: Progress

    def mixed(
        self,
        data: Mapping[str, str | None],
        windows: int,
        *,
        weights: Sequence[float] = (),
        seed: int = 0,
    ) -> PackedWindows:
        """`windows` windows of all sources in `data`.

        Args:
            data: sources, with the column of the text in tables; None takes `text`, or `messages` by the tokenizer's
                chat template.
            weights: one positive number per source, its share of the windows; empty weighs all alike.
        """
        if windows < len(data):
            raise OptionError(
                f"{windows} sequences cannot be shared by {len(data)} data sources: train for more steps."
            )
        counts = share_windows(windows, weights or [1.0] * len(data))
        sources = [
            self._source(str(CALIBRATION) if name == DEFAULT_TEXT else name, count, column)
            for (name, column), count in zip(data.items(), counts, strict=True)
        ]
        return PackedWindows(sources, counts, self.length, seed)

    def first(self, name: str, most: int) -> PackedWindows:
        """The first windows of one source, `most` or as many as it has; `default` is the shipped novel."""
        source = self._source(str(EVALUATION) if name == DEFAULT_TEXT else name, most, None)
        return PackedWindows([source], [min(most, len(source.ids) // self.length)], self.length, seed=0)

    def _source(self, name: str, windows: int, column: str | None) -> Packed:
        most = windows * self.length
        source = tokens_of(name, self.tokenizer, most=most, column=column, cache=self.cache, progress=self.progress)
        if len(source.ids) < self.length:
            raise TextError(
                f"{name} has {len(source.ids)} tokens, one sequence takes {self.length}: "
                "give more, or shorter sequences."
            )
        check_vocabulary(torch.from_numpy(source.ids.max(keepdims=True)), self.vocabulary)
        return source


def tokens_of(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    most: int,
    column: str | None,
    cache: Path,
    progress: Progress,
) -> Packed:
    """The first `most` tokens of a source or all that it has, from `cache` if they are there."""
    backend: Any = tokenizer.backend_tokenizer  # transformers types it as text
    key = {
        "source": identity(name),
        "column": column,
        "most": most,
        "tokenizer": hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "end": tokenizer.eos_token_id,
    }
    folder = cache / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    if not folder.exists():
        texts = documents(name, column, tokenizer)
        with new_folder(folder) as place:
            write_tokens(place, name, tokenised(texts, tokenizer), most, progress)
    return Packed(ids=np.memmap(folder / "ids.bin", np.int32, "r"), starts=np.fromfile(folder / "starts.bin", np.int64))


def write_tokens(place: Path, name: str, rows: Iterator[list[int]], most: int, progress: Progress) -> None:
    """Write the first `most` tokens of all rows, and where each row starts, into the folder `place`.

    Raises:
        TextError: there are none.
    """
    count = 0
    with (place / "ids.bin").open("wb") as ids, (place / "starts.bin").open("wb") as starts:
        for row in rows:
            np.array([count], dtype=np.int64).tofile(starts)
            taken = row[: most - count]
            np.array(taken, dtype=np.int32).tofile(ids)
            count += len(taken)
            progress(f"tokenising {Path(name).name}", count, most, "")
            if count == most:
                break
    if not count:
        raise TextError(f"{name} holds no text: give data with some in it.")


def cache_folder() -> Path:
    """Where what was read and computed for training is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"


def identity(name: str) -> dict[str, Any]:
    """What says that a source is still the same: of a file its size and time of change, of a dataset its name."""
    path = Path(name)
    if path.is_file():
        facts = path.stat()
        return {"path": str(path.resolve()), "bytes": facts.st_size, "changed": facts.st_mtime_ns}
    return {"dataset": name, "datasets": version("datasets")}


def tokenised(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Token ids per document, without a BOS, and with the end-of-text token at the end if there is one."""
    end: list[Any] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == DOCUMENTS_AT_ONCE:
            yield from (ids + end for ids in _ids(batch, tokenizer))
            batch = []
    if batch:
        yield from (ids + end for ids in _ids(batch, tokenizer))


def _ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

"""A model folder as the Hugging Face libraries write it: `config.json` and one or more safetensors files."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from kvfold.checkpoint.base import Checkpoint
from kvfold.checkpoint.configs import read_config, read_generation_config, read_object
from kvfold.checkpoint.expected import model_on_meta
from kvfold.checkpoint.fingerprint import fingerprint
from kvfold.checkpoint.reasons import reason
from kvfold.checkpoint.source import PICKLE_REFUSAL, PICKLE_SUFFIXES
from kvfold.checkpoint.tensor_file import read_tensor
from kvfold.errors import CheckpointError, UnsupportedModelError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_OUTPUT_LAYER = "lm_head.weight"
_ROWS = 4096
_SMALL_FILES = (".json", ".jinja", ".model", ".txt")  # configs, tokenizers, chat templates
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, kw_only=True)
class _StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@final
class SafetensorsCheckpoint(Checkpoint):
    """A folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Opening it reads every header, so a missing, truncated or corrupt file shows before any work is done.
    """

    def __init__(self, folder: Path, *, source: str):
        """Open `folder`; `source` is how the user named it.

        Raises:
            CheckpointError: the folder, its config or a shard is missing or corrupt, or there are only pickles.
            UnsupportedModelError: transformers does not know the architecture, or the weights are quantised.
        """
        _check_kind(folder)
        config = read_config(folder)
        stored = _read_headers(folder)
        self._stored = {name: tensor for name, tensor in stored.items() if not _is_derived(name, config)}
        self._tied_copy = None if _OUTPUT_LAYER in self._stored else stored.get(_OUTPUT_LAYER)
        super().__init__(
            source=source,
            path=folder,
            config=config,
            dtype=_main_dtype(folder, self._stored),
            generation_config=read_generation_config(folder),
            shapes={name: tensor.shape for name, tensor in self._stored.items()},
        )

    def check_complete(self) -> None:
        super().check_complete()
        if self._tied_copy is None:
            return
        embedding = model_on_meta(self.config).all_tied_weights_keys[_OUTPUT_LAYER]
        if not _same_values(_OUTPUT_LAYER, self._tied_copy, embedding, self._stored[embedding]):
            raise CheckpointError(
                f"{self.path} stores another {_OUTPUT_LAYER} than {embedding}, to which its config ties it; "
                "set tie_word_embeddings to false in its config.json, or restore the weights"
            )

    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes() for tensor in self._stored.values())

    def fingerprint(self) -> str:
        shards = {tensor.file for tensor in self._stored.values()}
        small = (path for path in self.path.iterdir() if path.suffix in _SMALL_FILES and path.is_file())
        return fingerprint(sorted({*shards, *small}), repr(self._shapes))

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer in the folder.

        Raises:
            CheckpointError: the folder has no tokenizer, or one that transformers cannot load.
        """
        if not any((self.path / name).is_file() for name in _TOKENIZER_FILES):
            raise CheckpointError(
                f"{self.path} has no tokenizer; copy tokenizer.json and tokenizer_config.json of the original into it"
            )
        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception for a corrupt file
            raise CheckpointError(f"the tokenizer in {self.path} cannot be loaded: {reason(error)}") from error

    def _load(self, name: str) -> Tensor:
        file = self._stored[name].file
        try:
            return read_tensor(file, name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read tensor {name!r} from {file}: {reason(error)}") from error


def _check_kind(folder: Path) -> None:
    """Raise unless `folder` has safetensors weights and a config; say what it has instead."""
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist")
    has_weights = (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()
    if not has_weights:
        for file in sorted(folder.iterdir()):
            if file.suffix.lower() in PICKLE_SUFFIXES:
                raise CheckpointError(f"{folder} has pickled weights only ({file.name}): {PICKLE_REFUSAL}")
            if file.suffix.lower() == ".gguf":
                raise CheckpointError(f"{folder} is no safetensors model; give its GGUF file itself: {file}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is no model folder; copy it from the original model")
    if not has_weights:
        raise CheckpointError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; it holds no weights to read")


def _read_headers(folder: Path) -> dict[str, _StoredTensor]:
    if (folder / WEIGHTS_FILE).is_file():
        return _read_header(folder / WEIGHTS_FILE)
    weight_map = _read_weight_map(folder / INDEX_FILE)
    stored: dict[str, _StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder} lacks the shard {shard} that {INDEX_FILE} lists; download it again")
        stored |= _read_header(folder / shard)
    for name, shard in weight_map.items():
        if name not in stored or stored[name].file.name != shard:
            raise CheckpointError(f"tensor {name!r} is not in {folder / shard}, where {INDEX_FILE} puts it")
    return stored


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; restore it from the original")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path} puts tensor {name!r} into {shard!r}, which is not a file name")
    return weight_map


def _read_header(file: Path) -> dict[str, _StoredTensor]:
    stored = {}
    file.open("rb").close()  # the library says of a file that may not be read that there is none
    try:
        with safe_open(file, framework="pt") as shard:  # compares the file's length with its header, too
            for name in shard.keys():  # noqa: SIM118 (it is no mapping)
                view = shard.get_slice(name)
                stored[name] = _StoredTensor(
                    file=file, shape=tuple(view.get_shape()), dtype=_dtype(file, name, view.get_dtype())
                )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt ({reason(error)}); download it again") from error
    return stored


def _dtype(file: Path, name: str, stored_as: str) -> torch.dtype:
    if stored_as not in _DTYPES:
        raise UnsupportedModelError(
            f"tensor {name!r} in {file} is quantised ({stored_as}); give a model in F32, F16 or BF16"
        )
    return _DTYPES[stored_as]


def _is_derived(name: str, config: PreTrainedConfig) -> bool:
    """Whether a stored tensor only repeats what the model computes: a tied output layer, old rotary buffers."""
    tied = name == _OUTPUT_LAYER and bool(config.tie_word_embeddings)
    return tied or name.endswith(".rotary_emb.inv_freq")


def _same_values(name: str, tensor: _StoredTensor, other_name: str, other: _StoredTensor) -> bool:
    """Whether two stored matrices are equal; reads some rows of both at a time."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    with safe_open(tensor.file, framework="pt") as shard, safe_open(other.file, framework="pt") as other_shard:
        rows, other_rows = shard.get_slice(name), other_shard.get_slice(other_name)
        blocks = [slice(start, start + _ROWS) for start in range(0, tensor.shape[0], _ROWS)]
        return all(torch.equal(rows[block], other_rows[block]) for block in blocks)


def _main_dtype(folder: Path, stored: dict[str, _StoredTensor]) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] += tensor.nbytes()
    if not sizes:
        raise CheckpointError(f"{folder} holds no floating-point weights")
    return sizes.most_common(1)[0][0]

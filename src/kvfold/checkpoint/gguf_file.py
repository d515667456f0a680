"""A model in one GGUF file (llama.cpp's format), dequantised tensor by tensor to float32."""

import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from kvfold.checkpoint.base import Checkpoint
from kvfold.checkpoint.configs import CONFIG_ERRORS
from kvfold.checkpoint.expected import shapes_of_config
from kvfold.checkpoint.fingerprint import fingerprint
from kvfold.checkpoint.reasons import reason
from kvfold.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """How llama.cpp stores a model family."""

    arch: gguf.MODEL_ARCH
    interleaved_rotary: bool
    """Rows of the query and key projections are reordered so that the two halves of a rotary pair are neighbours."""


# llama.cpp stores Mistral under "llama" too.
_ARCHITECTURES = {
    "llama": _Architecture(arch=gguf.MODEL_ARCH.LLAMA, interleaved_rotary=True),
    "qwen2": _Architecture(arch=gguf.MODEL_ARCH.QWEN2, interleaved_rotary=False),
}
_ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@final
class GgufCheckpoint(Checkpoint):
    """A GGUF file. Weights are read as float32, under the names and in the row order of the transformers model."""

    def __init__(self, path: Path, *, source: str):
        """Open the file at `path`; `source` is how the user named it.

        Raises:
            CheckpointError: the file is missing, truncated or corrupt, or lacks a tensor.
            UnsupportedModelError: an architecture, rotary scaling or tensor that cannot be carried over exactly.
        """
        if not path.is_file():
            raise CheckpointError(f"GGUF file {path} does not exist")
        stamp = path.stat()
        reader, config = _open(path, stamp.st_mtime_ns, stamp.st_size)
        config = copy.deepcopy(config)
        self._architecture = _ARCHITECTURES[_architecture_name(path, reader)]
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        self._stored_names, shapes = _match(path, self._architecture, config, self._stored)
        super().__init__(
            source=source, path=path, config=config, dtype=torch.float32, generation_config=None, shapes=shapes
        )

    def nbytes(self) -> int:
        """Bytes of all tensors as stored, that is quantised."""
        return sum(int(tensor.n_bytes) for tensor in self._stored.values())

    def fingerprint(self) -> str:
        return fingerprint([self.path], repr(self._shapes))

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that the file carries.

        Raises:
            CheckpointError: it has none, or one that transformers cannot rebuild.
        """
        try:
            return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        except Exception as error:  # the tokenizers library raises bare Exception for inconsistent vocabularies
            raise CheckpointError(
                f"{self.path} has no tokenizer that transformers can rebuild: {reason(error)}"
            ) from error

    def _load(self, name: str) -> Tensor:
        stored = self._stored[self._stored_names[name]]
        # Plain reads instead of the reader's memory map, whose pages would count as this process's memory.
        try:
            raw = np.fromfile(
                self.path, dtype=stored.data.dtype, count=stored.data.size, offset=int(stored.data_offset)
            ).reshape(stored.data.shape)
            values = gguf.dequantize(raw, stored.tensor_type)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read tensor {name!r} from {self.path}: {reason(error)}") from error
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {name!r} in {self.path} is quantised as {stored.tensor_type.name}, "
                "which the gguf package cannot decode; give another quantisation, such as Q8_0"
            ) from error
        weight = torch.from_numpy(np.array(values, dtype=np.float32, copy=None))
        if not self._architecture.interleaved_rotary:
            return weight
        if stored.name.endswith(".attn_q.weight"):
            return _halves_apart(weight, self.config.num_attention_heads)
        if stored.name.endswith(".attn_k.weight"):
            return _halves_apart(weight, self.config.num_key_value_heads)
        return weight


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """Rows (heads, pairs, 2) to (heads, 2, pairs): transformers rotates row i of a head with row i + head_dim / 2."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class _PlainReader(gguf.GGUFReader):
    """The library's reader over a plain view of the mapped file: slicing a numpy memmap for every string of the
    vocabulary takes more than twice as long."""

    def _get(self, *arguments: Any, **options: Any) -> Any:
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)
        return super()._get(*arguments, **options)


# Parsing a vocabulary takes seconds and one command opens its model several times. The file's time and size are part
# of the key, so that a changed file is parsed anew.
@lru_cache(maxsize=1)
def _open(path: Path, _modified_ns: int, _size: int) -> tuple[gguf.GGUFReader, PreTrainedConfig]:
    try:
        reader = _PlainReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or no GGUF file ({reason(error)}); download it again") from error
    _check_supported(path, reader)
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except CONFIG_ERRORS as error:
        raise CheckpointError(f"the metadata of {path} gives no valid config: {reason(error)}") from error
    config.dtype = torch.float32
    return reader, config


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _architecture_name(path: Path, reader: gguf.GGUFReader) -> str:
    name = _field(reader, "general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{path} does not name its architecture (general.architecture); download it again")
    return name


def _check_supported(path: Path, reader: gguf.GGUFReader) -> None:
    name = _architecture_name(path, reader)
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} is a GGUF of architecture {name!r}; GGUF is read for {', '.join(_ARCHITECTURES)}, "
            "so give the model's safetensors folder"
        )
    if (parts := _field(reader, "split.count") or 1) > 1:
        raise UnsupportedModelError(f"{path} is one of {parts} parts; merge them first: llama-gguf-split --merge")
    # transformers ignores both, and the model would be silently wrong.
    scaling = _field(reader, f"{name}.rope.scaling.type") or "none"
    factors = [tensor.name for tensor in reader.tensors if tensor.name in _ROTARY_FACTORS]
    if scaling != "none" or factors:
        raise UnsupportedModelError(
            f"{path} scales its rotary frequencies ({factors[0] if factors else scaling}), which GGUF does not carry "
            "over exactly; give the model's safetensors folder"
        )


def _match(
    path: Path, architecture: _Architecture, config: PreTrainedConfig, stored: dict[str, gguf.ReaderTensor]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Stored name and shape for each tensor of the transformers model."""
    shapes = shapes_of_config(config)
    name_map = gguf.get_tensor_name_map(architecture.arch, config.num_hidden_layers)
    stored_names = {name: name_map.get_name(name, try_suffixes=(".weight", ".bias")) or name for name in shapes}
    if unknown := sorted(stored.keys() - stored_names.values()):
        raise UnsupportedModelError(f"{path} holds {unknown[0]!r}, which a {config.model_type} model has no place for")
    for name, stored_name in stored_names.items():
        if stored_name not in stored:
            raise CheckpointError(f"{path} lacks the tensor {stored_name!r} of its {config.model_type} model")
        shape = tuple(reversed(stored[stored_name].shape.tolist()))
        if shape != shapes[name]:
            raise CheckpointError(f"{path} stores {stored_name!r} with shape {shape}, its metadata say {shapes[name]}")
    return stored_names, shapes

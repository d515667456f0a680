"""What every source of weights offers, whatever its file format."""

from abc import ABC, abstractmethod
from math import prod
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from kvfold.checkpoint.expected import shapes_of_config
from kvfold.errors import CheckpointError


class Checkpoint(ABC):
    """The tensors, config and tokenizer of one model; weights are read one tensor at a time.

    Attributes:
        source: the model as the user named it.
        path: the folder or file that holds it.
        config: its transformers config.
        dtype: what the weights are read as; where several types are stored, the one with the most bytes.
        generation_config: the stored defaults for `generate`; None where the model has none.
    """

    def __init__(
        self,
        *,
        source: str,
        path: Path,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        generation_config: GenerationConfig | None,
        shapes: dict[str, tuple[int, ...]],
    ):
        self.source = source
        self.path = path
        self.config = config
        self.dtype = dtype
        self.generation_config = generation_config
        self._shapes = shapes

    def names(self) -> tuple[str, ...]:
        """All tensors by their Hugging Face names, in stored order. An output layer tied to the embedding is absent."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading its data.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        if name not in self._shapes:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; the checkpoint does not fit its config")
        return self._shapes[name]

    def read(self, name: str) -> Shaped[Tensor, "..."]:
        """One tensor in memory of its own; no file stays open or mapped.

        Raises:
            CheckpointError: the tensor is missing, cannot be read, or holds a NaN or an infinity.
        """
        shape = self.shape(name)
        tensor = self._load(name)
        assert tuple(tensor.shape) == shape
        check_finite(self.path, name, tensor)
        return tensor

    def check_complete(self) -> None:
        """Compare names and shapes with what the config promises; reads no data.

        Raises:
            CheckpointError: a tensor is missing, of another shape, or not the model's.
        """
        wanted = shapes_of_config(self.config)
        for name, shape in wanted.items():
            if self.shape(name) != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has shape {self.shape(name)}, its config says {shape}; "
                    "restore config and weights from the same model"
                )
        if surplus := [name for name in self._shapes if name not in wanted]:
            raise CheckpointError(
                f"{self.path} has the tensor {surplus[0]}, for which the {self.config.model_type} model of its config "
                "has no place; restore config and weights from the same model"
            )

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer and its chat template into `folder`, as files that `AutoTokenizer` loads.

        Raises:
            CheckpointError: the model has no tokenizer.
        """
        self.load_tokenizer().save_pretrained(folder)

    @abstractmethod
    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer.

        Raises:
            CheckpointError: the model has none, or its files are not readable.
        """

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that changes when the weights, the config or the tokenizer are replaced, wherever they lie.

        Quick: of large files it covers size, time of change and samples.

        Raises:
            CheckpointError: a file cannot be read.
        """

    @abstractmethod
    def _load(self, name: str) -> Tensor:
        """The tensor `name`, known to exist, in memory of its own."""


def check_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor of the model at `path` that holds a NaN or an infinity.

    Raises:
        CheckpointError: it does; the message names it.
    """
    if not is_finite(tensor):
        raise CheckpointError(f"tensor {name!r} in {path} holds NaN or Inf; restore it from a sound copy")


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; unlike `isfinite().all()` this needs no memory for a mask."""
    if not tensor.is_floating_point() or prod(tensor.shape) == 0:
        return True
    low, high = torch.aminmax(tensor.detach())  # both are NaN if any element is
    return bool(torch.isfinite(low) and torch.isfinite(high))

"""What a user may ask of healing."""

from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from kvfold.errors import OptionError
from kvfold.registry import lookup

TRAINS = ("attention", "all")
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class HealOptions:
    """Every choice of a training run that heals; also the keys of a recipe file.

    The schedule and the optimiser are MHA2MLA's (arXiv 2502.14837): AdamW, a linear warm-up, a constant rate, and a
    decay by 1 - sqrt to zero.

    Args:
        data: text, Markdown, JSON Lines or Parquet files, and hub datasets (`name` or `name:configuration`).
        data_weights: one positive number per entry of `data`, its share of the sequences; empty weighs all alike.
        column: of the text in tables; None takes `text`, or `messages` (chats) by the tokenizer's template.
        steps: optimiser steps.
        batch: sequences per step.
        accumulate: forward passes per step, which share `batch`; more take less memory.
        sequence_length: tokens per sequence.
        learning_rate: the highest.
        warmup: share of the steps in which the rate rises.
        decay: share of the steps, the last ones, in which it falls.
        weight_decay: AdamW's.
        clip: largest norm of the gradient.
        trains: `attention` (nothing else moves) or `all`.
        teacher: model whose predictions are followed, too; its tokenizer must be the same.
        distill_weight: beta, what the divergence from the teacher counts beside the cross entropy.
        temperature: tau of both predictions in that divergence.
        precision: of matrix products; `auto` is bfloat16 where the hardware is fast at it. Weights are in fp32.
        gradient_checkpointing: keep fewer activations and compute them twice.
        save_steps: between checkpoints.
        seed: of the order of the sequences, and all else that is drawn.
    """

    data: tuple[str, ...]
    data_weights: tuple[float, ...] = ()
    column: str | None = None
    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    sequence_length: int = 512
    learning_rate: float = 5e-4
    warmup: float = 0.05
    decay: float = 0.2
    weight_decay: float = 0.1
    clip: float = 1.0
    trains: str = "all"
    teacher: str | None = None
    distill_weight: float = 1.0
    temperature: float = 1.0
    precision: str = "auto"
    gradient_checkpointing: bool = False
    save_steps: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what can be refused before a model is opened."""
        if not self.data:
            raise OptionError("no training data was given: name a file or a dataset with --data.")
        if len(set(self.data)) < len(self.data):
            raise OptionError("data names a source twice: name it once, with a larger weight.")
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise OptionError(f"{len(self.data_weights)} data_weights for {len(self.data)} sources: give one each.")
        for weight in self.data_weights:
            if not 0 < weight < inf:
                raise OptionError(f"data_weights must be positive, finite numbers, got {weight!r}.")
        for name in ("steps", "batch", "accumulate", "save_steps"):
            if (value := getattr(self, name)) < 1:
                raise OptionError(f"{name} must be 1 or more, got {value}.")
        if self.batch % self.accumulate:
            raise OptionError(f"accumulate must divide batch, {self.batch}, got {self.accumulate}.")
        if self.sequence_length < 2:
            raise OptionError(f"sequence_length must be 2 or more, got {self.sequence_length}.")
        for name in ("learning_rate", "clip", "temperature"):
            if not 0 < (value := getattr(self, name)) < inf:
                raise OptionError(f"{name} must be a positive number, got {value}.")
        for name in ("weight_decay", "distill_weight"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise OptionError(f"{name} must be 0 or more, got {value}.")
        for name in ("warmup", "decay"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise OptionError(f"{name} must be between 0 and 1, got {value}.")
        if self.warmup + self.decay > 1:
            raise OptionError(f"warmup and decay are {self.warmup} and {self.decay} of the steps: more than all.")
        lookup(dict.fromkeys(TRAINS), self.trains, "choice of what trains")
        lookup(dict.fromkeys(PRECISIONS), self.precision, "precision")
        if not 0 <= self.seed < 2**32:
            raise OptionError(f"seed must be between 0 and {2**32 - 1}, got {self.seed}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HealOptions":
        """Options from recipe keys; an unknown key is an error that suggests the nearest."""
        known = {field.name: field for field in fields(cls)}
        for key in values:
            lookup(known, key, "option")
        values = {"data": ()} | values
        if isinstance(values["data"], (str, Path)):
            values["data"] = (values["data"],)
        values["data"] = tuple(map(str, values["data"]))
        values["data_weights"] = tuple(map(float, values.get("data_weights") or ()))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup * self.steps)

    @property
    def decay_steps(self) -> int:
        return round(self.decay * self.steps)

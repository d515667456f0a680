"""What a user may ask of training."""

from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from kvfold.errors import OptionError
from kvfold.option_types import check_types
from kvfold.registry import lookup
from kvfold.texts import DEFAULT_TEXT

TRAINS = ("attention", "all", "lora")
DECAYS = ("1-sqrt", "linear", "cosine")
PRECISIONS = ("auto", "float32", "bfloat16")
MOST_SEQUENCES = 2 * 10**8
"""Of a run: their order is kept in memory."""


def _place(name: str | None) -> str | Path | None:
    """What a source is by, however it is spelt."""
    return Path(name).resolve() if name is not None and Path(name).is_file() else name


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Every choice of a training run; also the keys of a recipe file.

    The schedule, the optimiser and their defaults are those with which MHA2MLA heals (arXiv 2502.14837), the steps as
    shares: AdamW, a linear warm-up, a constant rate, and a decay by 1 - sqrt to zero.

    Args:
        data: text, Markdown, JSON Lines or Parquet files, hub datasets (`name` or `name:configuration`), and `default`,
            the shipped textbook excerpts.
        data_weights: one positive number per entry of `data`, its share of the sequences; empty weighs all alike.
        column: of the text in tables, one for all of `data` or one for each; empty takes `text`, or `messages` (chats)
            by the tokenizer's template.
        steps: optimiser steps.
        batch: sequences per step.
        accumulate: forward passes per step, which share `batch`; more take less memory.
        sequence_length: tokens per sequence.
        learning_rate: the highest.
        warmup: share of the steps in which the rate rises.
        decay: share of the steps, the last ones, in which it falls.
        decay_type: how: `1-sqrt`, `linear` or `cosine`.
        floor: share of the rate that it falls to.
        weight_decay: AdamW's.
        clip: largest norm of the gradient.
        trains: `all`, `attention` (nothing else moves) or `lora` (low-rank updates of it, merged when saved).
        lora_rank: of these updates; their scaling is 2.
        teacher: model whose predictions are followed, too; its tokenizer must be the same.
        distill_weight: beta, what the divergence from the teacher counts beside the cross entropy.
        temperature: tau of both predictions in that divergence.
        hidden_weight: gamma, what the distance from the teacher's hidden states counts.
        teacher_top_k: keep only the teacher's k likeliest tokens, computed once and put on disk; 0 follows all of them
            and runs the teacher in every step.
        held_out: text (`default`: the shipped novel) on which the loss is measured while training, in
            `held_out_windows` sequences or as many as it has, every `held_out_steps` steps.
        patience: stop when the held-out loss has not fallen in so many measurements.
        recover: stop when this share of the held-out loss between the start's and the teacher's is won back.
        price_per_hour: of the machine in any currency, to show what a run has cost so far.
        precision: of matrix products; `auto` is bfloat16 where the hardware is fast at it. Weights are in fp32.
        gradient_checkpointing: keep fewer activations and compute them twice.
        save_steps: between checkpoints.
        report_to: trackers of the Trainer (`tensorboard`, `trackio`, `wandb`, ...) that are told of every step, too.
        fsdp: shard over the processes of `torchrun` by FSDP2; the weights of each process are then a part.
        deepspeed: DeepSpeed configuration (JSON) to shard by instead.
        seed: of the order of the sequences, and all else that is drawn.
    """

    data: tuple[str, ...]
    data_weights: tuple[float, ...] = ()
    column: tuple[str, ...] = ()
    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    sequence_length: int = 512
    learning_rate: float = 1e-4
    warmup: float = 0.1
    decay: float = 1 / 6
    decay_type: str = "1-sqrt"
    floor: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    trains: str = "all"
    lora_rank: int = 16
    teacher: str | None = None
    distill_weight: float = 1.0
    temperature: float = 1.0
    hidden_weight: float = 0.0
    teacher_top_k: int = 0
    held_out: str | None = None
    held_out_windows: int = 24
    held_out_steps: int = 50
    patience: int | None = None
    recover: float | None = None
    price_per_hour: float | None = None
    precision: str = "auto"
    gradient_checkpointing: bool = False
    fsdp: bool = False
    deepspeed: str | None = None
    save_steps: int = 50
    report_to: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what can be refused before a model is opened."""
        check_types(self)
        if "" in (*self.data, self.held_out):
            raise OptionError("a source of text has no name: leave it out, or name a file or a dataset.")
        if not self.data:
            raise OptionError("no training data was given: name a file or a dataset with --data, or default.")
        if len(set(map(_place, self.data))) < len(self.data):
            raise OptionError("data names a source twice: name it once, with a larger weight.")
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise OptionError(f"{len(self.data_weights)} data_weights for {len(self.data)} sources: give one each.")
        if len(self.column) > 1 and len(self.column) != len(self.data):
            raise OptionError(
                f"{len(self.column)} columns for {len(self.data)} sources: give one for all, or one each."
            )
        for weight in self.data_weights:
            if not 0 < weight < inf:
                raise OptionError(f"data_weights must be positive, finite numbers, got {weight!r}.")
        for name in ("steps", "batch", "accumulate", "save_steps", "lora_rank", "held_out_windows", "held_out_steps"):
            self._check(name, self._value(name) >= 1, "1 or more")
        if self.steps * self.batch > MOST_SEQUENCES:
            raise OptionError(f"{self.steps:,} steps of {self.batch:,} are more than {MOST_SEQUENCES:,} sequences.")
        if self.batch % self.accumulate:
            raise OptionError(f"accumulate must divide batch, {self.batch}, got {self.accumulate}.")
        self._check("sequence_length", self.sequence_length >= 2, "2 or more")
        for name in ("learning_rate", "clip", "temperature"):
            self._check(name, 0 < self._value(name) < inf, "a positive number")
        for name in ("weight_decay", "distill_weight", "hidden_weight", "teacher_top_k"):
            self._check(name, 0 <= self._value(name) < inf, "0 or more")
        for name in ("warmup", "decay", "floor"):
            self._check(name, 0 <= self._value(name) <= 1, "between 0 and 1")
        if self.warmup + self.decay > 1:
            raise OptionError(f"warmup and decay are {self.warmup:g} and {self.decay:g} of the steps: more than all.")
        lookup(dict.fromkeys(TRAINS), self.trains, "choice of what trains")
        lookup(dict.fromkeys(DECAYS), self.decay_type, "decay_type")
        lookup(dict.fromkeys(PRECISIONS), self.precision, "precision")
        self._check("seed", 0 <= self.seed < 2**32, f"between 0 and {2**32 - 1}")
        self._check_teacher()
        self._check_stopping()
        if self.fsdp and self.deepspeed:
            raise OptionError("fsdp and deepspeed were both given: shard by one of them.")

    def _check_teacher(self) -> None:
        if self.teacher is None:
            for name in ("hidden_weight", "teacher_top_k"):
                if self._value(name):
                    raise OptionError(f"{name} is about a teacher: name one with --teacher.")
        elif self.teacher_top_k and self.hidden_weight:
            raise OptionError("teacher_top_k keeps no hidden states: leave it out, or hidden_weight.")

    def _check_stopping(self) -> None:
        for name in ("patience", "recover"):
            if self._value(name) is not None and self.held_out is None:
                raise OptionError(f"{name} stops by the loss on a held-out text: name one with --held-out.")
        if self.held_out not in (None, DEFAULT_TEXT) and _place(self.held_out) in map(_place, self.data):
            raise OptionError(f"held_out is {self.held_out}, which is trained on: name another text.")
        if self.patience is not None:
            self._check("patience", self.patience >= 1, "1 or more")
        if self.recover is not None:
            self._check("recover", 0 < self.recover <= 1, "above 0 and at most 1")
            if self.teacher is None:
                raise OptionError("recover is a share of the way to a teacher's loss: name one with --teacher.")
        if self.price_per_hour is not None:
            self._check("price_per_hour", 0 <= self.price_per_hour < inf, "0 or more")

    def _value(self, name: str) -> Any:
        return getattr(self, name)

    def _check(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise OptionError(f"{name} must be {wanted}, got {self._value(name)}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainOptions":
        """Options from recipe keys; an unknown key is an error that suggests the nearest."""
        known = {field.name: field for field in fields(cls)}
        for key in values:
            lookup(known, key, "option")
        values = {"data": ()} | values
        for name in ("data", "column", "report_to"):
            given = values.get(name) or ()
            values[name] = (given,) if isinstance(given, (str, Path)) else given
            if not isinstance(values[name], (list, tuple)) or not all(isinstance(x, (str, Path)) for x in values[name]):
                raise OptionError(f"{name} must be a text or a list of texts, got {given!r}.")
            values[name] = tuple(map(str, values[name]))
        weights = values.get("data_weights") or ()
        if not isinstance(weights, (list, tuple)) or not all(isinstance(weight, (int, float)) for weight in weights):
            raise OptionError(f"data_weights must be a list of numbers, got {weights!r}.")
        values["data_weights"] = tuple(map(float, weights))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def files(self) -> list[str]:
        """The training and held-out texts that are files."""
        return [name for name in (*self.data, self.held_out) if name is not None and Path(name).is_file()]

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup * self.steps)

    @property
    def decay_steps(self) -> int:
        return round(self.decay * self.steps)

    @property
    def columns(self) -> tuple[str | None, ...]:
        """Of each source."""
        return (*self.column,) if len(self.column) == len(self.data) else (self.column or (None,)) * len(self.data)

    @property
    def step_tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence_length

    def cost(self, seconds: float) -> float | None:
        """What so much time costs; None where no price is given."""
        return None if self.price_per_hour is None else self.price_per_hour * seconds / 3600

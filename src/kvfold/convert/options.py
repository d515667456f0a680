"""What a user may ask of a conversion, and the shapes it comes to for one model."""

from dataclasses import asdict, dataclass, fields
from math import ceil, inf
from os.path import realpath
from pathlib import Path
from typing import Any

import torch

from kvfold.attention import GroupedSpec
from kvfold.convert.factorize import FACTORIZATIONS, NEEDS_CALIBRATION
from kvfold.convert.rotary import LAYOUTS, Strategy
from kvfold.errors import BudgetError, OptionError
from kvfold.option_types import check_types
from kvfold.registry import lookup
from kvfold.texts import CALIBRATION, DEFAULT_TEXT

SAMPLED_TEXT = "sampled"
RANDOM_TEXT = "random"
"""The calibration entries that are no files: the shipped text, text sampled from the model, and random tokens."""

MOST_CALIBRATION_TOKENS = 2**24
"""Their hidden states are all in memory: a larger number is a slip of the hand, not a wish."""

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TARGETS = ("deepseek",)
EXPORTABLE = ("assigned", "stride", "fastest")
"""Rope strategies whose frequencies stock DeepSeek code can have; the first is the default with a target."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Every choice of a conversion; also the keys of a recipe file.

    Args:
        layout: `shared` (one rotary key head, DeepSeek's layout) or `per_head` (one per KV head, MHA2MLA's).
        cache_ratio: share of the original cache to keep, in (0, 1].
        qk_rope_head_dim: dims of one rotary key head, even.
        kv_lora_rank: total latent rank R per token and layer.
        d_kv: latent rank per KV head (MHA2MLA's notation), R = G d_kv.
        rope: which rotary components stay; None takes the layout's default, `full` with `lossless`.
        target: `deepseek` keeps to what can be exported to runtimes that know DeepSeek's attention: the layout
            `shared`, one of the rope strategies of `EXPORTABLE`, and layers that are all alike.
        factorize: low-rank method; None takes `attention_aware`, or `svd_joint` when nothing is calibrated.
        calibration: what to calibrate on: `default` (the broad text shipped with kvfold), `sampled` (text sampled from
            the model itself, which takes memory for all of it), `random` (tokens drawn evenly from the vocabulary: a
            little of it helps a `one_shot` conversion on text unlike the rest) and paths of text files.
        calibration_weights: one positive number per entry of `calibration`, its share of the tokens; empty weighs all
            alike.
        calibration_tokens: tokens to calibrate on, all entries together; 0 uses the weights alone.
        calibration_window: tokens per calibration sequence.
        seed: of everything that is drawn at random.
        per_layer: share the cache among the layers by what each needs, instead of evenly (a cache_ratio, layout
            `shared`, a strategy that takes any number of rotary dims).
        one_shot: leave out what is fitted on the already converted layers: the refit of each layer's output projection
            to what the original computes, and the polish.
        polish_minutes: time for the layer-wise fit of all attention tensors; 0 for none. It is turned into
            `polish_steps` by the speed of the first layer.
        polish_steps: optimiser steps per layer, instead of a time.
        lossless: keep every rotary component and full rank.
        dtype: dtype of the written weights; None keeps the checkpoint's.
    """

    layout: str = "shared"
    cache_ratio: float | None = None
    qk_rope_head_dim: int | None = None
    kv_lora_rank: int | None = None
    d_kv: int | None = None
    rope: str | None = None
    target: str | None = None
    factorize: str | None = None
    calibration: tuple[str, ...] = (DEFAULT_TEXT,)
    calibration_weights: tuple[float, ...] = ()
    calibration_tokens: int = 16384
    calibration_window: int = 512
    seed: int = 0
    per_layer: bool = False
    one_shot: bool = False
    polish_minutes: float = 0.0
    polish_steps: int = 0
    lossless: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        strategies = lookup(LAYOUTS, self.layout, "layout").strategies
        if self.rope is not None:
            self._check_layout_of_rope()
            lookup(strategies, self.rope, f"rope strategy (layout {self.layout})")
        if self.target is not None:
            self._check_target()
        if self.factorize is not None:
            lookup(FACTORIZATIONS, self.factorize, "factorization")
        if self.dtype is not None:
            lookup(DTYPES, self.dtype, "dtype")
        self._check_budget()
        if self.calibration_tokens < 0:
            raise OptionError(f"calibration_tokens must be 0 or more, got {self.calibration_tokens}.")
        if self.calibration_window < 16:
            raise OptionError(f"calibration_window must be 16 tokens or more, got {self.calibration_window}.")
        for name in ("calibration_tokens", "calibration_window"):
            if (tokens := getattr(self, name)) > MOST_CALIBRATION_TOKENS:
                raise OptionError(f"{name} must be {MOST_CALIBRATION_TOKENS} or less, got {tokens}.")
        if not 0 <= self.seed < 2**32:
            raise OptionError(f"seed must be between 0 and {2**32 - 1}, got {self.seed}.")
        self._check_calibration()
        self._check_fits()
        if not self.calibration_tokens:
            self._check_weights_alone()

    def _check_target(self) -> None:
        lookup(dict.fromkeys(TARGETS), self.target or "", "target")
        if self.layout != "shared":
            raise OptionError(f"the target {self.target} has the layout shared, not {self.layout}: leave one out.")
        if self.rope_strategy not in EXPORTABLE:
            raise OptionError(
                f"the target {self.target} cannot express the rope strategy {self.rope_strategy!r}: take one of "
                f"{', '.join(EXPORTABLE)}."
            )
        if self.per_layer:
            raise OptionError(f"the target {self.target} has one rank for all layers: leave per_layer out.")

    def _check_calibration(self) -> None:
        if not self.calibration or "" in self.calibration:
            raise OptionError(
                f"calibration is empty: name {DEFAULT_TEXT}, {SAMPLED_TEXT}, {RANDOM_TEXT} or text files, or set "
                "calibration_tokens to 0."
            )
        files = {DEFAULT_TEXT: str(CALIBRATION), SAMPLED_TEXT: SAMPLED_TEXT, RANDOM_TEXT: RANDOM_TEXT}
        seen: dict[str, str] = {}
        for entry in self.calibration:
            text = files.get(entry) or realpath(entry)
            if text in seen:
                names = " and ".join(dict.fromkeys((repr(seen[text]), repr(entry))))
                raise OptionError(f"calibration has the same text twice, {names}: name it once, with a larger weight.")
            seen[text] = entry
        given, entries = len(self.calibration_weights), len(self.calibration)
        if given not in (0, entries):
            raise OptionError(
                f"calibration_weights has {given} number(s), calibration {entries} entry(s): give one number for each."
            )
        for weight in self.calibration_weights:
            if not 0 < weight < inf:
                raise OptionError(f"calibration_weights must be positive, finite numbers, got {weight!r}.")
        if 0 < self.calibration_tokens <= self.calibration_window * (entries - 1):
            raise OptionError(
                f"{self.calibration_tokens} calibration_tokens are fewer than one window of {self.calibration_window} "
                f"for each of the {entries} calibration entries: raise them to {self.calibration_window * entries}, or "
                "lower calibration_window."
            )

    def _check_fits(self) -> None:
        if not 0 <= self.polish_minutes < inf:
            raise OptionError(f"polish_minutes must be 0 or a positive number, got {self.polish_minutes}.")
        if self.polish_steps < 0:
            raise OptionError(f"polish_steps must be 0 or more, got {self.polish_steps}.")
        if self.polish_minutes and self.polish_steps:
            raise OptionError("give either polish_minutes or polish_steps, not both.")
        if RANDOM_TEXT in self.calibration and self.follows:
            raise OptionError(
                f"{RANDOM_TEXT} calibration tokens are for one_shot: the refit and the polish go wrong on them. Add "
                f"one_shot or leave {RANDOM_TEXT} out."
            )
        if self.polishes and self.one_shot:
            raise OptionError("one_shot leaves the polish out: give either.")
        if self.polishes and (self.lossless or not self.calibration_tokens):
            raise OptionError("polish needs calibration text and something to win back: leave it out.")
        if self.per_layer:
            if self.cache_ratio is None:
                raise OptionError("per_layer shares a cache_ratio among the layers: give one.")
            if self.rope_strategy != "mixed" or self.factorization != "attention_aware":
                raise OptionError("per_layer needs the rope strategy mixed, attention_aware and calibration text.")

    def _check_weights_alone(self) -> None:
        hint = "give calibration_tokens above 0, or take"
        if self.strategy.required:
            raise OptionError(f"the rope strategy {self.rope_strategy!r} needs calibration text: {hint} another.")
        if self.factorization in NEEDS_CALIBRATION:
            raise OptionError(f"{self.factorization} needs calibration text: {hint} svd_joint.")

    def _check_layout_of_rope(self) -> None:
        for name, layout in LAYOUTS.items():
            own = LAYOUTS[self.layout].strategies
            if self.rope in layout.strategies and self.rope not in own:
                raise OptionError(
                    f"rope strategy {self.rope!r} belongs to layout {name}; layout {self.layout} has {', '.join(own)}."
                )

    def _check_budget(self) -> None:
        explicit = [name for name in ("qk_rope_head_dim", "kv_lora_rank", "d_kv") if getattr(self, name) is not None]
        if self.lossless and (self.cache_ratio is not None or explicit or self.rope not in (None, "full")):
            raise OptionError("lossless keeps everything: leave out the budget and the rope strategy.")
        if self.lossless:
            return
        if self.cache_ratio is not None:
            if explicit:
                raise OptionError(f"give either cache_ratio or {' and '.join(explicit)}, not both.")
            if not 0 < self.cache_ratio <= 1:
                raise BudgetError(f"cache_ratio must be in (0, 1], got {self.cache_ratio}.")
            return
        rank = {"kv_lora_rank", "d_kv"} & set(explicit)
        if self.qk_rope_head_dim is None or len(rank) != 1:
            raise OptionError(
                "give a budget: cache_ratio, or qk_rope_head_dim with either kv_lora_rank or d_kv, or lossless."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ConvertOptions":
        """Options from recipe keys; an unknown key is an error that suggests the nearest."""
        known = {field.name: field for field in fields(cls)}
        for key in values:
            lookup(known, key, "option")
        values = dict(values)
        if (files := values.get("calibration")) is not None:
            values["calibration"] = tuple(map(str, (files,) if isinstance(files, (str, Path)) else files))
        if (weights := values.get("calibration_weights")) is not None:
            weights = (weights,) if isinstance(weights, (int, float)) else weights
            values["calibration_weights"] = tuple(map(float, weights))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight in force of every calibration entry."""
        return self.calibration_weights or (1.0,) * len(self.calibration)

    @property
    def rope_strategy(self) -> str:
        """The rope strategy in force."""
        if self.lossless:
            return "full"
        return self.rope or (EXPORTABLE[0] if self.target else LAYOUTS[self.layout].default)

    @property
    def strategy(self) -> Strategy:
        return LAYOUTS[self.layout].strategies[self.rope_strategy]

    @property
    def factorization(self) -> str:
        """The low-rank method in force."""
        return self.factorize or ("attention_aware" if self.calibration_tokens and not self.lossless else "svd_joint")

    @property
    def polishes(self) -> bool:
        return bool(self.polish_minutes or self.polish_steps)

    @property
    def follows(self) -> bool:
        """Whether anything is fitted on the converted prefix."""
        return bool(self.calibration_tokens) and not self.lossless and not self.one_shot


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Shapes of one layer's cache: rotary key heads, dims of one, and the latent rank."""

    rotary_heads: int
    qk_rope_head_dim: int
    kv_lora_rank: int


def resolve_budget(options: ConvertOptions, spec: GroupedSpec) -> Budget:
    """The budget of `options` for a layer of shape `spec`.

    A cache ratio gives the rotary keys a quarter of what is kept (layout `shared`), or an eighth of each KV head's key
    (`per_head`; MHA2MLA's default, d/16 pairs), at most a third; the rest is latent. A latent of the model's width is
    exact, so what is beyond it goes to the rotary keys.

    Raises:
        BudgetError: the budget cannot be met, or exceeds the original cache.
    """
    layout = LAYOUTS[options.layout]
    heads = layout.rotary_heads(spec)
    full_rope = layout.full_rope_dim(spec)
    if options.lossless:
        budget = Budget(
            rotary_heads=heads, qk_rope_head_dim=full_rope, kv_lora_rank=spec.num_key_value_heads * spec.head_dim
        )
    elif options.cache_ratio is not None:
        kept = int(options.cache_ratio * spec.cached_elements() + 1e-9)
        rope = _default_rope_dim(options, spec, kept)
        if rope < 2:
            least = ceil(6e4 * heads / spec.cached_elements()) / 1e4
            advice = f"ask for at least {least:.4f}" if least <= 1 else "give qk_rope_head_dim and kv_lora_rank instead"
            raise BudgetError(
                f"cache_ratio {options.cache_ratio} keeps {kept} of {spec.cached_elements()} elements per token and "
                f"layer: too few for {heads} rotary head(s) of 2 dims; {advice}."
            )
        if kept - heads * rope > spec.hidden_size and not options.strategy.single:
            rope = min((kept - spec.hidden_size) // (2 * heads) * 2, full_rope)
        rank = min(kept - heads * rope, spec.hidden_size)
        budget = Budget(rotary_heads=heads, qk_rope_head_dim=rope, kv_lora_rank=rank)
    else:
        if options.d_kv is not None and options.d_kv < 1:
            raise BudgetError(f"d_kv must be 1 or more, got {options.d_kv}.")
        rank = options.kv_lora_rank or (options.d_kv or 0) * spec.num_key_value_heads
        budget = Budget(rotary_heads=heads, qk_rope_head_dim=options.qk_rope_head_dim or 0, kv_lora_rank=rank)
    _check(budget, spec, full_rope)
    options.strategy.check(options.rope_strategy, spec, budget.qk_rope_head_dim, full_rope)
    return budget


def _default_rope_dim(options: ConvertOptions, spec: GroupedSpec, kept: int) -> int:
    """Rotary dims where `kept` elements are kept in all; less than 2 if that is too little."""
    layout = LAYOUTS[options.layout]
    limit = kept // (3 * layout.rotary_heads(spec))
    if options.strategy.uniform:
        dims = range(2, limit + 1, 2)
        return max((dim for dim in dims if options.strategy.has_stride(spec.head_dim, dim)), default=0)
    wanted = min(layout.default_rope_dim(spec, kept), limit, layout.full_rope_dim(spec))
    return (min(wanted, spec.head_dim) if options.strategy.single else wanted) // 2 * 2


def _check(budget: Budget, spec: GroupedSpec, full_rope: int) -> None:
    rope, rank = budget.qk_rope_head_dim, budget.kv_lora_rank
    if rope < 2 or rope % 2:
        raise BudgetError(f"qk_rope_head_dim must be an even number of 2 or more, got {rope}.")
    if rope > full_rope:
        raise BudgetError(f"qk_rope_head_dim {rope} exceeds the {full_rope} rotary dims of this model and layout.")
    if rank < 1:
        raise BudgetError(f"kv_lora_rank must be 1 or more, got {rank}.")
    kept = budget.rotary_heads * rope + rank
    limit = spec.cached_elements()
    if kept > limit:
        most = limit - budget.rotary_heads * rope
        per_head = most // spec.num_key_value_heads
        raise BudgetError(
            f"{budget.rotary_heads} x {rope} rotary dims + rank {rank} = {kept} elements per token and layer exceed "
            f"the original cache of {limit}: lower kv_lora_rank to {most}, or d_kv to {per_head}."
        )

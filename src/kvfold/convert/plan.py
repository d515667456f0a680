"""What a conversion will do, before it is done: pure arithmetic on a config, printable."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvfold.attention import GroupedSpec, LatentSpec
from kvfold.convert.factorize import NEEDS_ATTENTION, NEEDS_CALIBRATION
from kvfold.convert.options import DTYPES, SAMPLED_TEXT, Budget, ConvertOptions, resolve_budget
from kvfold.convert.rotary import LAYOUTS, Layout
from kvfold.errors import OptionError
from kvfold.families import Family

LIBRARY_BYTES = 500_000_000
"""Of memory that Python, PyTorch and transformers take before anything is read."""
SHARD_BYTES = 10**9


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer before and after."""

    source: GroupedSpec
    target: LatentSpec
    sliding_window: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion of one model. Bytes are for a cache in `dtype`, per token over all layers."""

    source: str
    model_type: str
    layout: str
    rope: str
    factorize: str
    dtype: torch.dtype
    calibration_tokens: int
    calibration_window: int
    layers: tuple[LayerPlan, ...]
    estimated_memory_bytes: int

    @property
    def elements_before(self) -> int:
        return sum(layer.source.cached_elements() for layer in self.layers)

    @property
    def elements_after(self) -> int:
        return sum(layer.target.cached_elements() for layer in self.layers)

    @property
    def kept(self) -> float:
        """Share of the original cache that is left."""
        return self.elements_after / self.elements_before

    def with_ranks(self, ranks: Sequence[int]) -> "Plan":
        """The same with a latent rank of its own for every layer."""
        targets = [replace(layer.target, kv_lora_rank=rank) for layer, rank in zip(self.layers, ranks, strict=True)]
        layers = (replace(layer, target=target) for layer, target in zip(self.layers, targets, strict=True))
        return replace(self, layers=tuple(layers))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values; layers that are alike are listed once with their count."""
        size = self.dtype.itemsize
        groups: dict[LayerPlan, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(layer, []).append(index)
        return {
            "source": self.source,
            "model_type": self.model_type,
            "layout": self.layout,
            "rope": self.rope,
            "factorize": self.factorize,
            "dtype": str(self.dtype).removeprefix("torch."),
            "calibration_tokens": self.calibration_tokens,
            "calibration_window": self.calibration_window,
            "elements_before": self.elements_before,
            "elements_after": self.elements_after,
            "bytes_before": self.elements_before * size,
            "bytes_after": self.elements_after * size,
            "kept": self.kept,
            "attention_parameters_before": sum(layer.source.parameters() for layer in self.layers),
            "attention_parameters_after": sum(layer.target.parameters() for layer in self.layers),
            "estimated_memory_bytes": self.estimated_memory_bytes,
            "layers": [
                {
                    "first": indices[0],
                    "last": indices[-1],
                    "count": len(indices),
                    "source": layer.source.to_dict() | {"name": layer.source.name},
                    "target": layer.target.to_dict() | {"name": layer.target.name},
                    "sliding_window": layer.sliding_window,
                    "elements_before": layer.source.cached_elements(),
                    "elements_after": layer.target.cached_elements(),
                }
                for layer, indices in groups.items()
            ],
        }


def make_plan(
    source: str, config: PreTrainedConfig, family: Family, dtype: torch.dtype, options: ConvertOptions
) -> Plan:
    """The plan of converting a model of this config.

    Raises:
        BudgetError: the budget cannot be met, or exceeds the original cache.
        OptionError: the target cannot express the model.
    """
    layers = tuple(
        LayerPlan(
            source=spec,
            target=target_spec(spec, LAYOUTS[options.layout], resolve_budget(options, spec)),
            sliding_window=window,
        )
        for spec, window in zip(family.layer_specs(config), family.sliding_windows(config), strict=True)
    )
    if options.target is not None:
        check_deepseek(config, family.sliding_windows(config))
    calibrates = needs_text(options)
    return Plan(
        source=source,
        model_type=config.model_type,
        layout=options.layout,
        rope=options.rope_strategy,
        factorize=options.factorization,
        dtype=DTYPES[options.dtype] if options.dtype else dtype,
        calibration_tokens=options.calibration_tokens if calibrates else 0,
        calibration_window=options.calibration_window,
        layers=layers,
        estimated_memory_bytes=_estimate_memory(config, layers[0].source, options if calibrates else None),
    )


def check_deepseek(config: Any, windows: Sequence[int | None]) -> None:
    """Refuse what of a model, its attention's own weights aside, a dense DeepSeek cannot express in any runtime.

    Raises:
        OptionError: the model has such a thing.
    """
    if any(window is not None for window in windows):
        raise OptionError("the model has sliding windows, which DeepSeek's attention cannot express.")
    if getattr(config, "mlp_bias", False) or config.hidden_act != "silu":
        raise OptionError("the model's MLPs have biases or another activation than silu; DeepSeek's have neither.")
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise OptionError(f"the model's rotary type is {kind!r}; only unscaled frequencies can be exported so far.")


def needs_text(options: ConvertOptions) -> bool:
    """Whether anything in the options reads calibration text."""
    reads = options.strategy.reads != "nothing" or options.factorization in NEEDS_CALIBRATION
    return options.calibration_tokens > 0 and (reads or options.follows)


def needs_attention(options: ConvertOptions) -> bool:
    """Whether anything in the options reads the original's attention weights on calibration text."""
    reads = options.strategy.reads == "attention" or options.factorization in NEEDS_ATTENTION
    return options.calibration_tokens > 0 and reads


def target_spec(spec: GroupedSpec, layout: Layout, budget: Budget) -> LatentSpec:
    """The latent attention that a layer of shape `spec` becomes within `budget`."""
    return LatentSpec(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        kv_lora_rank=budget.kv_lora_rank,
        rotary_heads=budget.rotary_heads,
        qk_rope_head_dim=budget.qk_rope_head_dim,
        qk_nope_head_dim=layout.nope_dim(spec, budget.qk_rope_head_dim),
        v_head_dim=spec.head_dim,
        query_bias=spec.query_bias,
        rope_key_bias=spec.key_bias,
        value_bias=spec.value_bias,
        output_bias=spec.output_bias,
    )


def _estimate_memory(config: PreTrainedConfig, spec: GroupedSpec, calibrated: ConvertOptions | None) -> int:
    """Rough peak in bytes: libraries, one layer's attention and its Gram matrices, one shard, the largest tensor; with
    calibration one layer and its new attention in fp32, its moments in fp64, and the hidden states of all tokens, once
    more if the converted layers are followed. The whole model, in 2 bytes a weight, if text is sampled from it."""
    width, rows = spec.hidden_size, spec.num_key_value_heads * spec.head_dim * 2
    attention = 8 * (3 * spec.parameters() + 4 * min(width, rows) ** 2)
    needed = LIBRARY_BYTES + attention + SHARD_BYTES + 2 * config.vocab_size * width
    if calibrated is None:
        return needed
    dense = 3 * width * config.intermediate_size
    layer = 4 * (3 * spec.parameters() + dense)
    streams = 2 if calibrated.follows else 1
    needed += layer + 2 * 8 * width**2 + 4 * streams * calibrated.calibration_tokens * width
    if SAMPLED_TEXT not in calibrated.calibration:
        return needed
    model = 2 * (config.num_hidden_layers * (spec.parameters() + dense) + config.vocab_size * width)
    return max(needed, LIBRARY_BYTES + model)

"""What a checkpoint's attention is and costs, and whether it can be converted."""

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvfold.attention import AttentionSpec
from kvfold.checkpoint import open_checkpoint
from kvfold.errors import UnsupportedModelError
from kvfold.families.record import check_tensors, family_of


@dataclass(frozen=True, kw_only=True)
class LayerInspection:
    """One layer: the attention's name, heads, and elements and bytes cached per token."""

    layer: int
    attention: str
    query_heads: int
    kv_heads: int
    sliding_window: int | None
    cached_elements: int
    cached_bytes: int
    attention_parameters: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint as a whole; bytes are for a cache in the checkpoint's own dtype."""

    model: str
    model_type: str
    dtype: str
    parameters: int
    convertible: bool
    reason: str | None
    cached_elements_per_token: int
    cached_bytes_per_token: int
    layers: tuple[LayerInspection, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_model(model: str | Path) -> Inspection:
    """Read a checkpoint's config and tensor shapes, no weights.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    checkpoint = open_checkpoint(model)
    config, names = checkpoint.config, checkpoint.names()
    reason: str | None = None
    specs: tuple[AttentionSpec, ...] = ()
    windows: tuple[int | None, ...] = ()
    try:
        family = family_of(config)
        specs, windows = family.layer_specs(config), family.sliding_windows(config)
        check_tensors(family, names)
    except UnsupportedModelError as error:
        reason = str(error)
    if config.model_type == "kvfold":
        specs, windows = config.specs(), config.windows()
    size = checkpoint.dtype.itemsize
    layers = tuple(
        LayerInspection(
            layer=index,
            attention=spec.name,
            query_heads=spec.num_attention_heads,
            kv_heads=spec.num_key_value_heads,
            sliding_window=window,
            cached_elements=spec.cached_elements(),
            cached_bytes=spec.cached_elements() * size,
            attention_parameters=spec.parameters(),
        )
        for index, (spec, window) in enumerate(zip(specs, windows, strict=True))
    )
    elements = sum(layer.cached_elements for layer in layers)
    return Inspection(
        model=checkpoint.source,
        model_type=config.model_type,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        parameters=sum(prod(checkpoint.shape(name)) for name in names),
        convertible=reason is None,
        reason=reason,
        cached_elements_per_token=elements,
        cached_bytes_per_token=elements * size,
        layers=layers,
    )

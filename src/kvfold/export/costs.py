"""What runtimes would cache of a latent model, before it is exported."""

from dataclasses import asdict, dataclass
from typing import Any

from kvfold.export.runtimes import RUNTIMES, Runtime


@dataclass(frozen=True, kw_only=True)
class RuntimeCost:
    """What a runtime makes of a latent of some rank and rotary width.

    Args:
        runtime: its name.
        elements: that it would cache per token and layer; None where it cannot take the widths.
        kept: their share of the original's.
        advice: what to do about it, in words; empty where there is nothing.
    """

    runtime: str
    elements: int | None
    kept: float | None
    advice: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def runtime_costs(kv_lora_rank: int, qk_rope_head_dim: int, original_elements: int) -> tuple[RuntimeCost, ...]:
    """The costs in every runtime of a latent, beside an original with `original_elements` per token and layer."""
    return tuple(_cost(runtime, kv_lora_rank, qk_rope_head_dim, original_elements) for runtime in RUNTIMES.values())


def _cost(runtime: Runtime, rank: int, rope: int, original: int) -> RuntimeCost:
    widths = runtime.fitting(rank, rope)
    rank_there, rope_there = widths or max(runtime.widths, key=sum)
    flags = f"--kv-lora-rank {rank_there} --qk-rope-head-dim {rope_there}"
    elements = rank_there + rope_there
    if elements >= original:
        advice = f"nothing gained: the original has {original}"
    elif widths is None:
        advice = f"too wide; {flags} fits"
    elif elements > rank + rope:
        advice = f"padded with zeros; {flags} is better at no cost"
    elif rank % runtime.step or elements % runtime.step:
        advice = f"slow on CPUs, unless the latent and the sum are multiples of {runtime.step}"
    else:
        advice = ""
    there = widths is not None
    return RuntimeCost(
        runtime=runtime.name,
        elements=elements if there else None,
        kept=elements / original if there else None,
        advice=advice,
    )

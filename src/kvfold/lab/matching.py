"""Shapes of equal size: one number of each variant is solved so that its parameters agree with a reference's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvfold.errors import OptionError
from kvfold.lab.architecture import Architecture
from kvfold.registry import lookup

TP_DEGREES = (1, 2, 4, 8)
BF16_BYTES = 2
SOLVED: dict[str, int] = {"intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
"""What can be solved for, with the step that it is rounded to."""
MOST = 1024
"""Heads or layers, at most."""
TOLERANCE = 0.005
"""Of the parameters, by default."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A variant beside the reference; `error` is the share of the reference's parameters that it has more."""

    name: str
    architecture: Architecture
    error: float

    def to_dict(self, context: int) -> dict[str, Any]:
        """Costs of the whole model: bytes in bf16 of one token, FLOPs of one token's forward pass at `context`."""
        shape, spec = self.architecture, self.architecture.spec()
        elements = [spec.cached_elements_per_device(degree) * shape.num_hidden_layers for degree in TP_DEGREES]
        return {
            "name": self.name,
            "attention": spec.name,
            "num_attention_heads": shape.num_attention_heads,
            "num_hidden_layers": shape.num_hidden_layers,
            "intermediate_size": shape.intermediate_size,
            "parameters": shape.parameters(),
            "error": self.error,
            "flops_per_token": shape.flops_per_token(context),
            "cache_bytes_per_device": {
                str(degree): BF16_BYTES * count for degree, count in zip(TP_DEGREES, elements, strict=True)
            },
            "decode_intensity": decode_intensity(shape, context),
            "architecture": shape.to_dict(),
        }


def match(
    reference: Architecture,
    variants: Mapping[str, Architecture],
    *,
    solve: str = "intermediate_size",
    multiple_of: int | None = None,
    tolerance: float = TOLERANCE,
) -> list[Match]:
    """Change `solve` of each variant so that its parameters come as near as they can to those of `reference`.

    Args:
        solve: `intermediate_size`, `num_attention_heads` or `num_hidden_layers`.
        multiple_of: what the result is a multiple of (default: 8 for the width, else 1).
        tolerance: share of the reference's parameters that a variant may be off.

    Raises:
        OptionError: a variant cannot be matched; the message says how far off it would be.
        UnknownNameError: `solve` is none of the three.
    """
    step = lookup(SOLVED, solve, "number to solve for") if multiple_of is None else multiple_of
    if type(step) is not int or step < 1:
        raise OptionError(f"multiple_of must be a whole number of 1 or more, got {step!r}.")
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise OptionError(f"tolerance must be a number between 0 and 1, got {tolerance!r}.")
    goal, found = reference.parameters(), []
    for name, variant in variants.items():
        best = solved(variant, goal, solve, step)
        error = best.parameters() / goal - 1
        if abs(error) > tolerance:
            raise OptionError(
                f"{name} cannot be matched by {solve}: the nearest, {getattr(best, solve):,}, is {error:+.2%} off "
                f"({best.parameters():,} for {goal:,} parameters); solve for another number or raise tolerance."
            )
        found.append(Match(name=name, architecture=best, error=error))
    return found


def solved(variant: Architecture, goal: int, solve: str, step: int) -> Architecture:
    """`variant` with the multiple of `step` that brings its parameters nearest to `goal`.

    Raises:
        OptionError: it allows none; head counts must divide.
    """
    if solve == "intermediate_size":
        unit = 3 * variant.hidden_size * variant.num_hidden_layers  # SwiGLU has three matrices
        exact = variant.intermediate_size + (goal - variant.parameters()) / unit
        below = max(int(exact // step), 1)
        sizes = [step * below, step * (below + 1)]
    else:
        sizes = list(range(step, MOST + 1, step))
    candidates = [built for size in sizes if (built := _allowed(variant, solve, size)) is not None]
    if not candidates:
        raise OptionError(f"{variant.attention} attention allows no {solve} that is a multiple of {step}.")
    return min(candidates, key=lambda built: (abs(built.parameters() - goal), getattr(built, solve)))


def decode_intensity(shape: Architecture, context: int) -> float:
    """FLOPs per byte read from the cache when one token attends to `context` cached ones, in bf16: its arithmetic
    intensity, of attention alone, by the cheaper path (arXiv 2505.21487, section 3)."""
    spec = shape.spec()
    absorbed = spec.absorbed_flops(1, context)
    flops = spec.attention_flops(1, context) if absorbed is None else absorbed
    return flops / (BF16_BYTES * spec.cached_elements() * context)


def _allowed(variant: Architecture, solve: str, size: int) -> Architecture | None:
    try:
        return replace(variant, **{solve: size})
    except OptionError:
        return None

"""The two cache layouts, and the strategies that choose which rotary components each of them keeps."""

from collections.abc import Callable
from dataclasses import dataclass

from kvfold.attention import GroupedSpec
from kvfold.convert.rotary_mixing import split_by_components
from kvfold.convert.rotary_selection import SELECTIONS, split_by_pairs
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit

Split = Callable[[LayerWeights, LayerStatistics, int], RotarySplit]


def _select(name: str) -> Split:
    def split(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> RotarySplit:
        return split_by_pairs(weights, SELECTIONS[name](weights, statistics, pairs))

    return split


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rotary keys are cached: `per_head`, one per KV head, or shared by all.

    `calibrated` names the strategies whose choice depends on calibration text, `needs_text` those that have none
    without it.
    """

    per_head: bool
    strategies: dict[str, Split]
    default: str
    calibrated: frozenset[str]
    needs_text: frozenset[str] = frozenset()

    def rotary_heads(self, spec: GroupedSpec) -> int:
        return spec.num_key_value_heads if self.per_head else 1

    def full_rope_dim(self, spec: GroupedSpec) -> int:
        """Rotary dims of one rotary head that keep every component."""
        return spec.head_dim if self.per_head else spec.num_key_value_heads * spec.head_dim

    def nope_dim(self, spec: GroupedSpec, rope_dim: int) -> int:
        """Dims of a head that are left without rotation. A shared component leaves a rest on every pair, unless all are
        kept."""
        if self.per_head:
            return spec.head_dim - rope_dim
        return 0 if rope_dim == self.full_rope_dim(spec) else spec.head_dim

    def default_rope_dim(self, spec: GroupedSpec) -> int:
        """An eighth of the components: d/16 pairs per KV head, as in arXiv 2502.14837."""
        return max(self.full_rope_dim(spec) // 16 * 2, 2)


LAYOUTS: dict[str, Layout] = {
    "shared": Layout(
        per_head=False,
        strategies={"energy": split_by_components, "full": split_by_components},
        default="energy",
        calibrated=frozenset({"energy"}),
    ),
    "per_head": Layout(
        per_head=True,
        strategies={name: _select(name) for name in SELECTIONS},
        default="2-norm",
        calibrated=frozenset({"2-norm"}),
        needs_text=frozenset({"2-norm"}),
    ),
}

"""The two cache layouts, and the strategies that choose which rotary components each of them keeps."""

from dataclasses import dataclass
from typing import Literal

from kvfold.attention import GroupedSpec
from kvfold.convert.rotary_exportable import assigned, fastest, rorope, stride
from kvfold.convert.rotary_mixing import Split, mixed, split_by
from kvfold.convert.rotary_selection import rotation_error, select_pairs
from kvfold.errors import BudgetError


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How to split a layer's keys.

    `reads` is what it needs of the calibration text: nothing, `moments`, or `attention` (the weights of the original).
    Without text, those that are not `required` to have some go by the weights alone. `single` ones keep one component
    per frequency, and `uniform` ones those of a uniform stride, so that their rotary dims must divide the head dim; the
    pairs of `fold` strides are chosen together. `reaching` ones take a `reach` and a
    `price`.
    """

    split: Split
    reads: Literal["nothing", "moments", "attention"] = "attention"
    required: bool = False
    single: bool = False
    uniform: bool = False
    fold: int = 1
    reaching: bool = False

    def has_stride(self, head_dim: int, rope_dim: int) -> bool:
        """Whether so many rotary dims are a uniform stride's, in whole folds."""
        pairs = rope_dim // 2
        return head_dim % rope_dim == 0 and pairs % min(self.fold, pairs) == 0

    def check(self, name: str, spec: GroupedSpec, rope_dim: int, full_rope_dim: int) -> None:
        """Refuse rotary dims that the strategy cannot keep. All of them it always can.

        Raises:
            BudgetError: naming the dims that it can keep.
        """
        if rope_dim == full_rope_dim:
            return
        if name == "full":
            raise BudgetError(
                f"the rope strategy 'full' keeps all {full_rope_dim} rotary dims, not {rope_dim}: give "
                f"qk_rope_head_dim {full_rope_dim} with kv_lora_rank, or another strategy."
            )
        width = spec.head_dim
        if self.single and rope_dim > width:
            raise BudgetError(f"the rope strategy {name!r} keeps at most {width} rotary dims, not {rope_dim}.")
        if self.uniform and not self.has_stride(width, rope_dim):
            fits = ", ".join(str(dim) for dim in range(2, width + 1, 2) if self.has_stride(width, dim))
            raise BudgetError(f"the rope strategy {name!r} keeps {fits} rotary dims of {width}, not {rope_dim}.")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rotary keys are cached: `per_head`, one per KV head, or shared by all."""

    per_head: bool
    strategies: dict[str, Strategy]
    default: str

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

    def default_rope_dim(self, spec: GroupedSpec, kept: int) -> int:
        """Rotary dims of one head where `kept` elements are kept in all: d/16 pairs per KV head, as in arXiv
        2502.14837; a shared head takes the share that was measured to be best."""
        if self.per_head:
            return max(spec.head_dim // 8, 2)
        return round(SHARED_ROTARY_SHARE * kept / 2) * 2


SHARED_ROTARY_SHARE = 0.25

LAYOUTS: dict[str, Layout] = {
    "shared": Layout(
        per_head=False,
        strategies={
            "mixed": Strategy(split=split_by(mixed), reaching=True),
            "assigned": Strategy(split=split_by(assigned), single=True, uniform=True, reaching=True),
            "stride": Strategy(split=split_by(stride), single=True, uniform=True),
            "fastest": Strategy(split=split_by(fastest), single=True),
            "rorope": Strategy(split=rorope(fold=1), reads="moments", single=True, uniform=True),
            "rorope-2": Strategy(split=rorope(fold=2), reads="moments", single=True, uniform=True, fold=2),
            "rorope-4": Strategy(split=rorope(fold=4), reads="moments", single=True, uniform=True, fold=4),
            "full": Strategy(split=split_by(mixed), reads="nothing"),
        },
        default="mixed",
    ),
    "per_head": Layout(
        per_head=True,
        strategies={
            "rotation_error": Strategy(split=rotation_error, required=True),
            "2-norm": Strategy(split=select_pairs("2-norm"), reads="moments", required=True),
            "high": Strategy(split=select_pairs("high"), reads="nothing"),
            "low": Strategy(split=select_pairs("low"), reads="nothing"),
            "uniform": Strategy(split=select_pairs("uniform"), reads="nothing"),
            "full": Strategy(split=select_pairs("full"), reads="nothing"),
        },
        default="rotation_error",
    ),
}

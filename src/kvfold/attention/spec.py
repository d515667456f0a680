"""What an attention is, as numbers: frozen specs that know their parameters, cached elements and FLOPs.

Letters used throughout this package (shape suffixes of tensor names follow them):
    B batch   T new tokens   S cached tokens, the new ones included   D model width (`hidden_size`)
    N query heads   G key/value heads   H latent heads   R rank of one latent head   P rotary pairs of the base model
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from kvfold.attention.checking import check_field
from kvfold.errors import OptionError

Path = Literal["expanded", "absorbed"]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(ABC):
    """What every variant has: model width, query heads, and the costs derived from its shape.

    Elements are numbers cached per token and layer (times two for bf16 bytes); parameters count biases and norms;
    FLOPs are two per multiply-add of the matrix products, softmax and elementwise work left out.
    """

    kind: ClassVar[str]

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    query_bias: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            minimum = self._minimum(field.name)
            check_field(self.kind, field.name, field.type, getattr(self, field.name), minimum)
        self._must_divide("num_key_value_heads", "num_attention_heads")
        self._validate()

    def _minimum(self, name: str) -> int:
        return 1

    def _validate(self) -> None:
        """Raise `OptionError` on shapes that the variant does not allow."""

    def _must_divide(self, divisor: str, dividend: str) -> None:
        if getattr(self, dividend) % getattr(self, divisor):
            raise OptionError(
                f"{self.kind} attention: {divisor}={getattr(self, divisor)} must divide "
                f"{dividend}={getattr(self, dividend)}."
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """The variant's usual name: MHA, GQA, MQA, GTA-g, MLA, GLA-h."""

    @property
    @abstractmethod
    def qk_head_dim(self) -> int:
        """Width of one query head and of the key it meets."""

    @property
    @abstractmethod
    def v_width(self) -> int:
        """Width of one value head."""

    @property
    @abstractmethod
    def rotary_pairs(self) -> tuple[int, int]:
        """(rotary key heads, rotary pairs per head)."""

    @abstractmethod
    def cached_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The two cached tensors of one token, each as (heads, width)."""

    @abstractmethod
    def projection_parameters(self) -> dict[str, int]:
        """Parameters of each projection and norm, the output projection left out."""

    @abstractmethod
    def expansion_flops(self, tokens: int) -> int:
        """FLOPs that make full keys and values out of `tokens` cached tokens."""

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    @property
    def query_groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def cached_elements(self) -> int:
        """Elements cached per token and layer."""
        return sum(heads * width for heads, width in self.cached_shapes())

    def cached_elements_per_device(self, tp_degree: int) -> int:
        """Elements cached per token, layer and device under tensor parallelism of degree `tp_degree`.

        A cached head is the smallest unit that can be placed on one device, so a single head is replicated
        (arXiv 2505.21487, section 3).
        """
        return sum(max(-(-heads // tp_degree), 1) * width for heads, width in self.cached_shapes())

    def parameters(self) -> int:
        """Trainable parameters of one layer's attention."""
        output = self.num_attention_heads * self.v_width * self.hidden_size + self.output_bias * self.hidden_size
        return sum(self.projection_parameters().values()) + output

    @abstractmethod
    def projection_flops(self, tokens: int) -> int:
        """FLOPs of the projections of `tokens` new tokens to queries and cached tensors, and of the output."""

    def attention_flops(self, new_tokens: int, cached_tokens: int) -> int:
        """FLOPs of scores and weighted sum over full keys and values, all pairs counted."""
        width = self.qk_head_dim + self.v_width
        return 2 * new_tokens * cached_tokens * self.num_attention_heads * width

    def absorbed_flops(self, new_tokens: int, cached_tokens: int) -> int | None:
        """FLOPs of attention carried out on the cached tensors themselves; None where a variant has no such path."""
        return None

    def flops(self, new_tokens: int, cached_tokens: int, path: Path | None = None) -> int:
        """FLOPs of one layer for `new_tokens` queries over `cached_tokens` tokens (the new ones included), batch 1.

        `path` None takes the cheaper path, as the module does.
        """
        chosen = path or self.cheaper_path(new_tokens, cached_tokens)
        absorbed = self.absorbed_flops(new_tokens, cached_tokens)
        if chosen == "absorbed" and absorbed is not None:
            return self.projection_flops(new_tokens) + absorbed
        return (
            self.projection_flops(new_tokens)
            + self.expansion_flops(cached_tokens)
            + self.attention_flops(new_tokens, cached_tokens)
        )

    def cheaper_path(self, new_tokens: int, cached_tokens: int) -> Path:
        """Which path needs fewer FLOPs for these lengths."""
        absorbed = self.absorbed_flops(new_tokens, cached_tokens)
        if absorbed is None:
            return "expanded"
        expanded = self.expansion_flops(cached_tokens) + self.attention_flops(new_tokens, cached_tokens)
        return "absorbed" if absorbed < expanded else "expanded"

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON-able values, with its kind."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class WholeHeadSpec(AttentionSpec):
    """What grouped and tied attention share: queries, keys and values of one width d, cached ready for use."""

    head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_width(self) -> int:
        return self.head_dim

    def expansion_flops(self, tokens: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class GroupedSpec(WholeHeadSpec):
    """MHA (G = N), GQA and MQA (G = 1): cached 2 G d elements."""

    kind: ClassVar[str] = "grouped"

    key_bias: bool = False
    value_bias: bool = False

    def _validate(self) -> None:
        if self.head_dim % 2:
            raise OptionError(f"grouped attention: head_dim must be even for rotary pairs, got {self.head_dim}.")

    @property
    def rotary_pairs(self) -> tuple[int, int]:
        return 1, self.head_dim // 2

    @property
    def name(self) -> str:
        if self.num_key_value_heads == self.num_attention_heads:
            return "MHA"
        return "MQA" if self.num_key_value_heads == 1 else "GQA"

    def cached_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        head = (self.num_key_value_heads, self.head_dim)
        return head, head

    def projection_parameters(self) -> dict[str, int]:
        wide, narrow = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (self.hidden_size + self.query_bias) * wide,
            "k_proj": (self.hidden_size + self.key_bias) * narrow,
            "v_proj": (self.hidden_size + self.value_bias) * narrow,
        }

    def projection_flops(self, tokens: int) -> int:
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return 2 * tokens * self.hidden_size * heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class TiedSpec(WholeHeadSpec):
    """Grouped tied attention, GTA (arXiv 2505.21487): keys and values share a projection; cached G d + d/2 elements."""

    kind: ClassVar[str] = "tied"

    def _validate(self) -> None:
        if self.head_dim % 4:
            raise OptionError(f"tied attention: head_dim must be a multiple of 4, got {self.head_dim}.")

    @property
    def rotary_pairs(self) -> tuple[int, int]:
        return 1, self.head_dim // 4

    @property
    def name(self) -> str:
        return f"GTA-{self.num_key_value_heads}"

    def cached_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.num_key_value_heads, self.head_dim), (1, self.head_dim // 2)

    def projection_parameters(self) -> dict[str, int]:
        return {
            "q_proj": (self.hidden_size + self.query_bias) * self.num_attention_heads * self.head_dim,
            "kv_proj": self.hidden_size * self.num_key_value_heads * self.head_dim,
            "k_rope_proj": self.hidden_size * self.head_dim // 2,
        }

    def projection_flops(self, tokens: int) -> int:
        width = (2 * self.num_attention_heads + self.num_key_value_heads) * self.head_dim + self.head_dim // 2
        return 2 * tokens * self.hidden_size * width

    def absorbed_flops(self, new_tokens: int, cached_tokens: int) -> int:
        # The same products, without building the keys: preferred when few queries meet a long cache.
        return self.attention_flops(new_tokens, cached_tokens)

    def cheaper_path(self, new_tokens: int, cached_tokens: int) -> Path:
        # Building keys moves S * G * d elements, the split scores write N * T * S more: compare those.
        return "absorbed" if new_tokens * self.query_groups < self.head_dim else "expanded"


@dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """Multi-head latent attention (MLA, arXiv 2405.04434) and grouped latent attention (GLA, arXiv 2505.21487).

    One token caches `latent_heads` latents of rank `kv_lora_rank / latent_heads` and `rotary_heads` rotary keys of
    `qk_rope_head_dim` dims. `num_key_value_heads` counts the distinct keys and values that the latents expand to: N for
    MLA as published, G for a converted GQA model, whose query heads keep sharing them.

    With `branches` = b > 1 it is MLRA-b (arXiv 2603.02188): all query heads attend b times, to keys and values of b
    sets of latents, and the outputs are summed and scaled by b^-1/2.

    Layouts: `rotary_heads` = 1 is `shared` (DeepSeek's), `rotary_heads` = G `per_head` (MHA2MLA's, arXiv 2502.14837).
    """

    kind: ClassVar[str] = "latent"

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    latent_heads: int = 1
    branches: int = 1
    rotary_heads: int = 1
    q_lora_rank: int | None = None
    q_latent_heads: int = 1
    latent_norm: bool = False
    norm_eps: float = 1e-6
    latent_bias: bool = False
    rope_key_bias: bool = False
    value_bias: bool = False

    def _minimum(self, name: str) -> int:
        return {"qk_nope_head_dim": 0, "qk_rope_head_dim": 2}.get(name, 1)

    def _validate(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise OptionError(f"latent attention: qk_rope_head_dim must be even, got {self.qk_rope_head_dim}.")
        if self.rotary_heads not in (1, self.num_key_value_heads):
            raise OptionError(
                f"latent attention: rotary_heads must be 1 (shared) or num_key_value_heads={self.num_key_value_heads} "
                f"(per_head), got {self.rotary_heads}."
            )
        self._must_divide("latent_heads", "kv_lora_rank")
        self._must_divide("branches", "latent_heads")
        if self.key_heads % self.latent_heads:
            self._must_divide("latent_heads", "num_key_value_heads")
        if self.branches > 1 and self.rotary_heads > 1:
            raise OptionError(
                f"latent attention: {self.branches} branches share a rotary key, got {self.rotary_heads}."
            )
        if self.q_lora_rank is not None:
            self._must_divide("q_latent_heads", "q_lora_rank")
            self._must_divide("q_latent_heads", "num_attention_heads")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def v_width(self) -> int:
        return self.v_head_dim

    @property
    def key_heads(self) -> int:
        """Distinct keys and values, those of all branches."""
        return self.branches * self.num_key_value_heads

    @property
    def latent_rank(self) -> int:
        """Rank of one latent head."""
        return self.kv_lora_rank // self.latent_heads

    @property
    def rotary_pairs(self) -> tuple[int, int]:
        return self.rotary_heads, self.qk_rope_head_dim // 2

    @property
    def layout(self) -> str:
        """`shared` or `per_head`; with one key/value head they are the same thing, called shared."""
        return "shared" if self.rotary_heads == 1 else "per_head"

    @property
    def name(self) -> str:
        if self.branches > 1:
            return f"MLRA-{self.branches}"
        return "MLA" if self.latent_heads == 1 else f"GLA-{self.latent_heads}"

    def cached_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.latent_heads, self.latent_rank), (self.rotary_heads, self.qk_rope_head_dim)

    def projection_parameters(self) -> dict[str, int]:
        query_width = self.num_attention_heads * self.qk_head_dim
        parts = {
            "kv_a_proj": (self.hidden_size + self.latent_bias) * self.kv_lora_rank,
            "kv_a_layernorm": self.latent_norm * self.kv_lora_rank,
            "k_rope_proj": (self.hidden_size + self.rope_key_bias) * self.rotary_heads * self.qk_rope_head_dim,
            "k_b_proj": self.latent_rank * self.key_heads * self.qk_nope_head_dim,
            "v_b_proj": (self.latent_rank + self.value_bias) * self.key_heads * self.v_head_dim,
        }
        if self.q_lora_rank is None:
            return parts | {"q_proj": (self.hidden_size + self.query_bias) * query_width}
        return parts | {
            "q_a_proj": (self.hidden_size + self.latent_bias) * self.q_lora_rank,
            "q_a_layernorm": self.q_lora_rank,
            "q_b_proj": (self.q_lora_rank // self.q_latent_heads + self.query_bias) * query_width,
        }

    def projection_flops(self, tokens: int) -> int:
        query_width = self.num_attention_heads * self.qk_head_dim
        if self.q_lora_rank is None:
            query = self.hidden_size * query_width
        else:
            query = self.hidden_size * self.q_lora_rank + self.q_lora_rank // self.q_latent_heads * query_width
        cached = self.hidden_size * self.cached_elements()
        output = self.hidden_size * self.num_attention_heads * self.v_head_dim
        return 2 * tokens * (query + cached + output)

    def expansion_flops(self, tokens: int) -> int:
        return 2 * tokens * self.latent_rank * self.key_heads * (self.qk_nope_head_dim + self.v_head_dim)

    def attention_flops(self, new_tokens: int, cached_tokens: int) -> int:
        return self.branches * super().attention_flops(new_tokens, cached_tokens)

    def absorbed_flops(self, new_tokens: int, cached_tokens: int) -> int:
        # Queries into the latent space and values out of it, then scores and sum on latents and rotary keys.
        per_query = self.latent_rank * (self.qk_nope_head_dim + self.v_head_dim)
        key_rank = self.latent_rank if self.qk_nope_head_dim else 0
        per_pair = key_rank + self.latent_rank + self.qk_rope_head_dim
        return 2 * new_tokens * self.branches * self.num_attention_heads * (per_query + cached_tokens * per_pair)

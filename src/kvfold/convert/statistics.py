"""What the calibration text tells about one layer's attention input: streamed moments, nothing per token."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvfold.convert.attention_moments import AttentionMoments
from kvfold.convert.weights import LayerWeights


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Moments of the attention input x (D) of one layer, in fp64.

    `second_moment` is E[x x^T] and `mean` E[x]. `query_norm[n, l]` and `key_norm[g, l]` are the mean lengths E|q_l| and
    E|k_l| of each rotary pair before rotation; None when nothing was calibrated. `attention` is there if the method
    asks for it.
    """

    second_moment: Float[Tensor, "D D"]
    mean: Float[Tensor, " D"]
    query_norm: Float[Tensor, "N P"] | None
    key_norm: Float[Tensor, "G P"] | None
    tokens: int
    attention: AttentionMoments | None = None

    @classmethod
    def white(cls, width: int) -> "LayerStatistics":
        """Statistics of a calibration that never was: x has mean zero and unit covariance."""
        return cls(
            second_moment=torch.eye(width, dtype=torch.float64),
            mean=torch.zeros(width, dtype=torch.float64),
            query_norm=None,
            key_norm=None,
            tokens=0,
        )

    def to(self, dtype: torch.dtype) -> "LayerStatistics":
        """The same numbers in another precision."""
        attention = None if self.attention is None else self.attention.to(dtype)
        return replace(self, second_moment=self.second_moment.to(dtype), mean=self.mean.to(dtype), attention=attention)

    def output_moment(
        self, weight: Float[Tensor, "o D"], bias: Float[Tensor, " o"] | None = None
    ) -> Float[Tensor, "o o"]:
        """E[y y^T] of y = W x + b."""
        moment = weight @ self.second_moment @ weight.T
        if bias is not None:
            cross = torch.outer(weight @ self.mean, bias)
            moment = moment + cross + cross.T + torch.outer(bias, bias)
        return moment

    def head_moments(
        self, weight: Float[Tensor, "h w D"], bias: Float[Tensor, "h w"] | None = None
    ) -> Float[Tensor, "h w w"]:
        """E[y_h y_h^T] of every head's y_h = W_h x + b_h."""
        moment = weight @ self.second_moment @ weight.mT
        if bias is None:
            return moment
        cross = (weight @ self.mean)[:, :, None] * bias[:, None]
        return moment + cross + cross.mT + bias[:, :, None] * bias[:, None]


class StatisticsAccumulator:
    """Sums over batches; fp64 sums of fp32 products, so that the order of batches does not matter beyond rounding."""

    def __init__(self, weights: LayerWeights) -> None:
        spec = weights.spec
        pairs = spec.head_dim // 2
        self._weights = weights
        self._second = torch.zeros(spec.hidden_size, spec.hidden_size, dtype=torch.float64)
        self._sum = torch.zeros(spec.hidden_size, dtype=torch.float64)
        self._query = torch.zeros(spec.num_attention_heads, pairs, dtype=torch.float64)
        self._key = torch.zeros(spec.num_key_value_heads, pairs, dtype=torch.float64)
        self.tokens = 0

    def update(self, hidden_BTD: Float[Tensor, "B T D"]) -> None:
        """Add a batch of attention inputs."""
        x_tD = hidden_BTD.flatten(0, 1).float()
        self._second += (x_tD.T @ x_tD).double()
        self._sum += x_tD.sum(0).double()
        self._query += _pair_lengths(x_tD, self._weights.query, self._weights.query_bias).double()
        self._key += _pair_lengths(x_tD, self._weights.key, self._weights.key_bias).double()
        self.tokens += len(x_tD)

    def finish(self) -> LayerStatistics:
        """The moments of everything added so far."""
        return LayerStatistics(
            second_moment=self._second / self.tokens,
            mean=self._sum / self.tokens,
            query_norm=self._query / self.tokens,
            key_norm=self._key / self.tokens,
            tokens=self.tokens,
        )


def _pair_lengths(
    x_tD: Float[Tensor, "t D"], weight_hdD: Float[Tensor, "h d D"], bias_hd: Float[Tensor, "h d"] | None
) -> Float[Tensor, "h P"]:
    """Sum over tokens of the length of every rotary pair of every head."""
    y_thd = (x_tD @ weight_hdD.flatten(0, 1).float().T).unflatten(1, weight_hdD.shape[:2])
    if bias_hd is not None:
        y_thd = y_thd + bias_hd.float()
    real, imaginary = y_thd.chunk(2, dim=-1)
    return torch.hypot(real, imaginary).sum(0)

"""Run the original model over calibration text one layer at a time, on stored hidden states.

Only one layer's weights are in memory at once, so its widest layer sets how large a model can be calibrated.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvfold.attention import Attention
from kvfold.checkpoint import Checkpoint
from kvfold.convert.statistics import LayerStatistics, StatisticsAccumulator
from kvfold.convert.weights import LayerWeights
from kvfold.families import Family
from kvfold.texts import check_vocabulary

BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class AttentionSample:
    """Inputs and output of one layer's attention on a few windows, to compare a converted layer with."""

    hidden_states: Float[Tensor, "B T D"]
    position_embeddings: tuple[Tensor, Tensor]
    attention_mask: Tensor | None
    output: Float[Tensor, "B T D"]

    def relative_error(self, attention: Attention) -> float:
        """`|converted - original|^2 / |original|^2` of the attention output."""
        with torch.no_grad():
            output, _ = attention(self.hidden_states, self.position_embeddings, self.attention_mask)
        energy = self.output.square().sum().clamp_min(torch.finfo(torch.float32).tiny)  # a pruned layer's is zero
        return float((output - self.output).square().sum() / energy)


class LayerRunner:
    """The original model as a sequence of layers that are loaded, run and dropped.

    Args:
        ids: token windows (W, T).
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, ids: Int[Tensor, "W T"]) -> None:
        self._checkpoint, self._family = checkpoint, family
        config = checkpoint.config
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        check_vocabulary(ids, config.vocab_size)
        embedding = checkpoint.read(f"{family.embedding}.weight")
        self._hidden = nn.functional.embedding(ids, embedding).float()
        self._windows = family.sliding_windows(config)
        positions = torch.arange(ids.shape[1])[None]
        self._rotary = rotary_embedding(config, family)
        self._position_ids = positions
        self._position_embeddings = self._rotary(self._hidden[:1], positions)

    @torch.no_grad()
    def run_layer(self, index: int, weights: LayerWeights) -> tuple[LayerStatistics, AttentionSample]:
        """Advance all hidden states through layer `index`, and return what its attention saw."""
        layer = self._load(index)
        accumulator = StatisticsAccumulator(weights)
        samples: list[AttentionSample] = []
        mask = self._mask(self._windows[index])

        def watch(module: nn.Module, args: tuple, kwargs: dict, output: tuple[Tensor, Tensor | None]) -> None:
            accumulator.update(kwargs["hidden_states"])
            if not samples:
                samples.append(
                    AttentionSample(
                        hidden_states=kwargs["hidden_states"],
                        position_embeddings=self._position_embeddings,
                        attention_mask=mask,
                        output=output[0],
                    )
                )

        handle = layer.get_submodule(self._family.attention).register_forward_hook(watch, with_kwargs=True)
        batch = max(BATCH_TOKENS // self._hidden.shape[1], 1)
        for part in self._hidden.split(batch):
            part.copy_(
                layer(
                    part,
                    attention_mask=mask,
                    position_ids=self._position_ids,
                    position_embeddings=self._position_embeddings,
                )
            )
        handle.remove()
        layer.to("meta")
        return accumulator.finish(), samples[0]

    def _load(self, index: int) -> nn.Module:
        prefix = f"{self._family.layers}.{index}."
        layer = self._model.get_submodule(prefix.rstrip("."))
        state = {name: self._checkpoint.read(f"{prefix}{name}").float() for name in layer.state_dict()}
        layer.load_state_dict(state, assign=True)
        return layer

    def _mask(self, window: int | None) -> Tensor | None:
        length = self._hidden.shape[1]
        if window is None or window >= length:
            return None
        distance = torch.arange(length)[:, None] - torch.arange(length)
        return ((distance >= 0) & (distance < window))[None, None]


def rotary_embedding(config: PreTrainedConfig, family: Family) -> Any:
    """The base model's own module that makes `cos, sin`, on the CPU, rope scaling included."""
    with torch.device("meta"):
        rotary = AutoModelForCausalLM.from_config(config).get_submodule(family.rotary)
    return type(rotary)(config=config)

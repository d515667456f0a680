"""Run the original model over calibration text one layer at a time, on stored hidden states.

Only one layer's weights are in memory at once, so its widest layer sets how large a model can be calibrated.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvfold.attention import Attention
from kvfold.checkpoint import Checkpoint
from kvfold.convert.attention_moments import AttentionMomentsAccumulator
from kvfold.convert.statistics import LayerStatistics, StatisticsAccumulator
from kvfold.convert.weights import LayerWeights
from kvfold.families import Family
from kvfold.texts import check_vocabulary

BATCH_TOKENS = 2048
ATTENTION_TOKENS = 16384
"""Whose attention is measured, at most: that takes longer than all else, and more tell little more."""
DRIFT_SHARE = 0.5
"""Of what the residual stream has lost so far, that a layer is asked to make up for; measured."""
READ_OUT_TOKENS = 256
"""Whose logits are held at once."""
ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True)
class AttentionSample:
    """Inputs of one layer's attention on some windows, and what a converted layer should answer."""

    inputs: Float[Tensor, "W T D"]
    target: Float[Tensor, "W T D"]
    position_embeddings: tuple[Tensor, Tensor]
    attention_mask: Tensor | None

    def error(self, attention: Attention) -> Float[Tensor, ""]:
        """`|attention(inputs) - target|^2 / |target|^2`."""
        output, _ = attention(self.inputs, self.position_embeddings, self.attention_mask)
        energy = self.target.square().sum().clamp_min(torch.finfo(torch.float32).tiny)  # a pruned layer's is zero
        return (output - self.target).square().sum() / energy

    @torch.no_grad()
    def relative_error(self, attention: Attention) -> float:
        """The same, as a number."""
        return float(self.error(attention))

    def part(self, windows: slice | list[int]) -> "AttentionSample":
        return replace(self, inputs=self.inputs[windows], target=self.target[windows])

    def batches(self) -> "list[AttentionSample]":
        """All of it, a few windows at a time."""
        size = windows_per_batch(self.inputs)
        return [self.part(slice(start, start + size)) for start in range(0, len(self.inputs), size)]


def windows_per_batch(hidden: Float[Tensor, "W T D"]) -> int:
    return max(BATCH_TOKENS // hidden.shape[1], 1)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one layer showed: statistics of the original's, and a sample of it to measure errors on.

    `fit` is what the converted layer is to be fitted to: its inputs on the converted prefix, and as target the
    original's attention output on the original's inputs, plus half of what the residual stream has lost so far. A layer
    that meets it puts the stream back half of the way to where the original's is.
    """

    statistics: LayerStatistics
    sample: AttentionSample
    fit: AttentionSample | None


class LayerRunner:
    """The original model as a sequence of layers that are loaded, run and dropped.

    It carries the hidden states of the original and, with `follow`, those of the converted model so far; and on a few
    windows of other text those of the original and of the model after each stage, to say what a stage cost.

    Args:
        ids: token windows (W, T).
        probe_ids: windows that nothing is fitted to (V, T).
        stages: what `probe` will be called with in every layer.
        attention: whether statistics need the original's attention weights.
        follow: whether the converted layers are to be run too.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        ids: Int[Tensor, "W T"],
        probe_ids: Int[Tensor, "V T"],
        *,
        stages: tuple[str, ...],
        attention: bool,
        follow: bool,
    ) -> None:
        self._checkpoint, self._family, self._attention = checkpoint, family, attention
        config = checkpoint.config
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        check_vocabulary(ids, config.vocab_size)
        self._probe_ids = probe_ids
        embedding = checkpoint.read(f"{family.embedding}.weight")
        self._hidden = nn.functional.embedding(ids, embedding).float()
        self._followed = self._hidden.clone() if follow else None
        self._probes = dict.fromkeys((ORIGINAL, *stages), nn.functional.embedding(probe_ids, embedding).float())
        self._branches: list[Tensor] = []
        self._windows = family.sliding_windows(config)
        self._position_ids = torch.arange(ids.shape[1])[None]
        self._position_embeddings = rotary_embedding(config, family)(self._hidden[:1], self._position_ids)

    @property
    def state(self) -> dict[str, Tensor]:
        """All that the layers to come depend on."""
        followed = {} if self._followed is None else {"followed": self._followed}
        return {"hidden": self._hidden} | followed | {f"probe {stage}": x for stage, x in self._probes.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state that was saved."""
        self._hidden, self._followed = state["hidden"], state.get("followed")
        self._probes = {stage: state[f"probe {stage}"] for stage in self._probes}

    @torch.no_grad()
    def run_layer(self, index: int, weights: LayerWeights) -> Observation:
        """Advance the original's hidden states through layer `index`, and return what its attention saw."""
        layer, mask = self._load(index), self._mask(self._windows[index])
        moments = StatisticsAccumulator(weights)
        cos, sin = (table[0] for table in self._position_embeddings)
        attention = (
            AttentionMomentsAccumulator(weights, cos, sin, None if mask is None else mask[0, 0])
            if self._attention
            else None
        )
        samples: list[AttentionSample] = []
        answers: list[Tensor] = []

        def watch(module: nn.Module, args: tuple, kwargs: dict, output: tuple[Tensor, Tensor | None]) -> None:
            if attention is not None and moments.tokens < ATTENTION_TOKENS:
                attention.update(kwargs["hidden_states"])
            moments.update(kwargs["hidden_states"])
            if not samples:
                samples.append(
                    AttentionSample(
                        inputs=kwargs["hidden_states"],
                        target=output[0],
                        position_embeddings=self._position_embeddings,
                        attention_mask=mask,
                    )
                )
            if self._followed is not None:
                answers.append(output[0])

        before = self._hidden
        with _hooked(layer.get_submodule(self._family.attention), watch):
            self._hidden = self._through(layer, before, mask)
        self._branches = [self._through(layer, hidden, mask) for hidden in self._branches]
        self._branch_point = self._probes[ORIGINAL]
        self._probes[ORIGINAL] = self._through(layer, self._probes[ORIGINAL], mask)
        statistics = replace(moments.finish(), attention=None if attention is None else attention.finish())
        fit = None
        if self._followed is not None:
            fit = self._fit_data(layer, torch.cat(answers).add_(before - self._followed, alpha=DRIFT_SHARE), mask)
        self._layer = layer
        return Observation(statistics=statistics, sample=samples[0], fit=fit)

    @torch.no_grad()
    def follow(self, index: int, attention: Attention) -> None:
        """Advance the converted model's hidden states through layer `index` with its new attention."""
        assert self._followed is not None
        setattr(self._layer, self._family.attention, attention)
        self._followed = self._through(self._layer, self._followed, self._mask(self._windows[index]))

    @torch.no_grad()
    def probe(self, index: int, stage: str, attention: Attention) -> None:
        """Advance the probe windows of a stage through layer `index` with the attention it has then."""
        setattr(self._layer, self._family.attention, attention)
        self._probes[stage] = self._through(self._layer, self._probes[stage], self._mask(self._windows[index]))

    @torch.no_grad()
    def branch(self, index: int, attention: Attention) -> None:
        """Begin to follow the original with only the attention of layer `index`, the last that was run, replaced."""
        setattr(self._layer, self._family.attention, attention)
        self._branches.append(self._through(self._layer, self._branch_point, self._mask(self._windows[index])))

    @torch.no_grad()
    def branch_divergences(self) -> list[float]:
        """KL divergence in nats per token from the original's predictions to those of every branch."""
        norm, head = self._read_out()
        original = self._probes[ORIGINAL].flatten(0, 1).split(READ_OUT_TOKENS)
        expected = [(norm(part) @ head.T).log_softmax(-1) for part in original]
        result: list[float] = []
        for hidden in self._branches:
            total = 0.0
            for log_p, part in zip(expected, hidden.flatten(0, 1).split(READ_OUT_TOKENS), strict=True):
                log_q = (norm(part) @ head.T).log_softmax(-1)
                total += float((log_p.exp() * (log_p - log_q)).sum())
            result.append(total / self._probe_ids.numel())
        return result

    @torch.no_grad()
    def probe_losses(self) -> dict[str, float]:
        """Nats per token on the probe windows, of the original and of the model after each stage."""
        norm, head = self._read_out()
        targets = self._probe_ids[:, 1:].flatten()
        losses: dict[str, float] = {}
        for stage, hidden in self._probes.items():
            normed = norm(hidden[:, :-1]).flatten(0, 1)
            parts = zip(normed.split(READ_OUT_TOKENS), targets.split(READ_OUT_TOKENS), strict=True)
            total = sum(float(nn.functional.cross_entropy(x @ head.T, y, reduction="sum")) for x, y in parts)
            losses[stage] = total / len(targets)
        return losses

    def _read_out(self) -> tuple[nn.Module, Float[Tensor, "vocabulary D"]]:
        """The final norm, and the weight of the head."""
        names = self._checkpoint.names()
        head = f"{self._family.head}.weight"
        weight = self._checkpoint.read(head if head in names else f"{self._family.embedding}.weight").float()
        norm = self._model.get_submodule(self._family.norm)
        norm.load_state_dict({"weight": self._checkpoint.read(f"{self._family.norm}.weight").float()}, assign=True)
        return norm, weight

    def drop_layer(self) -> None:
        """Free the weights of the layer that was run last."""
        self._layer.to("meta")

    def _fit_data(self, layer: nn.Module, target: Tensor, mask: Tensor | None) -> AttentionSample:
        """The target beside the inputs of the layer's attention on the converted prefix."""
        assert self._followed is not None
        seen: list[Tensor] = []

        def watch(module: nn.Module, args: tuple, kwargs: dict) -> None:
            seen.append(kwargs["hidden_states"])
            raise _Seen

        handle = layer.get_submodule(self._family.attention).register_forward_pre_hook(watch, with_kwargs=True)
        for part in self._batches(self._followed):
            with contextlib.suppress(_Seen):
                self._call(layer, part, mask)
        handle.remove()
        return AttentionSample(
            inputs=torch.cat(seen),
            target=target,
            position_embeddings=self._position_embeddings,
            attention_mask=mask,
        )

    def _through(self, layer: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return torch.cat([self._call(layer, part, mask) for part in self._batches(hidden)])

    def _call(self, layer: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return layer(
            hidden,
            attention_mask=mask,
            position_ids=self._position_ids,
            position_embeddings=self._position_embeddings,
        )

    def _batches(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return hidden.split(windows_per_batch(hidden))

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


class _Seen(Exception):  # noqa: N818 - not an error: it ends a forward pass whose inputs are all that is wanted
    pass


@contextlib.contextmanager
def _hooked(module: nn.Module, hook: Callable) -> Iterator[None]:
    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def rotary_embedding(config: PreTrainedConfig, family: Family) -> Any:
    """The base model's own module that makes `cos, sin`, on the CPU, rope scaling included."""
    with torch.device("meta"):
        rotary = AutoModelForCausalLM.from_config(config).get_submodule(family.rotary)
    return type(rotary)(config=config)

"""Convert one layer after another: split, fold, fit, and measure each stage."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.attention import Attention, LatentSpec, LayerContext, build_attention
from kvfold.checkpoint import Checkpoint
from kvfold.convert.assemble import exact_layer, fold_layer
from kvfold.convert.calibration import AttentionSample, LayerRunner, Observation, rotary_embedding
from kvfold.convert.factorize import BALANCED, BALANCES
from kvfold.convert.options import ConvertOptions
from kvfold.convert.plan import Plan
from kvfold.convert.polish import polish, steps_within
from kvfold.convert.refit import refit_output
from kvfold.convert.rotary_mixing import TRIALS
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit, read_layer
from kvfold.families import Family, head_dim

SEARCH_WIDTH = 2048
"""In wider models one factorisation takes as long as all others of a narrow one: there the usual balance is taken."""
ROTARY, LOW_RANK, REFIT, POLISH = "rotary", "low rank", "refit", "polish"


def stages_of(options: ConvertOptions) -> tuple[str, ...]:
    """The stages of a conversion, in order."""
    return (ROTARY, LOW_RANK) + (REFIT,) * options.follows + (POLISH,) * options.polishes


@dataclass(frozen=True, kw_only=True)
class ConvertedLayer:
    """One layer's new tensors, and per stage the relative squared error of its attention output: on calibration text
    and the original's inputs; for refit and polish against the target on the converted prefix."""

    tensors: dict[str, Tensor]
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A layer of the original, and what it becomes in one shot."""

    weights: LayerWeights
    statistics: LayerStatistics
    split: RotarySplit
    tensors: dict[str, Tensor]
    attention: Attention
    errors: dict[str, float]
    fit: AttentionSample | None


class LayerConverter:
    """Converts the layers of one checkpoint in order. `seconds` is the time of each stage so far."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        plan: Plan,
        options: ConvertOptions,
        runner: LayerRunner | None,
        polish_steps: int | None = None,
    ) -> None:
        self._checkpoint, self._family, self._plan = checkpoint, family, plan
        self._options, self._runner = options, runner
        self._rotary = rotary_embedding(checkpoint.config, family)
        self.polish_steps = options.polish_steps if polish_steps is None else polish_steps
        self.seconds: dict[str, float] = dict.fromkeys(("read", "calibrate", "fold", REFIT, POLISH, "write"), 0.0)

    def convert(self, index: int) -> ConvertedLayer:
        if self._runner is None:
            return self._by_weights_alone(index)
        trial = self.try_layer(index)
        tensors, errors = trial.tensors, trial.errors
        if trial.fit is not None:
            errors = errors | self._fit(index, trial.attention, trial.fit)
            fitted = trial.attention.state_dict()
            tensors = {name: fitted[name] for name in tensors}
        self._runner.drop_layer()
        return ConvertedLayer(tensors=tensors, errors=errors)

    def try_layer(self, index: int) -> Trial:
        """Run a layer of the original over the calibration text, and fold it in one shot."""
        assert self._runner is not None
        layer = self._plan.layers[index]
        weights = self._read(index)
        seen = self._timed("calibrate", self._runner.run_layer, index, weights)
        statistics = seen.statistics.to(weights.query.dtype)
        split = self._timed("fold", self._split_best, index, weights, statistics, layer.target, seen)
        rotary = self._build(index, *exact_layer(weights, split, layer.target))
        errors = {ROTARY: self._timed("calibrate", self._probe, index, ROTARY, rotary, seen)}
        tensors = self._timed("fold", self._fold_best, index, weights, split, statistics, layer.target, seen)
        attention = self._build(index, layer.target, tensors)
        errors[LOW_RANK] = self._timed("calibrate", self._probe, index, LOW_RANK, attention, seen)
        return Trial(
            weights=weights,
            statistics=statistics,
            split=split,
            tensors=tensors,
            attention=attention,
            errors=errors,
            fit=seen.fit,
        )

    def _by_weights_alone(self, index: int) -> ConvertedLayer:
        layer, weights = self._plan.layers[index], self._read(index)
        white = LayerStatistics.white(layer.source.hidden_size).to(weights.query.dtype)
        split = self._split(weights, white, layer.target)
        return ConvertedLayer(tensors=self._timed("fold", self._fold, weights, split, white, layer.target))

    def _read(self, index: int) -> LayerWeights:
        source = self._plan.layers[index].source
        return self._timed("read", read_layer, self._checkpoint, self._family, source, index, self._rotary)

    def _split(
        self, weights: LayerWeights, statistics: LayerStatistics, target: LatentSpec, **choices: int | float
    ) -> RotarySplit:
        return self._options.strategy.split(weights, statistics, target.qk_rope_head_dim // 2, **choices)

    def _split_best(
        self, index: int, weights: LayerWeights, statistics: LayerStatistics, target: LatentSpec, seen: Observation
    ) -> RotarySplit:
        """The reach to other frequencies with the least error of attention on the sample, where there is a choice."""
        if not self._options.strategy.reaching or target.hidden_size > SEARCH_WIDTH:
            return self._split(weights, statistics, target)

        def error(split: RotarySplit) -> float:
            return seen.sample.relative_error(self._build(index, *exact_layer(weights, split, target)))

        return min((self._split(weights, statistics, target, **choices) for choices in TRIALS), key=error)

    def _fold(
        self,
        weights: LayerWeights,
        split: RotarySplit,
        statistics: LayerStatistics,
        target: LatentSpec,
        **choices: int | float,
    ) -> dict[str, Tensor]:
        return fold_layer(weights, split, statistics, target, self._plan.factorize, **choices)

    def _fold_best(
        self,
        index: int,
        weights: LayerWeights,
        split: RotarySplit,
        statistics: LayerStatistics,
        target: LatentSpec,
        seen: Observation,
    ) -> dict[str, Tensor]:
        """The balance of keys and values with the least error of attention on the sample, where there is one."""
        if self._plan.factorize not in BALANCED or target.hidden_size > SEARCH_WIDTH:
            return self._fold(weights, split, statistics, target)
        trials = [self._fold(weights, split, statistics, target, balance=balance) for balance in BALANCES]
        return min(trials, key=lambda tensors: seen.sample.relative_error(self._build(index, target, tensors)))

    def _probe(self, index: int, stage: str, attention: Attention, seen: Observation) -> float:
        assert self._runner is not None
        self._runner.probe(index, stage, attention)
        return seen.sample.relative_error(attention)

    def _fit(self, index: int, attention: Attention, data: AttentionSample) -> dict[str, float]:
        """Refit and polish in place, then run the converted prefix through the result."""
        assert self._runner is not None
        some = data.batches()[0]
        self._timed(REFIT, refit_output, attention, data)
        errors = {REFIT: self._timed("calibrate", some.relative_error, attention)}
        self._timed("calibrate", self._runner.probe, index, REFIT, attention)
        if self._options.polishes:
            if not self.polish_steps:
                seconds = 60 * self._options.polish_minutes / len(self._plan.layers)
                self.polish_steps = steps_within(seconds, copy.deepcopy(attention), data)
            seed = self._options.seed + index
            self._timed(POLISH, polish, attention, data, steps=self.polish_steps, seed=seed)
            errors[POLISH] = self._timed("calibrate", some.relative_error, attention)
            self._timed("calibrate", self._runner.probe, index, POLISH, attention)
        self._timed(POLISH if self._options.polishes else REFIT, self._runner.follow, index, attention)
        return errors

    def _build(self, index: int, spec: LatentSpec, tensors: dict[str, Tensor]) -> Attention:
        config = self._checkpoint.config
        context = LayerContext(config=config, layer_idx=index, base_pairs=head_dim(config) // 2)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            attention = build_attention(spec, context).eval()
        state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        attention.load_state_dict(state, assign=True)
        return attention.requires_grad_(False)

    def _timed(self, stage: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[stage] += time.perf_counter() - start
        return result

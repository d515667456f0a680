"""Convert a checkpoint: plan, then fold layer after layer into a temporary folder, then name it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.attention import LatentSpec, LayerContext, build_attention
from kvfold.checkpoint import Checkpoint, OutputFolder, is_finite, open_checkpoint, resolve_model
from kvfold.convert.assemble import fold_layer
from kvfold.convert.calibration import AttentionSample, LayerRunner, rotary_embedding
from kvfold.convert.card import write_description
from kvfold.convert.options import ConvertOptions
from kvfold.convert.plan import Plan, make_plan, needs_text
from kvfold.convert.sources import calibration_ids
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import expected_shapes, read_layer
from kvfold.errors import OptionError
from kvfold.families import Family, check_tensors, family_of, head_dim

Progress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    """No progress display."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A finished conversion.

    `attention_errors` holds per layer the relative squared error of the attention output on calibration text, on the
    original's inputs; empty when nothing was calibrated. `seconds` is per stage.
    """

    out: Path
    plan: Plan
    options: ConvertOptions
    attention_errors: tuple[float, ...]
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "plan": self.plan.to_dict(),
            "options": self.options.to_dict(),
            "attention_errors": list(self.attention_errors),
            "seconds": self.seconds,
        }


def plan(model: str | Path, **options: Any) -> Plan:
    """What converting `model` with these options (see `ConvertOptions`) would do. Reads no weights.

    Raises:
        KvfoldError: the model, an option or the budget does not work; the message says which and why.
    """
    return _prepare(open_checkpoint(model), ConvertOptions.from_dict(options))[1]


def convert(
    model: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress = _silent,
    **options: Any,
) -> Conversion:
    """Convert `model` (a folder, a GGUF file, a hub id or `smollm2`) and write the result to the folder `out`.

    Weights are read and written tensor by tensor, calibration runs layer by layer, so one layer is in memory at a time.
    `out` appears whole or not at all.

    Args:
        overwrite: replace an existing `out`.
        progress: called with (stage, done, total).
        options: fields of `ConvertOptions`.

    Raises:
        KvfoldError: the model, an option, the text or the output does not work; the message says which and why.
    """
    chosen = ConvertOptions.from_dict(options)
    # The output comes first: a place that cannot be written is known at once, reading a model takes a while.
    with OutputFolder(Path(out), source=resolve_model(str(model)), overwrite=overwrite) as folder:
        checkpoint = open_checkpoint(model)
        family, what = _prepare(checkpoint, chosen)
        tokenizer = checkpoint.load_tokenizer()
        runner = None
        if needs_text(chosen):
            ids = calibration_ids(checkpoint.path, tokenizer, chosen, progress)
            runner = LayerRunner(checkpoint, family, ids)
        worker = _Folder(checkpoint, family, what, runner, folder)
        for index in range(len(what.layers)):
            worker.convert_layer(index)
            progress("folding layers", index + 1, len(what.layers))
        worker.copy_rest(progress)
        conversion = Conversion(
            out=Path(out),
            plan=what,
            options=chosen,
            attention_errors=tuple(worker.errors),
            seconds={stage: round(value, 3) for stage, value in worker.seconds.items()},
        )
        write_description(folder.path, checkpoint, what, chosen, conversion.to_dict())
        tokenizer.save_pretrained(folder.path)
    return conversion


def _prepare(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Family, Plan]:
    """Everything that can be refused before a weight is read."""
    family = family_of(checkpoint.config)
    check_tensors(family, checkpoint.names())
    what = make_plan(checkpoint.source, checkpoint.config, family, checkpoint.dtype, options)
    checkpoint.check_complete()
    return family, what


class _Folder:
    """Converts the layers of one checkpoint into an output folder, and keeps the time of each stage."""

    def __init__(
        self, checkpoint: Checkpoint, family: Family, plan: Plan, runner: LayerRunner | None, out: OutputFolder
    ) -> None:
        self._checkpoint, self._family, self._plan, self._runner, self._out = checkpoint, family, plan, runner, out
        self._written: set[str] = set()
        self._rope_gain = rotary_embedding(checkpoint.config, family).attention_scaling ** 2
        self.errors: list[float] = []
        self.seconds: dict[str, float] = dict.fromkeys(("read", "calibrate", "fold", "write"), 0.0)

    def convert_layer(self, index: int) -> None:
        layer = self._plan.layers[index]
        weights = self._timed("read", read_layer, self._checkpoint, self._family, layer.source, index, self._rope_gain)
        statistics, sample = LayerStatistics.white(layer.source.hidden_size), None
        if self._runner is not None:
            statistics, sample = self._timed("calibrate", self._runner.run_layer, index, weights)
        tensors = self._timed(
            "fold",
            fold_layer,
            weights,
            statistics,
            layer.target,
            layout=self._plan.layout,
            rope=self._plan.rope,
            factorize=self._plan.factorize,
        )
        if sample is not None:
            self.errors.append(self._timed("calibrate", self._measure, index, layer.target, tensors, sample))
        self._written |= set(expected_shapes(self._family, layer.source, index))
        for name, tensor in tensors.items():
            self._timed("write", self._add, self._family.prefix(index) + name, tensor)

    def copy_rest(self, progress: Progress) -> None:
        """Everything outside attention, unchanged but for the dtype."""
        rest = [name for name in self._checkpoint.names() if name not in self._written]
        for done, name in enumerate(rest, start=1):
            tensor = self._timed("read", self._checkpoint.read, name)
            self._timed("write", self._add, name, tensor)
            progress("copying the rest", done, len(rest))

    def _add(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            written = tensor.to(self._plan.dtype)
            if written.dtype != tensor.dtype and not is_finite(written):
                raise OptionError(
                    f"dtype {self._plan.to_dict()['dtype']} cannot hold {name}: take bfloat16 or float32."
                )
            tensor = written
        self._out.add(name, tensor)

    def _measure(self, index: int, spec: LatentSpec, tensors: dict[str, Tensor], sample: AttentionSample) -> float:
        config = self._checkpoint.config
        context = LayerContext(config=config, layer_idx=index, base_pairs=head_dim(config) // 2)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            attention = build_attention(spec, context).eval()
        state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        attention.load_state_dict(state, assign=True)
        return sample.relative_error(attention)

    def _timed(self, stage: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[stage] += time.perf_counter() - start
        return result

"""Convert a checkpoint: plan, then convert layer after layer into a temporary folder, then name it."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.checkpoint import Checkpoint, Journal, OutputFolder, is_finite, open_checkpoint, resolve_model
from kvfold.convert.calibration import LayerRunner
from kvfold.convert.card import write_description
from kvfold.convert.layers import LayerConverter, stages_of
from kvfold.convert.options import ConvertOptions
from kvfold.convert.plan import Plan, make_plan, needs_attention, needs_text
from kvfold.convert.profile import Profile, plan_per_layer, profile_model
from kvfold.convert.sources import calibration_ids
from kvfold.convert.weights import expected_shapes
from kvfold.errors import OptionError
from kvfold.families import Family, check_tensors, family_of
from kvfold.progress import Progress, silent
from kvfold.texts import EVALUATION, read_text, token_ids

STATE_STEP, PROFILE_STEP = "state", "profile"
PROFILE_TOKENS = 8192
PROBE_WINDOWS = 2
"""Windows of the shipped novel on which the loss of each stage is measured."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A finished conversion.

    `stage_errors` holds per stage and layer the relative squared error of the attention output: on calibration text
    and the original's inputs; for refit and polish on the converted prefix, against a target that also makes up for
    what the layers before have lost. `stage_losses` is in nats per token on a little text that nothing was fitted to,
    of the original and of the model after each stage. Both are empty when nothing was calibrated. `seconds` is per
    stage, of this process; `resumed_from` is the last step of an earlier one.
    """

    out: Path
    plan: Plan
    options: ConvertOptions
    stage_errors: dict[str, list[float]]
    stage_losses: dict[str, float]
    seconds: dict[str, float]
    resumed_from: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "plan": self.plan.to_dict(),
            "options": self.options.to_dict(),
            "stage_errors": self.stage_errors,
            "stage_losses": self.stage_losses,
            "seconds": self.seconds,
            "resumed_from": self.resumed_from,
        }


def plan(model: str | Path, **options: Any) -> Plan:
    """What converting `model` with these options (see `ConvertOptions`) would do. Reads no weights.

    Raises:
        KvfoldError: the model, an option or the budget does not work; the message says which and why.
    """
    return prepare(open_checkpoint(model), ConvertOptions.from_dict(options))[1]


def convert(
    model: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> Conversion:
    """Convert `model` (a folder, a GGUF file, a hub id or `smollm2`) and write the result to the folder `out`.

    Weights are read and written tensor by tensor, calibration runs layer by layer, so one layer is in memory at a time.
    `out` appears whole or not at all. A killed conversion resumes when it is called again in the same way, at the layer
    it was in and with the same result.

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
        family, what = prepare(checkpoint, chosen)
        tokenizer = checkpoint.load_tokenizer()
        runner, ids = None, None
        if needs_text(chosen):
            ids = calibration_ids(checkpoint.path, tokenizer, chosen, progress)
            runner = make_runner(checkpoint, family, tokenizer, ids, chosen)
        journal = folder.journal(_key(checkpoint, chosen, ids))
        if chosen.per_layer:
            assert ids is not None
            if PROFILE_STEP in journal.entries:
                what = what.with_ranks(journal.load(PROFILE_STEP)[1]["ranks"])
            else:
                profile = profile_checkpoint(checkpoint, family, tokenizer, ids, what, chosen, progress)
                what = plan_per_layer(what, profile)
                journal.save(PROFILE_STEP, {}, {"ranks": [layer.target.kv_lora_rank for layer in what.layers]})
        worker = _Worker(checkpoint, family, what, chosen, runner, journal)
        for index in range(len(what.layers)):
            worker.convert_layer(index, folder)
            progress("converting layers", index + 1, len(what.layers))
        worker.copy_rest(folder, progress)
        conversion = Conversion(
            out=Path(out),
            plan=what,
            options=replace(chosen, polish_minutes=0.0, polish_steps=worker.converter.polish_steps),
            stage_errors=worker.stage_errors,
            stage_losses={} if runner is None else runner.probe_losses(),
            seconds={stage: round(value, 3) for stage, value in worker.converter.seconds.items()},
            resumed_from=journal.resumed_from,
        )
        write_description(folder.path, checkpoint, conversion)
        tokenizer.save_pretrained(folder.path)
    return conversion


def prepare(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Family, Plan]:
    """Everything that can be refused before a weight is read."""
    family = family_of(checkpoint.config)
    check_tensors(family, checkpoint.names())
    what = make_plan(checkpoint.source, checkpoint.config, family, checkpoint.dtype, options)
    checkpoint.check_complete()
    return family, what


def make_runner(
    checkpoint: Checkpoint, family: Family, tokenizer: Any, ids: Tensor, options: ConvertOptions
) -> LayerRunner:
    """The original on its calibration text, and on the shipped novel for the loss of each stage."""
    return LayerRunner(
        checkpoint,
        family,
        ids,
        probe_ids(tokenizer, ids.shape[1]),
        stages=stages_of(options),
        attention=needs_attention(options),
        follow=options.follows,
    )


def probe_ids(tokenizer: Any, length: int) -> Tensor:
    """A few windows of the shipped novel (V, T), which nothing is fitted to."""
    novel = token_ids(tokenizer, read_text(EVALUATION), minimum=1)
    novel = novel.repeat(-(-length // len(novel)))  # for windows longer than a book
    return novel[: len(novel) // length * length].view(-1, length)[:PROBE_WINDOWS]


def profile_checkpoint(
    checkpoint: Checkpoint,
    family: Family,
    tokenizer: Any,
    ids: Tensor,
    plan: Plan,
    options: ConvertOptions,
    progress: Progress,
) -> Profile:
    """What every layer needs, measured on the first windows of the calibration text."""
    alone = replace(options, one_shot=True, polish_minutes=0.0, polish_steps=0)
    some = ids[: max(PROFILE_TOKENS // ids.shape[1], 1)]
    runner = make_runner(checkpoint, family, tokenizer, some, alone)
    return profile_model(LayerConverter(checkpoint, family, plan, alone, runner), runner, plan, progress)


def _key(checkpoint: Checkpoint, options: ConvertOptions, ids: Tensor | None) -> dict[str, Any]:
    """All that the steps of a conversion depend on."""
    return {
        "source": checkpoint.fingerprint(),
        "options": options.to_dict(),
        "text": None if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "versions": {name: version(name) for name in ("kvfold", "torch", "transformers")},
        "threads": torch.get_num_threads(),
    }


class _Worker:
    """Converts the layers that the journal does not have, and hands all of them to the output folder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        plan: Plan,
        options: ConvertOptions,
        runner: LayerRunner | None,
        journal: Journal,
    ) -> None:
        self._checkpoint, self._family, self._plan = checkpoint, family, plan
        self._runner, self._journal = runner, journal
        self._written: set[str] = set()
        self.stage_errors: dict[str, list[float]] = {}
        steps = None
        if STATE_STEP in journal.entries:
            state, facts = journal.load(STATE_STEP)
            steps = facts["polish_steps"]
            if runner is not None:
                runner.restore(state)
        self.converter = LayerConverter(checkpoint, family, plan, options, runner, polish_steps=steps)

    def convert_layer(self, index: int, out: OutputFolder) -> None:
        name = f"layer {index}"
        if name in self._journal.entries:
            tensors, facts = self._journal.load(name)
        else:
            layer = self.converter.convert(index)
            prefix = self._family.prefix(index)
            tensors = {prefix + key: self._stored(prefix + key, tensor) for key, tensor in layer.tensors.items()}
            facts = {"errors": layer.errors}
            state = {} if self._runner is None else self._runner.state
            steps = {"polish_steps": self.converter.polish_steps}
            self._timed(self._journal.update, {STATE_STEP: (state, steps), name: (tensors, facts)})
        for key, tensor in tensors.items():
            self._timed(out.add, key, tensor)
        for stage, error in facts["errors"].items():
            self.stage_errors.setdefault(stage, []).append(error)
        self._written |= set(expected_shapes(self._family, self._plan.layers[index].source, index))

    def copy_rest(self, out: OutputFolder, progress: Progress) -> None:
        """Everything outside attention, unchanged but for the dtype."""
        rest = [name for name in self._checkpoint.names() if name not in self._written]
        for done, name in enumerate(rest, start=1):
            self._timed(out.add, name, self._stored(name, self._checkpoint.read(name)))
            progress("copying the rest", done, len(rest))

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in the dtype that is written."""
        if not tensor.is_floating_point():
            return tensor
        written = tensor.to(self._plan.dtype)
        if written.dtype != tensor.dtype and not is_finite(written):
            raise OptionError(f"dtype {self._plan.to_dict()['dtype']} cannot hold {name}: take bfloat16 or float32.")
        return written

    def _timed(self, function: Callable, *args: Any) -> None:
        start = time.perf_counter()
        function(*args)
        self.converter.seconds["write"] += time.perf_counter() - start

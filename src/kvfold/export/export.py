"""Write a latent model for a runtime."""

import contextlib
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfold.errors import OptionError, OutputError
from kvfold.export.approximate import fold_biases
from kvfold.export.deepseek import check_dtype, write_deepseek
from kvfold.export.gguf_file import TYPES, write_gguf
from kvfold.export.model import latent_model, original_elements
from kvfold.export.runtimes import RUNTIMES
from kvfold.progress import Progress, silent
from kvfold.registry import lookup

FORMATS = {"deepseek": False, "gguf": True}
"""Whether it is one file, for llama.cpp, or a folder."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A finished export; elements are cached per token and layer: in the runtime, by its model, by the original.

    A model that was trained with latents has no original. `losses` are there where biases were approximated: nats per
    token of the model, `exact`, and of what was exported, `approximate`.
    """

    out: Path
    source: str
    runtime: str
    cached_elements: int
    source_elements: int
    original_elements: int | None
    padded: bool
    rope_theta: float
    type: str
    losses: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}


def export(
    model: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    runtime: str | None = None,
    type: str | None = None,
    approximate: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Export:
    """Write a latent model as a runtime loads it: a folder, or for llama.cpp a file.

    Args:
        model: folder of a converted (or trained) model with one latent and one rotary head per layer.
        out: what to write; whole or not there at all.
        format: a name of `FORMATS` (default: `gguf` where `out` ends in .gguf, or the runtime's).
        runtime: a name of `RUNTIMES` (default: `llamacpp` for GGUF, else `transformers`).
        type: of the weights in a GGUF file, a name of `TYPES` (default: f32).
        approximate: fold the biases that the runtime has no slot for into the weights, see `fold_biases`.
        overwrite: replace an existing `out`.
        progress: called as `Progress` says.

    Raises:
        OptionError: the model has something that the runtime cannot express; the message says what.
        KvfoldError: the model or the output does not work.
    """
    out = Path(out).expanduser()
    gguf = out.suffix == ".gguf" if format is None else lookup(FORMATS, format, "format")
    runtime = runtime or ("llamacpp" if gguf else "transformers")
    target = lookup(RUNTIMES, runtime, "runtime")
    if format is not None and gguf != target.gguf:
        raise OptionError(f"{target.name} does not load the format {format}: leave one of the two out.")
    if type is not None and not target.gguf:
        raise OptionError(f"a type is for GGUF files, {target.name} has the dtype of the model: leave it out.")
    kind = type or "f32"
    lookup(TYPES, kind, "type of weights")
    if target.gguf != (out.suffix == ".gguf"):
        wanted = "a file that ends in .gguf" if target.gguf else "a folder"
        raise OptionError(f"{target.name} loads {wanted}, got {out}: name one.")
    if target.gguf and out.exists() and not overwrite:
        raise OutputError(f"{out} exists; give another name, or overwrite it with --overwrite.")
    with tempfile.TemporaryDirectory() if approximate else contextlib.nullcontext() as place:
        folded = None if place is None else Path(place)
        losses = None if folded is None else fold_biases(model, folded, target, progress)
        source = latent_model(model, target, folded=folded)
        if not target.gguf:
            check_dtype(source)
        finished = Export(
            out=out,
            source=str(source.path.resolve()),
            runtime=runtime,
            cached_elements=source.cached_elements,
            source_elements=source.spec.cached_elements(),
            original_elements=original_elements(source.path),
            padded=source.padded,
            rope_theta=source.theta,
            type=kind if target.gguf else str(source.checkpoint.dtype).removeprefix("torch."),
            losses=losses,
        )
        if target.gguf:
            write_gguf(source, out, kind, finished.to_dict(), progress)
        else:
            write_deepseek(source, out, finished.to_dict(), overwrite=overwrite, progress=progress)
    return finished

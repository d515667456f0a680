"""Train a decoder from scratch, with any of kvfold's attentions."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.lab.architecture import Architecture
from kvfold.lab.initial import new_model
from kvfold.lab.tokenizer import BPE, make_tokenizer, tokenizer_key
from kvfold.modeling import write_stub
from kvfold.progress import Progress, silent
from kvfold.registry import lookup
from kvfold.train import Start, TrainedRun, TrainOptions, carry_out

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "warmup": 0.02,
    "decay": 0.98,
    "decay_type": "cosine",
    "floor": 0.1,
    "weight_decay": 0.1,
}
"""Of training where they are others than healing's: a short warm-up, then a cosine to a tenth of the rate."""
FOREIGN = ("trains", "lora_rank")
"""What healing can and training from scratch cannot be told."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and how it is trained. `tokenizer` is `bpe`, `bytes` or a model, see `make_tokenizer`."""

    architecture: Architecture
    options: TrainOptions
    tokenizer: str = BPE

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """From the keys of a recipe: the fields of `Architecture` and `TrainOptions`, and `tokenizer`.

        Raises:
            OptionError: a key is unknown, or missing, or its value does not fit; the message says which.
        """
        shapes, options = ({field.name for field in fields(kind)} for kind in (Architecture, TrainOptions))
        known = [*shapes, *options.difference(FOREIGN), "tokenizer"]
        for key in values:
            lookup(dict.fromkeys(known), key, "recipe key")
        training = DEFAULTS | {key: value for key, value in values.items() if key in options}
        shape = {key: value for key, value in values.items() if key in shapes}
        given = values.get("sequence_length", TrainOptions.sequence_length)
        shape.setdefault("max_position_embeddings", given)
        return cls(
            architecture=Architecture.from_dict(shape),
            options=TrainOptions.from_dict(training),
            tokenizer=str(values.get("tokenizer", BPE)),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer} | self.architecture.to_dict() | self.options.to_dict()


def pretrain(
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    **recipe: Any,
) -> TrainedRun:
    """Train a new model and write the run to the folder `out`, as `carry_out` says.

    Args:
        resume, overwrite, progress: as of `carry_out`.
        recipe: keys of `Recipe.from_dict`.

    Raises:
        KvfoldError: an option, the data or the output does not work; the message says which and why.
    """
    return pretrain_recipe(Recipe.from_dict(recipe), Path(out), resume=resume, overwrite=overwrite, progress=progress)


def pretrain_recipe(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool, progress: Progress) -> TrainedRun:
    """`pretrain` with a recipe that has been read."""
    shape, options = recipe.architecture, recipe.options
    start = Start(
        fingerprint={"architecture": shape.to_dict()} | tokenizer_key(recipe.tokenizer, shape.vocab_size, options),
        load=partial(_load, recipe),
        dtype=torch.float32,
        folder=None,
        complete=write_stub,
        card=partial(_card, recipe),
    )
    return carry_out(start, out, options, resume=resume, overwrite=overwrite, progress=progress)


def _load(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = make_tokenizer(recipe.tokenizer, recipe.architecture.vocab_size, recipe.options)
    model: Any = new_model(recipe.architecture, recipe.options.seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token_id
    return model, tokenizer


def _card(recipe: Recipe, finished: TrainedRun) -> str:
    shape = recipe.architecture
    spec = shape.spec()
    first, *rest = finished.story()
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [kvfold, {spec.name.lower()}]",
        "---",
        "",
        f"# {spec.name}, {shape.parameters() / 1e6:,.1f} M parameters",
        "",
        f"{shape.num_hidden_layers} layers of width {shape.hidden_size}, {shape.num_attention_heads} query heads; "
        f"every token caches {spec.cached_elements()} elements per layer.",
        "",
        f"Trained from scratch by `kvfold pretrain` {first}",
        *rest,
        "",
        "```python",
        "import kvfold, transformers  # kvfold registers the architecture",
        'model = transformers.AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
        "```",
        "",
    ]
    return "\n".join(lines)

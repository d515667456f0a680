"""What is written beside the weights: config, recipe, remote-code stub, model card."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from kvfold.checkpoint import Checkpoint, write_json, write_text
from kvfold.convert.options import ConvertOptions
from kvfold.convert.plan import Plan
from kvfold.modeling import KvfoldConfig, KvfoldForCausalLM, auto_map, write_stub

if TYPE_CHECKING:
    from kvfold.convert.run import Conversion

CONVERSION_FILE = "kvfold.json"
"""Everything known of a conversion, beside its weights: `Conversion.to_dict`."""
UNTRAINED = "It was not trained end to end after the conversion."


def write_description(folder: Path, checkpoint: Checkpoint, conversion: "Conversion") -> None:
    """Write config.json, generation_config.json, recipe.yaml, kvfold.json, the stub and README.md into `folder`."""
    plan, results = conversion.plan, conversion.to_dict()
    text_config = checkpoint.config.to_dict()
    config = KvfoldConfig(
        text_config=text_config,
        attention=[layer.target.to_dict() for layer in plan.layers],
        architectures=[KvfoldForCausalLM.__name__],
        dtype=plan.dtype,
    )
    config.auto_map = auto_map()
    config.save_pretrained(folder)
    if checkpoint.generation_config is not None:
        checkpoint.generation_config.save_pretrained(folder)
    write_stub(folder)
    write_text(folder / "recipe.yaml", _recipe(conversion.options))
    write_json(
        folder / CONVERSION_FILE, results | {"kvfold": version("kvfold"), "transformers": transformers.__version__}
    )
    write_text(folder / "README.md", model_card(plan, results))


def _recipe(options: ConvertOptions) -> str:
    """The options with every default spelt out, so that a later kvfold with other defaults does the same."""
    lines = ["# kvfold convert MODEL OUT --config recipe.yaml"]
    chosen = options.to_dict() | {"rope": options.rope_strategy, "factorize": options.factorization}
    if len(options.calibration) > 1:
        chosen["calibration_weights"] = options.weights
    for key, value in chosen.items():
        if value is None or value == ():
            continue
        # JSON is YAML, quotes and backslashes in file names included.
        quoted = isinstance(value, (bool, tuple))
        lines.append(f"{key}: {json.dumps(value, ensure_ascii=False) if quoted else value}")
    return "\n".join(lines) + "\n"


def model_card(plan: Plan, results: dict[str, Any]) -> str:
    """The model card: what was done, and what was measured while doing it."""
    facts = plan.to_dict()
    target = plan.layers[0].target
    ranks = sorted({layer.target.kv_lora_rank for layer in plan.layers})
    rank = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}, shared among the layers by need"
    calibration = f"{plan.calibration_tokens} tokens of {_texts(results['options'])}"
    return f"""---
library_name: transformers
tags: [kvfold, {target.name.lower()}]
---

# {target.name} from {plan.source}

`{plan.source}` ({plan.model_type}) with its attention folded into {target.name} by kvfold: every token caches
{plan.elements_after / len(plan.layers):.4g} elements per layer instead of {plan.layers[0].source.cached_elements()}
({100 * plan.kept:.2f} % of the original cache). {UNTRAINED}

| | original | converted |
|---|---|---|
| attention | {plan.layers[0].source.name} | {target.name}, layout `{plan.layout}` |
| cached elements per token, all layers | {facts["elements_before"]} | {facts["elements_after"]} |
| cached bytes per token ({facts["dtype"]}) | {facts["bytes_before"]} | {facts["bytes_after"]} |
| attention parameters | {facts["attention_parameters_before"]} | {facts["attention_parameters_after"]} |

- rotary components: `{plan.rope}`, {target.rotary_heads} head(s) of {target.qk_rope_head_dim} dims
- factorisation: `{plan.factorize}`, latent rank {rank}
- calibration: {calibration if plan.calibration_tokens else "none (weights only)"}

{_stages(results)}

```python
import kvfold, transformers  # kvfold registers the architecture
model = transformers.AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```

The exact recipe is in `recipe.yaml`, every number above in `kvfold.json`.
"""


def _texts(options: dict[str, Any]) -> str:
    """The names of the calibration texts, with their weights if there are any."""
    names = [f"`{Path(entry).name}`" for entry in options["calibration"]]
    weights = options["calibration_weights"]
    if weights:
        names = [f"{name} (weight {weight:g})" for name, weight in zip(names, weights, strict=True)]
    return ", ".join(names)


def _stages(results: dict[str, Any]) -> str:
    """The table of what every stage cost or won back."""
    if not results["stage_errors"]:
        return "Nothing was measured: the conversion used the weights alone. Run `kvfold verify` on both models."
    losses = results["stage_losses"]
    original = losses["original"]
    rows = [
        "| stage | loss on held-out text, nats per token | over the original | error of attention: mean, worst |",
        "|---|---|---|---|",
        f"| original | {original:.3f} | | |",
    ]
    for stage, errors in results["stage_errors"].items():
        worst = max(range(len(errors)), key=errors.__getitem__)
        rows.append(
            f"| {stage} | {losses[stage]:.3f} | {losses[stage] - original:+.3f} | {sum(errors) / len(errors):.3f}, "
            f"{errors[worst]:.3f} (layer {worst}) |"
        )
    note = (
        "Each row is the model after that stage and those above it. The loss is of a short passage of a novel that\n"
        "nothing was fitted to. Errors are relative, squared and of calibration text: on the original's inputs, for\n"
        "refit and polish on the converted prefix, where the target makes up for what the layers before have lost."
    )
    return "\n".join(rows) + "\n\n" + note

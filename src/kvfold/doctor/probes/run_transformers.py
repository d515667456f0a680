"""A folder in stock transformers. Run as `doctor.probe` says, in a process where kvfold is not imported."""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

request = json.loads(Path(sys.argv[1]).read_text())
transformers.utils.logging.disable_progress_bar()
prompt, top = request["prompt"], request["top"]
model, loaded = AutoModelForCausalLM.from_pretrained(
    request["export"], output_loading_info=True, **{"dtype": torch.float32} | request["settings"]
)
if unmatched := {kind: sorted(names)[:3] for kind, names in loaded.items() if names}:
    sys.exit(f"weights and config do not fit together: {unmatched}")
model.eval()


def likeliest(logits: torch.Tensor) -> dict[int, float]:
    found = logits.float().log_softmax(-1).topk(top)
    return dict(zip(found.indices.tolist(), found.values.tolist(), strict=True))


ids, new = torch.tensor([prompt]), request["decoded"]
with torch.no_grad():
    prefill = model(ids, use_cache=False).logits[0]
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
layers = output.past_key_values.layers
elements = sum(part.numel() for layer in layers for part in (layer.keys, layer.values))
answer = {
    "version": transformers.__version__,
    "sequence": output.sequences[0].tolist(),
    "prefill": {place: likeliest(prefill[place]) for place in request["places"]},
    "decode": {len(prompt) - 1 + step: likeliest(logits[0]) for step, logits in enumerate(output.logits)},
    "cached_elements": elements / layers[0].keys.shape[2] / len(layers),
    "token_ids": AutoTokenizer.from_pretrained(request["export"])(request["text"], add_special_tokens=False).input_ids,
}
Path(sys.argv[2]).write_text(json.dumps(answer))

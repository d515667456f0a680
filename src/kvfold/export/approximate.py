"""Biases that a runtime has no slot for, folded into weights: hidden states are nearly constant in one direction."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvfold.attention import LatentSpec
from kvfold.convert import probe_ids
from kvfold.errors import OptionError
from kvfold.export.model import open_converted
from kvfold.export.runtimes import Runtime
from kvfold.families import family_of
from kvfold.modeling import load_model
from kvfold.progress import Progress
from kvfold.texts import CALIBRATION, read_text, token_ids

WINDOWS, LENGTH = 8, 512
"""Of the shipped text, on which the directions are found."""
DAMPING = 1e-3
BIASES = {"q_proj": "query_bias", "kv_a_proj": "latent_bias", "k_rope_proj": "rope_key_bias", "v_b_proj": "value_bias"}
"""Projections whose biases can be folded into their weights, and the spec's word for each."""


def fold_biases(model: str | Path, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, float]:
    """Save a conversion to `folder` with the biases that the runtime has no slot for folded into the weights.

    `W x + b` is `(W + b u^T) x` where `u^T x = 1`; u is the ridge regression of one on the inputs x of a projection. A
    bias of values is folded likewise, on the latent. The whole model is in memory.

    Returns:
        Nats per token on a little of the shipped novel, `exact` and `approximate`.

    Raises:
        OptionError: the model has norms or query latents, or is not converted.
    """
    checkpoint, config = open_converted(model)
    specs = config.specs()
    if any(not isinstance(spec, LatentSpec) or spec.latent_norm or spec.q_lora_rank is not None for spec in specs):
        raise OptionError("only biases of conversions can be approximated; the model was trained with other attention.")
    loaded: Any = load_model(model, dtype=torch.float32)
    network, tokenizer = loaded
    probes = probe_ids(tokenizer, LENGTH)
    ids = token_ids(tokenizer, read_text(CALIBRATION)[: 32 * WINDOWS * LENGTH], minimum=1)
    ids = ids[: max(len(ids) // LENGTH, 1) * LENGTH][: WINDOWS * LENGTH].view(-1, min(LENGTH, len(ids)))
    family = family_of(config.base)
    layers = [network.get_submodule(family.prefix(index).rstrip(".")) for index in range(len(specs))]
    names = ("q_proj",) if runtime.biases else tuple(BIASES)
    progress("folding biases", 0, 1)
    exact = _loss(network, probes)
    with _directions(layers) as directions, torch.no_grad():
        network(ids)
    for layer, (hidden, latent) in zip(layers, directions, strict=True):
        for name in names:
            fold_bias(layer.get_submodule(name), latent if name == "v_b_proj" else hidden)
    found = {"exact": exact, "approximate": _loss(network, probes)}
    network.config.attention = [spec | {BIASES[name]: False for name in names} for spec in network.config.attention]
    network.to(dtype=checkpoint.dtype)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress("folding biases", 1, 1)
    return found


def constant_direction(x: Float[Tensor, "T D"]) -> Float[Tensor, " D"]:
    """The u of the least mean of `(u^T x - 1)^2 + DAMPING |u|^2`, in units of the mean square of x."""
    x = x.double()
    gram = x.T @ x / len(x)
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())
    return torch.linalg.solve(gram, x.mean(0))


def fold_bias(linear: Any, direction: Float[Tensor, " D"]) -> None:
    """Move the bias of an `nn.Linear`, if there is one, into the weight."""
    if linear.bias is not None:
        linear.weight.data += torch.outer(linear.bias.data.double(), direction).to(linear.weight.dtype)
        linear.bias = None


@contextmanager
def _directions(layers: list[Any]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Filled by a forward pass, layer by layer: the constant directions of the hidden states and of the latents."""
    found: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...], latent: Tensor) -> None:
        found.append((constant_direction(inputs[0].flatten(0, 1)), constant_direction(latent.flatten(0, 1))))

    handles = [layer.kv_a_proj.register_forward_hook(note) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _loss(network: Any, ids: Tensor) -> float:
    with torch.no_grad():
        return float(network(ids, labels=ids, use_cache=False).loss)

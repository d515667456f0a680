"""Low-rank updates of the attention through peft; what is saved has them merged."""

import importlib.util

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfold.attention import Attention
from kvfold.errors import OptionError

SCALING = 2
BASE, DOWN, UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_lora(network: PreTrainedModel, attention: list[nn.Module], rank: int) -> None:
    """Put `W + 2 B A` (arXiv 2106.09685) in the place of the attention's projections, `A` and `B` alone trainable.

    `A` has `rank` rows and is random, `B` starts at zero.

    Raises:
        OptionError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise OptionError("lora needs the package peft, which is not installed: pip install 'kvfold[train]'.")
    from peft import LoraConfig, inject_adapter_in_model

    modules = set(attention)
    targets = [
        f"{name}.{child}"
        for name, module in network.named_modules()
        if module in modules
        for child in _projections(module)
    ]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=SCALING * rank, target_modules=targets), network)
    for module in attention:
        if isinstance(module, Attention):
            module.path = "expanded"  # the absorbed one reads weights, and would not see the updates


def adapter(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The updates in the state dict of a network that has them."""
    return {name: tensor for name, tensor in state.items() if name.endswith((DOWN, UP))}


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a network with updates, as that of one without, which computes the same."""
    plain = {}
    for name, tensor in state.items():
        if name.endswith((DOWN, UP)):
            continue
        head, is_base, tail = name.partition(BASE)
        if is_base and tail == "weight":
            tensor = tensor + SCALING * state[head + UP] @ state[head + DOWN]
        plain[f"{head}.{tail}" if is_base else name] = tensor
    return plain


def _projections(attention: nn.Module) -> list[str]:
    """Names of the linear layers that are called as such; those of several latents are read block by block."""
    names = [name for name, module in attention.named_children() if isinstance(module, nn.Linear)]
    return [name for name in names if name not in _blockwise(attention)]


def _blockwise(attention: nn.Module) -> set[str]:
    spec = attention.spec if isinstance(attention, Attention) else None
    if getattr(spec, "latent_heads", 1) == 1:
        return set()
    return {"q_b_proj", "k_b_proj", "v_b_proj"}

"""Weights to begin with, the same for all variants wherever they have the same tensor."""

import hashlib

import torch
from torch import nn

from kvfold.attention.base import LatentRMSNorm
from kvfold.lab.architecture import Architecture
from kvfold.modeling import KvfoldForCausalLM

OUTPUTS = ("o_proj.weight", "down_proj.weight")


def new_model(architecture: Architecture, seed: int) -> KvfoldForCausalLM:
    """An untrained model in fp32.

    Every matrix is drawn from N(0, init_std) by a generator of its own, which follows from `seed` and its name: tensors
    that two variants have in common are the same in both, whatever the rest of them draws.
    """
    model = KvfoldForCausalLM(architecture.config()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue  # norms and biases have begun at one and zero
            if architecture.zero_outputs and name.endswith(OUTPUTS):
                parameter.zero_()
            else:
                parameter.normal_(0, architecture.init_std, generator=_generator(seed, name))
        if architecture.scaled_latents:
            for module in model.modules():
                if isinstance(module, LatentRMSNorm):
                    module.weight.fill_(_latent_scale(module, architecture.hidden_size))
    return model


def _latent_scale(norm: nn.Module, hidden_size: int) -> float:
    assert isinstance(norm, LatentRMSNorm)
    return (hidden_size / (norm.weight.numel() // norm.heads)) ** 0.5


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

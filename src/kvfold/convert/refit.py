"""Closed-form refit of a converted layer on the converted prefix."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvfold.attention import Attention
from kvfold.convert.calibration import AttentionSample

DAMPING = 1e-2  # of the mean of the gram's diagonal: pulls towards the weights that are there


@torch.no_grad()
def refit_output(attention: Attention, data: AttentionSample) -> None:
    """Change the output projection of `attention`, in place, to the least-squares one.

    With y the concatenated head outputs on the converted prefix and t the target, W minimises
    `sum |W y + b - t|^2 + damping |W - W_0|^2`, the damping relative to the mean of E[y y^T].
    """
    projection = attention.o_proj
    width = projection.in_features
    gram = torch.zeros(width, width, dtype=torch.float64)
    cross = torch.zeros(projection.out_features, width, dtype=torch.float64)
    for part in data.batches():
        heads, answer = _run(attention, part)
        flat = heads.flatten(0, 1)
        gram += (flat.T @ flat).double()
        cross += ((part.target - answer).flatten(0, 1).T @ flat).double()
    scale = gram.diagonal().mean()
    if scale > 0:  # a pruned layer has nothing to fit with
        damped = gram + DAMPING * scale * torch.eye(width, dtype=torch.float64)
        projection.weight += torch.linalg.solve(damped, cross.T).T.float()


def _run(attention: Attention, data: AttentionSample) -> tuple[Float[Tensor, "B T Nv"], Float[Tensor, "B T D"]]:
    """The concatenated head outputs, and the attention output."""
    seen: list[Tensor] = []

    def watch(module: nn.Module, args: tuple[Tensor]) -> None:
        seen.append(args[0])

    handle = attention.o_proj.register_forward_pre_hook(watch)
    answer, _ = attention(data.inputs, data.position_embeddings, data.attention_mask)
    handle.remove()
    return seen[0], answer

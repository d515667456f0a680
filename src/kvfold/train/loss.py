"""What healing minimises: cross entropy, and the divergence from a teacher's predictions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from kvfold.train.data import IGNORED


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """`weight` is beta, `temperature` tau of the loss below."""

    weight: float
    temperature: float


def heal_loss(
    logits: Float[Tensor, "B T V"],
    labels: Int64[Tensor, "B T"],
    items: int | Tensor | None = None,
    teacher: Float[Tensor, "B T V"] | None = None,
    distillation: Distillation | None = None,
) -> Float[Tensor, ""]:
    """`CE + beta tau^2 KL(teacher || student)` in nats, mean over the tokens that are to be predicted.

    Both predictions of the divergence are softened by tau; tau^2 keeps its gradients as large (Hinton et al., arXiv
    1503.02531). Token t + 1 is predicted at t.

    Args:
        items: tokens to divide by, where this is one part of a batch; None divides by those here.
    """
    shifted = labels[:, 1:]
    wanted = shifted != IGNORED
    student, expected = logits[:, :-1][wanted].float(), shifted[wanted]
    count = wanted.sum() if items is None else items
    total = nn.functional.cross_entropy(student, expected, reduction="sum")
    if teacher is not None and distillation is not None:
        tau = distillation.temperature
        log_p = (teacher[:, :-1][wanted].float() / tau).log_softmax(-1)
        log_q = (student / tau).log_softmax(-1)
        divergence = nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
        total = total + distillation.weight * tau**2 * divergence
    return total / count


@torch.no_grad()
def heal_loss_naive(
    logits: Tensor, labels: Tensor, teacher: Tensor | None = None, distillation: Distillation | None = None
) -> float:
    """The same, token by token, in fp64."""
    losses = []
    for row, (row_logits, row_labels) in enumerate(zip(logits.double(), labels, strict=True)):
        for position in range(len(row_labels) - 1):
            if row_labels[position + 1] == IGNORED:
                continue
            loss = -row_logits[position].softmax(-1)[row_labels[position + 1]].log()
            if teacher is not None and distillation is not None:
                tau = distillation.temperature
                p = (teacher[row, position].double() / tau).softmax(-1)
                q = (row_logits[position] / tau).softmax(-1)
                loss = loss + distillation.weight * tau**2 * (p * (p / q).log()).sum()
            losses.append(float(loss))
    return sum(losses) / len(losses)

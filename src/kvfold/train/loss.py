"""What healing minimises: cross entropy, the divergence from a teacher's predictions, the distance to its states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from kvfold.train.data import IGNORED


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What a teacher counts in the loss: beta, tau and gamma of `heal_loss`."""

    weight: float
    temperature: float
    hidden_weight: float = 0.0


class Predictions(Protocol):
    """What a teacher predicts for a batch."""

    def divergence(self, student: Float[Tensor, "n V"], wanted: Bool[Tensor, "B T"], tau: float) -> Float[Tensor, ""]:
        """`KL(teacher || student)` in nats, summed over the `n` wanted places, both softened by `tau`."""
        ...


@dataclass(frozen=True)
class FullPredictions:
    """The teacher's logits."""

    logits: Float[Tensor, "B T V"]

    def divergence(self, student: Float[Tensor, "n V"], wanted: Bool[Tensor, "B T"], tau: float) -> Float[Tensor, ""]:
        log_p = (self.logits[wanted].float() / tau).log_softmax(-1)
        log_q = (student / tau).log_softmax(-1)
        return nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)


@dataclass(frozen=True)
class TopPredictions:
    """The likeliest tokens under tau and their log-probabilities; what is left is one more class.

    The divergence over these k + 1 classes is never larger than that over all tokens (data processing inequality), and
    as large where nothing is left.
    """

    tokens: Int64[Tensor, "B T k"]
    log_p: Float[Tensor, "B T k"]

    def divergence(self, student: Float[Tensor, "n V"], wanted: Bool[Tensor, "B T"], tau: float) -> Float[Tensor, ""]:
        log_p = self.log_p[wanted].float()
        log_q = (student / tau).log_softmax(-1).gather(-1, self.tokens[wanted])
        p_rest, q_rest = (1 - log.exp().sum(-1) for log in (log_p, log_q))
        smallest = torch.finfo(torch.float32).eps
        rest = p_rest * (p_rest.clamp(min=smallest).log() - q_rest.clamp(min=smallest).log())
        return (log_p.exp() * (log_p - log_q)).sum() + torch.where(p_rest > smallest, rest, 0).sum()


def heal_loss(
    logits: Float[Tensor, "B T V"],
    labels: Int64[Tensor, "B T"],
    items: int | Tensor | None = None,
    teacher: Predictions | None = None,
    distillation: Distillation | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """`CE + beta tau^2 KL(teacher || student)` and `CE` alone, in nats, means over the tokens that are to be predicted.

    Both predictions of the divergence are softened by tau; tau^2 keeps its gradients as large (Hinton et al., arXiv
    1503.02531). Token t + 1 is predicted at t.

    Args:
        items: tokens to divide by, where this is one part of a batch; None divides by those here.
    """
    wanted = wanted_places(labels)
    student, expected = logits[wanted].float(), labels[:, 1:][wanted[:, :-1]]
    count = wanted.sum() if items is None else items
    cross_entropy = nn.functional.cross_entropy(student, expected, reduction="sum") / count
    if teacher is None or distillation is None:
        return cross_entropy, cross_entropy
    tau = distillation.temperature
    divergence = teacher.divergence(student, wanted, tau) / count
    return cross_entropy + distillation.weight * tau**2 * divergence, cross_entropy


def hidden_loss(
    student: Sequence[Float[Tensor, "B T D"]],
    teacher: Sequence[Float[Tensor, "B T D"]],
    labels: Int64[Tensor, "B T"],
    items: int | Tensor | None = None,
) -> Float[Tensor, ""]:
    """`1/L sum_l |h_l - h*_l|^2 / |h*_l|^2`, mean over the tokens at which something is to be predicted.

    Relative for each token, for a few of them are hundreds of times as long as the others.

    Args:
        student: what goes out of each layer; `teacher` likewise.
        items: as of `heal_loss`.
    """
    wanted = wanted_places(labels)
    total = torch.zeros((), device=labels.device)
    for mine, its in zip(student, teacher, strict=True):
        goal = its[wanted].float()
        total = total + ((mine[wanted].float() - goal).pow(2).sum(-1) / goal.pow(2).sum(-1)).sum()
    return total / len(student) / (wanted.sum() if items is None else items)


def wanted_places(labels: Int64[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Where the next token is to be predicted."""
    wanted = torch.zeros_like(labels, dtype=torch.bool)
    wanted[:, :-1] = labels[:, 1:] != IGNORED
    return wanted


@torch.no_grad()
def heal_loss_naive(
    logits: Tensor, labels: Tensor, teacher: Tensor | None = None, distillation: Distillation | None = None
) -> float:
    """The same out of a teacher's logits, token by token, in fp64."""
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

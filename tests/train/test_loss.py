"""The losses of healing against their naive twins, in value and gradient."""

import pytest
import torch

from kvfold.train.loss import (
    Distillation,
    FullPredictions,
    TopPredictions,
    heal_loss,
    heal_loss_naive,
    hidden_loss,
)

LABELS = torch.tensor([[3, 1, 4, -100, 5], [-100, 2, -100, 0, 6]])
WANTED = [(0, 0), (0, 1), (0, 3), (1, 0), (1, 2), (1, 3)]
"""Where LABELS say that a token is to be predicted."""


@pytest.fixture
def logits():
    return torch.randn(3, 2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def top(logits, k, temperature):
    found = (logits / temperature).log_softmax(-1).topk(k)
    return TopPredictions(found.indices, found.values)


@pytest.mark.parametrize("distillation", [None, Distillation(weight=0.7, temperature=2.0)])
def test_it_is_what_its_naive_twin_says(logits, distillation):
    student, teacher, _ = logits.float()
    expected = heal_loss_naive(student, LABELS, teacher, distillation)
    loss, alone = heal_loss(student, LABELS, None, FullPredictions(teacher), distillation)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(alone) == pytest.approx(heal_loss_naive(student, LABELS), rel=1e-5)
    loss, _ = heal_loss(student, LABELS, None, top(teacher, 7, 2.0), distillation)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_out_of_all_kept_tokens_is_that_of_the_logits(logits):
    student, teacher, _ = logits.float()
    distillation, gradients = Distillation(weight=3.0, temperature=1.5), []
    for predictions in (FullPredictions(teacher), top(teacher, 7, 1.5)):
        point = student.clone().requires_grad_()
        heal_loss(point, LABELS, None, predictions, distillation)[0].backward()
        gradients.append(point.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_what_is_not_kept_is_one_class(logits, k):
    """Value and gradient against a divergence over k + 1 classes written out place by place, in fp64."""
    student, teacher, _ = logits
    distillation, tau = Distillation(weight=1.0, temperature=2.0), 2.0
    point = student.float().requires_grad_()
    loss, _ = heal_loss(point, LABELS, None, top(teacher.float(), k, tau), distillation)
    loss.backward()
    naive = student.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, position in WANTED:
        p, q = ((table[row, position] / tau).softmax(-1) for table in (teacher, naive))
        kept = p.topk(k).indices
        p, q = (torch.cat((share[kept], 1 - share[kept].sum(-1, keepdim=True))) for share in (p, q))
        cross_entropy = -naive[row, position].log_softmax(-1)[LABELS[row, position + 1]]
        total = total + cross_entropy + tau**2 * (p * (p / q).log()).sum()
    (total / len(WANTED)).backward()
    assert loss.item() == pytest.approx(total.item() / len(WANTED), rel=1e-5)
    torch.testing.assert_close(point.grad.double(), naive.grad, rtol=1e-4, atol=1e-6)
    whole = float(heal_loss(student, LABELS, None, FullPredictions(teacher), distillation)[0])
    assert loss.item() == pytest.approx(whole, rel=1e-5) if k == 6 else loss.item() < whole


def test_parts_of_a_batch_add_up(logits):
    student, teacher, _ = logits.float()
    distillation = Distillation(weight=1.0, temperature=1.0)
    items = int((LABELS[:, 1:] != -100).sum())
    parts = [
        heal_loss(student[row, None], LABELS[row, None], items, FullPredictions(teacher[row, None]), distillation)[0]
        for row in range(2)
    ]
    whole, _ = heal_loss(student, LABELS, None, FullPredictions(teacher), distillation)
    torch.testing.assert_close(sum(parts), whole)


def test_the_gradient_of_the_divergence_keeps_its_size_at_any_temperature(logits):
    """Far above the spread of the logits, tau^2 KL is half the variance of their difference."""
    student, teacher, _ = (0.01 * logits).float()
    sizes = []
    for temperature in (10.0, 100.0):
        point = student.clone().requires_grad_()
        distillation = Distillation(weight=1e6, temperature=temperature)
        heal_loss(point, LABELS, None, FullPredictions(teacher), distillation)[0].backward()
        sizes.append(float(point.grad.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_a_perfect_student_has_no_divergence(logits):
    student = logits[0].float()
    distillation = Distillation(weight=5.0, temperature=3.0)
    for predictions in (FullPredictions(student), top(student, 3, 3.0)):
        loss, alone = heal_loss(student, LABELS, None, predictions, distillation)
        torch.testing.assert_close(loss, alone)


def test_hidden_states_are_compared_token_by_token(logits):
    student, teacher = list(logits[:2]), list(logits[1:])
    expected = 0.0
    for mine, its in zip(student, teacher, strict=True):
        for place in WANTED:
            expected += float((mine[place] - its[place]).norm() ** 2 / its[place].norm() ** 2) / 2 / len(WANTED)
    assert float(hidden_loss(student, teacher, LABELS)) == pytest.approx(expected, rel=1e-5)
    doubled = hidden_loss(student, teacher, LABELS, items=2 * len(WANTED))
    assert float(doubled) == pytest.approx(expected / 2, rel=1e-5)

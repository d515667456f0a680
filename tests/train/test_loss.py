"""The loss of healing against its naive twin, and its gradient against differences."""

import pytest
import torch

from kvfold.train.loss import Distillation, heal_loss, heal_loss_naive

LABELS = torch.tensor([[3, 1, 4, -100, 5], [-100, 2, -100, 0, 6]])


@pytest.fixture
def logits():
    return torch.randn(3, 2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("distillation", [None, Distillation(weight=0.7, temperature=2.0)])
def test_it_is_what_its_naive_twin_says(logits, distillation):
    student, teacher, _ = logits.float()
    loss = heal_loss(student, LABELS, teacher=teacher, distillation=distillation)
    assert float(loss) == pytest.approx(heal_loss_naive(student, LABELS, teacher, distillation), rel=1e-5)


def test_parts_of_a_batch_add_up(logits):
    student, teacher, _ = logits.float()
    distillation = Distillation(weight=1.0, temperature=1.0)
    items = int((LABELS[:, 1:] != -100).sum())
    parts = [
        heal_loss(student[row, None], LABELS[row, None], items, teacher[row, None], distillation) for row in range(2)
    ]
    torch.testing.assert_close(sum(parts), heal_loss(student, LABELS, None, teacher, distillation))


def test_the_gradient_of_the_divergence_keeps_its_size_at_any_temperature(logits):
    """Far above the spread of the logits, tau^2 KL is half the variance of their difference."""
    student, teacher, _ = (0.01 * logits).float()
    sizes = []
    for temperature in (10.0, 100.0):
        point = student.clone().requires_grad_()
        heal_loss(point, LABELS, None, teacher, Distillation(weight=1e6, temperature=temperature)).backward()
        sizes.append(float(point.grad.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_a_perfect_student_has_no_divergence(logits):
    student = logits[0].float()
    apart = heal_loss(student, LABELS, None, student, Distillation(weight=5.0, temperature=3.0))
    torch.testing.assert_close(apart, heal_loss(student, LABELS))

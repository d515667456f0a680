"""A layer-wise, teacher-forced fit of a converted layer's tensors: the "polish"."""

import time

import torch

from kvfold.attention import Attention
from kvfold.convert.calibration import AttentionSample, windows_per_batch
from kvfold.precision import has_fast_bf16

STEP = 0.02
"""First step of Adam, as a share of each tensor's root mean square; it falls linearly to 0."""
WARM_UP = 5
TRIAL_STEPS = 3
STEP_SHARE = 0.8
"""Of the time of a polish; the rest goes into running the converted prefix."""


def polish(attention: Attention, data: AttentionSample, *, steps: int, seed: int) -> None:
    """Fit all tensors of `attention`, in place, to the target on the converted prefix.

    The loss is `|attention(x) - t|^2 / |t|^2` on about 2,048 tokens a step, windows in shuffled order. Adam,
    betas (0.9, 0.99). Matrix products are in bf16 where the processor has instructions for them, weights in fp32.
    """
    parameters = [parameter.requires_grad_() for parameter in attention.parameters()]
    sizes = [float(parameter.detach().square().mean().sqrt()) for parameter in parameters]
    groups = [{"params": [tensor], "lr": STEP * size} for tensor, size in zip(parameters, sizes, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * max(1 - step / steps, 0)
    )
    generator = torch.Generator().manual_seed(seed)
    windows, size = len(data.inputs), windows_per_batch(data.inputs)
    order: list[int] = []
    with torch.enable_grad():
        for _ in range(steps):
            if len(order) < size:
                order += torch.randperm(windows, generator=generator).tolist()
            batch, order = order[:size], order[size:]
            with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bf16()):
                loss = data.part(batch).error(attention)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None


def steps_within(seconds: float, attention: Attention, data: AttentionSample) -> int:
    """Steps that a layer may take so that, with the rest of its work, it lasts about `seconds`.

    Trains `attention`, which should be a copy, for a few steps to know their time.
    """
    polish(attention, data, steps=1, seed=0)  # the first step allocates
    start = time.perf_counter()
    polish(attention, data, steps=TRIAL_STEPS, seed=0)
    step = (time.perf_counter() - start) / TRIAL_STEPS
    return max(int(STEP_SHARE * seconds / step), 1)

"""Peak memory of a piece of work: from CUDA's allocator, or from the kernel's account of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

CLEAR_PEAK = "5"
"""Written to clear_refs, it resets the peak resident size (proc(5))."""


@dataclass(kw_only=True)
class Growth:
    """Bytes above the start at the highest point; None where the system does not tell."""

    peak_bytes: int | None = None


@contextmanager
def memory_growth(device: torch.device) -> Iterator[Growth]:
    """Measure the growth of memory in the body of a `with`; read `peak_bytes` after it.

    On CUDA it is exact. On CPU it is the peak resident size less the one at the start: memory that the allocator kept
    from earlier work and reuses does not show, so it is a lower bound.
    """
    growth = Growth()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield growth
        growth.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
        before = _resident("VmRSS")
    except OSError:  # not Linux, or a container that forbids it
        yield growth
        return
    yield growth
    growth.peak_bytes = max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(value) * 1024

"""What the hardware is fast at."""

import torch


def has_fast_bf16() -> bool:
    """Whether bf16 products are faster than fp32 ones on this processor."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # newer than the oldest torch that will do
    return bool(capabilities.get("amx_bf16"))

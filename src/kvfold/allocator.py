"""How the process gets its memory."""

import ctypes
import sys

# Of malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
PAD = 64 << 20


def keep_freed_memory() -> bool:
    """From now on, memory that this process frees stays with it, to be used again; whether that could be had.

    glibc gives large blocks back to the system at once. A training step on a CPU allocates the same ones every time,
    and the system clears each page of them anew. The peak is the same.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No block by mmap, nothing given back, more taken at a time.
    return all(mallopt(name, value) for name, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, PAD)))

"""One safetensors file: written so that it is on disk, read one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfold.checkpoint.renaming import sync


def owned(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous and alone in its memory: views would keep all of their base alive."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as `owned` returns them, and wait until they are on disk.

    Raises:
        OSError: the file cannot be written.
        SafetensorError: the same, where the library says it.
    """
    seen: set[int] = set()
    alone = {}  # one tensor under two names is written twice
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        alone[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    save_file(alone, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors writes for the owner alone
    sync(file)


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor in memory of its own.

    Opening a file maps all of it. It is opened anew for each tensor and the tensor copied out, because pages of an open
    mapping count as this process's memory, and over a whole file they would add up.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is corrupt or has no such tensor.
    """
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name).clone()

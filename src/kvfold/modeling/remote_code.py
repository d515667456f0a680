"""What lets `trust_remote_code=True` load a folder where kvfold is installed, and say so where it is not."""

from pathlib import Path

from kvfold.checkpoint import write_text
from kvfold.modeling.causal_lm import KvfoldForCausalLM
from kvfold.modeling.configuration import KvfoldConfig

STUB = "modeling_kvfold_stub"

_STUB_TEXT = '''"""Lets `trust_remote_code=True` load this folder where kvfold is installed (pip install kvfold)."""

from kvfold import KvfoldConfig, KvfoldForCausalLM

__all__ = ["KvfoldConfig", "KvfoldForCausalLM"]
'''


def auto_map() -> dict[str, str]:
    """For the config of a folder: the classes that the stub has for the Auto classes."""
    return {
        "AutoConfig": f"{STUB}.{KvfoldConfig.__name__}",
        "AutoModelForCausalLM": f"{STUB}.{KvfoldForCausalLM.__name__}",
    }


def write_stub(folder: Path) -> None:
    """Write the module that `auto_map` names."""
    write_text(folder / f"{STUB}.py", _STUB_TEXT)

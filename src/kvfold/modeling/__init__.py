"""A Hugging Face model whose attention modules are kvfold's."""

from kvfold.modeling.cached_forward import cache_keyword, forward_cached
from kvfold.modeling.causal_lm import KvfoldForCausalLM
from kvfold.modeling.configuration import KvfoldConfig
from kvfold.modeling.load import load_model
from kvfold.modeling.remote_code import auto_map, write_stub

__all__ = [
    "KvfoldConfig",
    "KvfoldForCausalLM",
    "auto_map",
    "cache_keyword",
    "forward_cached",
    "load_model",
    "write_stub",
]

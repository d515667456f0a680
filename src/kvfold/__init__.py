"""kvfold folds the key/value cache of a language model into a latent."""

from kvfold.convert import Conversion, ConvertOptions, Plan, convert, plan
from kvfold.families import Inspection, inspect_model
from kvfold.modeling import KvfoldConfig, KvfoldForCausalLM, load_model

__all__ = [
    "Conversion",
    "ConvertOptions",
    "Inspection",
    "KvfoldConfig",
    "KvfoldForCausalLM",
    "Plan",
    "convert",
    "inspect_model",
    "load_model",
    "plan",
]

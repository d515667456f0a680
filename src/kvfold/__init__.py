"""kvfold folds the key/value cache of a language model into a latent."""

from kvfold.convert import Conversion, ConvertOptions, Plan, convert, plan
from kvfold.evaluate import Evaluation, Verification, evaluate, generate, verify
from kvfold.families import Inspection, inspect_model
from kvfold.modeling import KvfoldConfig, KvfoldForCausalLM, load_model

__all__ = [
    "Conversion",
    "ConvertOptions",
    "Evaluation",
    "Inspection",
    "KvfoldConfig",
    "KvfoldForCausalLM",
    "Plan",
    "Verification",
    "convert",
    "evaluate",
    "generate",
    "inspect_model",
    "load_model",
    "plan",
    "verify",
]

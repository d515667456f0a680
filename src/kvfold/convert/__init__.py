"""Turn grouped attention into latent attention, and prove what was done."""

from kvfold.convert.options import ConvertOptions
from kvfold.convert.plan import Plan
from kvfold.convert.run import Conversion, convert, plan

__all__ = ["Conversion", "ConvertOptions", "Plan", "convert", "plan"]

"""Turn grouped attention into latent attention, and prove what was done."""

from kvfold.convert.card import CONVERSION_FILE, UNTRAINED
from kvfold.convert.options import ConvertOptions
from kvfold.convert.plan import Plan, check_deepseek
from kvfold.convert.profile import Profile, plan_per_layer
from kvfold.convert.run import Conversion, convert, plan, prepare, probe_ids, profile_checkpoint
from kvfold.convert.sources import calibration_ids

__all__ = [
    "CONVERSION_FILE",
    "UNTRAINED",
    "Conversion",
    "ConvertOptions",
    "Plan",
    "Profile",
    "calibration_ids",
    "check_deepseek",
    "convert",
    "plan",
    "plan_per_layer",
    "prepare",
    "probe_ids",
    "profile_checkpoint",
]

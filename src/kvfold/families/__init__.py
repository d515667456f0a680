"""Where the weights of each model family are, as data."""

from kvfold.families.inspection import Inspection, inspect_model
from kvfold.families.record import FAMILIES, Family, check_tensors, family_of, head_dim

__all__ = ["FAMILIES", "Family", "Inspection", "check_tensors", "family_of", "head_dim", "inspect_model"]

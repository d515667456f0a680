"""The attention lab: decoders of equal size with different attentions, trained from scratch and compared."""

from kvfold.lab.architecture import Architecture
from kvfold.lab.initial import new_model
from kvfold.lab.matching import Match, match
from kvfold.lab.pretrain import Recipe, pretrain

__all__ = ["Architecture", "Match", "Recipe", "match", "new_model", "pretrain"]

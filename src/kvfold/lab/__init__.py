"""The attention lab: decoders of equal size with different attentions, trained from scratch and compared."""

from kvfold.lab.ablate import ablate
from kvfold.lab.architecture import Architecture
from kvfold.lab.initial import new_model
from kvfold.lab.matching import Match, match
from kvfold.lab.pretrain import Recipe, pretrain
from kvfold.lab.summary import summarise
from kvfold.lab.sweep import Sweep, read_matches, read_sweep

__all__ = [
    "Architecture",
    "Match",
    "Recipe",
    "Sweep",
    "ablate",
    "match",
    "new_model",
    "pretrain",
    "read_matches",
    "read_sweep",
    "summarise",
]

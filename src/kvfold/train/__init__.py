"""Training on the Hugging Face Trainer: healing a converted model."""

from kvfold.train.heal import Healing, heal
from kvfold.train.options import HealOptions

__all__ = ["HealOptions", "Healing", "heal"]

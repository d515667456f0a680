"""Training on the Hugging Face Trainer: healing a converted model, and the run that every training is."""

from kvfold.train.heal import heal
from kvfold.train.options import TrainOptions
from kvfold.train.run import Start, TrainedRun, carry_out

__all__ = ["Start", "TrainOptions", "TrainedRun", "carry_out", "heal"]

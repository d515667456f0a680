"""The errors a user can cause. Each carries one clear line: what was wrong, the value, what to do.

The command line prints that line and exits with code 2; every other exception is a bug and keeps its traceback.
"""


class KvfoldError(Exception):
    """Base of every foreseeable error."""


class OptionError(KvfoldError):
    """An option, a recipe entry or a combination of them that cannot be honoured."""


class UnknownNameError(OptionError):
    """A name that is not in a registry: a strategy, a method, a family."""


class BudgetError(OptionError):
    """A cache budget that cannot be met, or that exceeds the original cache."""


class UnsupportedModelError(KvfoldError):
    """A model that cannot be converted; the message names the missing feature."""


class CheckpointError(KvfoldError):
    """A checkpoint that is missing, truncated, corrupt or inconsistent with its config."""


class TextError(KvfoldError):
    """Calibration or evaluation text that is missing, empty or too short."""


class OutputError(KvfoldError):
    """An output path that exists, overlaps its input or cannot be written."""


class TrainingError(KvfoldError):
    """A training run that cannot go on."""

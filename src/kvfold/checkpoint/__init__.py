"""Streaming input and output of model weights: safetensors folders, GGUF files, hub ids."""

from kvfold.checkpoint.base import Checkpoint, check_finite, is_finite
from kvfold.checkpoint.expected import model_on_meta
from kvfold.checkpoint.fingerprint import fingerprint, sha256_of
from kvfold.checkpoint.gguf_file import GgufCheckpoint
from kvfold.checkpoint.journal import Journal
from kvfold.checkpoint.opening import open_checkpoint
from kvfold.checkpoint.output import OutputFolder, refuse_other_content
from kvfold.checkpoint.reasons import reason
from kvfold.checkpoint.renaming import new_folder
from kvfold.checkpoint.safetensors_folder import SafetensorsCheckpoint
from kvfold.checkpoint.source import resolve_model
from kvfold.checkpoint.workplace import alone
from kvfold.checkpoint.writing import write_bytes, write_json, write_text

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "Journal",
    "OutputFolder",
    "SafetensorsCheckpoint",
    "alone",
    "check_finite",
    "fingerprint",
    "is_finite",
    "model_on_meta",
    "new_folder",
    "open_checkpoint",
    "reason",
    "refuse_other_content",
    "resolve_model",
    "sha256_of",
    "write_bytes",
    "write_json",
    "write_text",
]

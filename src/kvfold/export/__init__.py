"""Conversions in the form that stock runtimes load without any code of ours."""

from kvfold.export.export import Export, export
from kvfold.export.facts import read_facts
from kvfold.export.runtimes import RUNTIMES, Runtime

__all__ = ["RUNTIMES", "Export", "Runtime", "export", "read_facts"]

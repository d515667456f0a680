"""Conversions in the form that stock runtimes load without any code of ours."""

from kvfold.export.costs import RuntimeCost, runtime_costs
from kvfold.export.export import Export, export
from kvfold.export.facts import read_facts
from kvfold.export.runtimes import RUNTIMES, Runtime, check_installed, runtime_of
from kvfold.export.serving import VLLM_ON_CPUS, serve_command, vllm_flags

__all__ = [
    "RUNTIMES",
    "VLLM_ON_CPUS",
    "Export",
    "Runtime",
    "RuntimeCost",
    "check_installed",
    "export",
    "read_facts",
    "runtime_costs",
    "runtime_of",
    "serve_command",
    "vllm_flags",
]

"""Where a number comes from: code, versions, machine, seed, command, date."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("kvfold", "torch", "transformers")


def provenance(*, seed: int | None = None, command: str | None = None) -> dict[str, Any]:
    """A JSON-able record to store beside every result.

    Args:
        seed: what the random numbers of the result were drawn from.
        command: the line that reproduces it; None for this process's own.

    Returns:
        `commit` (of a git checkout of kvfold, with `-dirty` after it if files differ; None for an installed package),
        `versions`, `hardware` (processor, cores, threads, gpu), `seed`, `command`, `date` (UTC).
    """
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "seed": seed,
        "command": command or _command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Commit of the checkout that this file belongs to; None if it is not part of one."""
    here = Path(__file__).resolve()
    # A package installed inside some other project's checkout must not report that project's commit.
    if not _git(here, "ls-files", "--error-unmatch", here.name):
        return None
    revision = _git(here, "rev-parse", "HEAD")
    # What a run writes into results/ does not change the code that it ran.
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)results")
    return f"{revision}-dirty" if revision and changed else revision


def _git(file: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(file.parent), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):  # no git, or not a checkout
        return None
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return None


def _processor() -> str:
    """Name of the processor; platform.processor() is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _command_line() -> str:
    """The command as typed, with the name of the program in place of its path."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])

"""Carry out a sweep: every run that is not finished yet, one after the other or several at a time."""

import os
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers.utils import logging

from kvfold.checkpoint import reason, refuse_other_content, write_json, write_text
from kvfold.errors import KvfoldError, OptionError, OutputError, TrainingError
from kvfold.lab.pretrain import pretrain_recipe
from kvfold.lab.summary import summarise
from kvfold.lab.sweep import Cell, read_sweep
from kvfold.progress import Progress, silent
from kvfold.provenance import provenance
from kvfold.registry import lookup
from kvfold.train.curve import last_row
from kvfold.train.run import is_finished
from kvfold.train.run_folder import RUN_FILE

RECIPE_FILE, SUMMARY_FILE = "sweep.yaml", "summary.json"
POLL_SECONDS = 2.0
ALL = "runs"
"""The stage that counts them."""


def ablate(
    recipe: str | Path,
    out: str | Path,
    *,
    only: Sequence[str] = (),
    workers: int = 1,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train every variant of a sweep with every seed, each in `out/VARIANT/seed-SEED`.

    Finished runs are skipped, begun ones go on.

    Args:
        recipe: YAML, see `sweep_from_dict`.
        only: names of the runs to make, `VARIANT/seed-SEED`; empty makes all.
        workers: runs at a time, each in a process of its own with its share of the cores; an interrupt ends them.
        progress: called as `Progress` says, a stage for every run.

    Returns:
        What `summarise` gives, of the runs that are finished, also written to `out/summary.json`.

    Raises:
        KvfoldError: the recipe, a run of another recipe in `out`, or a run that failed; the message says which.
    """
    sweep, out = read_sweep(recipe), Path(out)
    cells = {cell.name: cell for cell in sweep.cells()}
    chosen = [lookup(cells, name, "run") for name in only] or list(cells.values())
    if workers < 1:
        raise OptionError(f"workers must be 1 or more, got {workers}.")
    keep_recipe(Path(recipe), out)
    there = [cell for cell in chosen if is_finished(out / cell.name)]
    waiting = [cell for cell in chosen if cell not in there]
    for _ in _one_by_one(there, out, silent):  # makes nothing, but refuses those of another text
        pass
    progress(ALL, len(there), len(chosen))
    begin = _one_by_one if workers == 1 else partial(_at_once, workers=workers)
    for count, cell in enumerate(begin(waiting, out, progress), start=len(there) + 1):
        progress(ALL, count, len(chosen), f"{cell.name} is finished")
    summary = summarise(sweep, out) | {"provenance": provenance()}
    write_json(out / SUMMARY_FILE, summary)
    return summary


def keep_recipe(recipe: Path, out: Path) -> None:
    """Put the recipe beside the runs; a folder holds those of one only.

    Raises:
        OptionError: there is another one.
        OutputError: the folder holds something else, or cannot be made.
    """
    refuse_other_content(out, RECIPE_FILE)
    text, kept = recipe.read_text("utf-8"), out / RECIPE_FILE
    if kept.exists() and kept.read_bytes() != text.encode() and any(out.glob(f"*/*/{RUN_FILE}")):
        raise OptionError(f"{out} holds the runs of another recipe ({kept}): give that recipe, or another folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create {out}: {reason(error)}; give a place you can write to") from error
    write_text(kept, text)


def commands(recipe: str | Path, out: str | Path) -> list[str]:
    """One command line per run, for a scheduler."""
    cells = read_sweep(recipe).cells()
    return [shlex.join(["kvfold", "ablate", str(out), "--config", str(recipe), "--only", cell.name]) for cell in cells]


def _one_by_one(waiting: list[Cell], out: Path, progress: Progress) -> Iterator[Cell]:
    """Carry out the runs, each of which is yielded when it is finished."""
    for cell in waiting:
        told = _named(progress, cell.name)
        pretrain_recipe(cell.recipe, out / cell.name, resume=True, overwrite=False, progress=told)
        yield cell


def _named(progress: Progress, name: str) -> Progress:
    def told(stage: str, done: int, total: int, note: str = "") -> None:
        progress(f"{name}: {stage}", done, total, note)

    return told


def _at_once(waiting: list[Cell], out: Path, progress: Progress, *, workers: int) -> Iterator[Cell]:
    """The same in several processes; when a run fails no other is begun, those that go on are waited for."""
    threads = max(torch.get_num_threads() // workers, 1)
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_prepare_worker, initargs=(threads,)
    )
    with pool:
        left = {pool.submit(_carry_out, out, cell.name): cell for cell in waiting}
        try:
            while left:
                done, _ = wait(left, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                _tell(left.values(), out, progress)
                for run in done:
                    run.result()
                    yield left.pop(run)
        except BrokenProcessPool as error:
            raise TrainingError(
                "a worker was killed, perhaps for want of memory: the same command goes on, with fewer --workers."
            ) from error
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, KvfoldError):  # the user's interrupt: begun runs go on from their checkpoints
                for worker in active_children():
                    worker.terminate()
            raise


def _prepare_worker(threads: int) -> None:
    """Interrupts are the parent's to handle; a worker whose parent was killed ends, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS / 2)
    os._exit(1)


def _carry_out(out: Path, name: str) -> None:
    """One run, in a process of its own."""
    cell = next(cell for cell in read_sweep(out / RECIPE_FILE).cells() if cell.name == name)
    pretrain_recipe(cell.recipe, out / name, resume=True, overwrite=False, progress=silent)


def _tell(cells: Iterable[Cell], out: Path, progress: Progress) -> None:
    """How far the runs of other processes are, by what they have written."""
    for cell in cells:
        if row := last_row(out / cell.name):
            note = f"loss {row['loss']:.3f}, {row['tokens']:,} tokens"
            progress(f"{cell.name}: training", row["step"], cell.recipe.options.steps, note)

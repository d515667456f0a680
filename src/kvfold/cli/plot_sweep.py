"""`kvfold plot` of a sweep: paired differences of losses, or the losses themselves."""

from pathlib import Path

from jsonargparse import Namespace

from kvfold.cli.command import Result
from kvfold.errors import OptionError

DEFAULT_FILE = "differences.png"


def is_sweep(folder: str) -> bool:
    from kvfold.lab.ablate import RECIPE_FILE

    return (Path(folder).expanduser() / RECIPE_FILE).is_file()


def run_sweep(options: Namespace) -> Result:
    """Draw a sweep as far as it is; the result is its summary."""
    from kvfold.lab import read_sweep, summarise
    from kvfold.lab.ablate import RECIPE_FILE
    from kvfold.lab.summary import difference_curves, loss_curves
    from kvfold.registry import lookup
    from kvfold.report.differences import difference_label, draw_differences
    from kvfold.report.losses import AXES, SMOOTH, draw_losses

    lookup(AXES, options.x, "axis")
    if options.held_out:
        raise OptionError("--held-out is for single runs; the held-out losses of a sweep are in its table.")
    folder = Path(options.runs[0]).expanduser()
    sweep = read_sweep(folder / RECIPE_FILE)
    curves = (loss_curves if options.losses else difference_curves)(sweep, folder, options.x)
    if not curves:
        raise OptionError(
            f"{folder} has no {'run' if options.losses else 'pair of runs'} with a step yet: draw it later."
        )
    paths = [str(Path(path).expanduser()) for path in options.out or [DEFAULT_FILE]]
    title, share = options.title or sweep.title, SMOOTH if options.smooth is None else options.smooth
    if not 0 <= share <= 1:
        raise OptionError(f"--smooth must be between 0 and 1, got {share}.")
    if options.losses:
        panels = [{"title": title, "curves": curves}]
        draw_losses({"panels": panels, "axis": options.x, "label": "Loss", "smooth": share, "log": options.log}, paths)
    else:
        label = difference_label(sweep.differences.values())
        facts = {"title": title, "axis": options.x, "label": label, "log": options.log}
        draw_differences(facts | {"smooth": share, "curves": curves}, paths)
    return summarise(sweep, folder) | {"files": paths}

"""`kvfold plot`: the loss curves of training runs over each other."""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.errors import OptionError, TextError
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=str,
        help="folders of kvfold heal or pretrain, or NAME=FOLDER for another name in the legend; or one .yaml file "
        "with panels; or one folder of kvfold ablate",
    )
    parser.add_argument(
        "--out", nargs="+", type=str, metavar="FILE", help="one or more .png, .svg or .html files (default: losses.png)"
    )
    parser.add_argument("--title", type=str, metavar="TEXT", default="", help="of the panel")
    parser.add_argument(
        "--held-out", action="store_true", help="draw the losses on the held-out text instead of the training's"
    )
    parser.add_argument("--x", type=str, metavar="AXIS", default="step", help="step or tokens (default: step)")
    parser.add_argument(
        "--smooth", type=float, metavar="F", help="share of the points in one mean (default: 0.02; 0: none)"
    )
    sweep = parser.add_argument_group("of a sweep", "the differences between variants are drawn, paired by seed")
    sweep.add_argument("--losses", action="store_true", help="draw losses, means over the seeds, instead")
    sweep.add_argument("--log", action="store_true", help="draw steps or tokens on a log scale")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.cli.plot_sweep import is_sweep, run_sweep

    if len(options.runs) == 1 and is_sweep(options.runs[0]):
        return run_sweep(options)
    for name in ("losses", "log"):
        if options[name]:
            raise OptionError(f"--{name} is for the folder of a sweep of kvfold ablate: give one, or leave it out.")
    from kvfold.registry import lookup
    from kvfold.report.losses import AXES, SMOOTH, draw_losses, ends
    from kvfold.train.curve import CURVE_FILE, HELD_OUT_FILE

    lookup(AXES, options.x, "axis")
    share = (0.0 if options.held_out else SMOOTH) if options.smooth is None else options.smooth
    if not 0 <= share <= 1:
        raise OptionError(f"--smooth must be between 0 and 1, got {share}.")
    file = HELD_OUT_FILE if options.held_out else CURVE_FILE
    panels = [
        {"title": title, "curves": [_curve(name, folder, file, options.x) for name, folder in runs.items()]}
        for title, runs in _panels(options.runs, options.title).items()
    ]
    paths = [str(Path(path).expanduser()) for path in options.out or ["losses.png"]]
    label = "Loss on the held-out text" if options.held_out else "Loss"
    draw_losses({"panels": panels, "axis": options.x, "label": label, "smooth": share}, paths)
    rows = []
    for panel in panels:
        for curve in panel["curves"]:
            first, last = ends(curve["losses"], share)
            facts = {options.x: curve["x"][-1], "first_loss": first, "last_loss": last}
            rows.append({"panel": panel["title"], "name": curve["name"]} | facts)
    return {"curves": rows, "axis": options.x, "files": paths}


def _panels(runs: list[str], title: str) -> dict[str, dict[str, Path]]:
    """Folders by name of the curve, by title of the panel."""
    if len(runs) == 1 and runs[0].endswith((".yaml", ".yml")):
        if title:
            raise OptionError(f"--title is for runs; {runs[0]} gives the titles itself: leave --title out.")
        return _panels_of_file(Path(runs[0]).expanduser())
    named: dict[str, Path] = {}
    for run in runs:
        name, path = _named(run)
        if name in named:
            raise OptionError(f"two runs are called {name}: give one of them another name, NAME={path}.")
        named[name] = path
    return {title: named}


def _named(run: str) -> tuple[str, Path]:
    """Name and folder of FOLDER or NAME=FOLDER; both may have an `=`, so what is a folder decides."""
    parts = run.split("=")
    splits = [
        (parts[:place], Path("=".join(parts[place:])).expanduser()) for place in (0, *range(len(parts) - 1, 0, -1))
    ]
    before, path = next((split for split in splits if split[1].is_dir()), splits[len(parts) > 1])
    name = "=".join(before) if before else path.resolve().name
    if not name:
        raise OptionError(f"{run!r} has no name before the =: write NAME={path}, or the folder alone.")
    return name, path


def _panels_of_file(path: Path) -> dict[str, dict[str, Path]]:
    """Panels of a YAML file; its folders are relative to it."""
    import yaml

    try:
        text = path.read_text("utf-8")
        content: Any = yaml.safe_load(text)
        panels = {
            str(title): {str(name): path.parent / Path(folder).expanduser() for name, folder in runs.items()}
            for title, runs in content.items()
            if runs or _no_runs(path, title)
        }
        _check_once(path, yaml.compose(text, yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TextError(f"cannot read the figure {path}: {' '.join(str(error).split())}") from error
    except (AttributeError, TypeError) as error:
        raise OptionError(f"{path} must hold titles of panels with NAME: FOLDER lines below each.") from error
    if not panels:
        raise OptionError(f"{path} has no panels.")
    return panels


def _check_once(path: Path, node: Any) -> None:
    """Of a name that comes again in a mapping, YAML keeps the last one and says nothing."""
    for mapping in (node, *(runs for _, runs in node.value)):
        names = [name.value for name, _ in mapping.value]
        if again := [name for name in names if names.count(name) > 1]:
            raise OptionError(f"{path} has {again[0]!r} twice: give one of them another name.")


def _no_runs(path: Path, title: str) -> bool:
    raise OptionError(f"{path}: the panel {title!r} has no runs.")


def _curve(name: str, folder: Path, file: str, axis: str) -> dict[str, Any]:
    from kvfold.train.curve import CURVE_FILE, read_curve

    if file != CURVE_FILE and (folder / CURVE_FILE).exists() and not (folder / file).exists():
        raise TextError(f"the run {folder} was not measured on a held-out text: leave --held-out out.")
    rows = read_curve(folder, file)
    if not rows:
        raise TextError(f"the run {folder} has no step yet: draw it later.")
    return {"name": name, "x": [row[axis] for row in rows], "losses": [row["loss"] for row in rows]}


def show(result: Result) -> None:
    from kvfold.report.lab_tables import show_sweep
    from kvfold.report.tables import show_curves

    if "variants" in result:
        show_sweep(result)
        print(f"\nfigure: {', '.join(result['files'])}")
    else:
        show_curves(result)


COMMAND = Command(
    name="plot",
    summary="draw the losses of training runs over each other, or the differences in a sweep",
    usage="RUN [RUN ...] [--out FILE ...] [options]",
    description=(
        "Draw the losses of runs of kvfold heal or pretrain: the first one, which the others are held against, in "
        "black, noise faint under smoothed curves. For several panels give a .yaml file with NAME: FOLDER lines below "
        "each title. Of a sweep of kvfold ablate draw the paired differences of losses, and their spread over seeds."
    ),
    example=(
        "kvfold plot baseline healed --out losses.png losses.html\n"
        'kvfold plot "no conversion=runs/base" "d_kv=16=runs/16" --title "GQA2MLA: SmolLM2-135M" --x tokens\n'
        "kvfold plot figure1.yaml --out figure1.svg\n"
        "kvfold plot sweep --x tokens --out differences.png"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)

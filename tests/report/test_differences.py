"""The figure of differences: the mean and its band, zero, the legend, and the files."""

import numpy as np
import pytest

from kvfold.errors import KvfoldError, UnknownNameError
from kvfold.report.differences import COLOURS, DARK, difference_label, differences_figure, draw_differences
from kvfold.report.losses import smoothed


def curve(name, end, seeds=3, steps=400, **changes):
    x = np.arange(1, steps + 1)
    random = np.random.default_rng(steps)
    rows = [end + np.exp(-x / 5) + random.normal(0, 0.01, steps) for _ in range(seeds)]
    return {"name": name, "x": (512 * x).tolist(), "differences": [row.tolist() for row in rows]} | changes


@pytest.fixture
def record():
    curves = [curve("GQA", -0.1, colour="teal"), curve("MLA", -0.2), curve("GLA-2", 0.1, colour="grey")]
    return {
        "title": "Double heads",
        "axis": "tokens",
        "label": "Loss difference",
        "log": False,
        "smooth": 0.0,
        "curves": curves,
    }


def test_the_mean_of_the_seeds_is_drawn_with_a_band_of_their_deviation(record):
    record["curves"] = record["curves"][:1]
    axes = differences_figure(record).axes[0]
    seeds = np.array(record["curves"][0]["differences"])
    mean = max(axes.lines, key=lambda line: line.get_linewidth())
    np.testing.assert_allclose(mean.get_ydata(), seeds.mean(0))
    assert mean.get_color() == COLOURS["teal"]
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx((seeds.mean(0) + seeds.std(0, ddof=1)).max())
    assert any(set(np.atleast_1d(line.get_ydata())) == {0} for line in axes.lines)


def test_the_axis_shows_what_the_curves_come_to_and_zero_below_the_legend(record):
    axes = differences_figure(record).axes[0]
    bottom, top = axes.get_ylim()
    assert -0.4 < bottom < -0.2 and 0.1 < top < 0.6
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["GQA", "MLA", "GLA-2"]
    box = axes.get_legend().get_window_extent().transformed(axes.transData.inverted())
    assert box.y0 > 0.1 and box.x0 < 0.1 * axes.get_xlim()[1]
    assert axes.get_xlabel().startswith("training tokens") and axes.get_ylabel() == "Loss difference"


def test_seeds_are_smoothed_before_their_deviation_is_taken(record):
    record |= {"smooth": 0.1, "curves": record["curves"][:1]}
    axes = differences_figure(record).axes[0]
    seeds = np.array([smoothed(row, 0.1) for row in record["curves"][0]["differences"]])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx((seeds.mean(0) - seeds.std(0, ddof=1)).min())
    faint = [line.get_ydata() for line in axes.lines if line.get_alpha()]
    np.testing.assert_allclose(faint, seeds)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("start", [0.5, -0.5, 30.0, -30.0])
def test_nothing_is_drawn_behind_the_legend(record, start, log):
    record |= {"log": log, "curves": [curve("GQA: 16 over 8 heads, 1,024 bytes/token, 3.21 M", 0.1)] * 3}
    for row in record["curves"][0]["differences"]:
        row[:5] = [start] * 5
    figure = differences_figure(record)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    legend = axes.get_legend().get_window_extent()
    curves = [*(line for line in axes.lines if len(line.get_xdata()) > 2), *axes.collections]
    assert len(curves) == 3 * (3 + 1 + 1)
    assert all(artist.get_clip_box().y1 < legend.y0 for artist in curves)


def test_a_start_that_is_near_is_shown_and_a_wild_one_cut_off_and_told(record):
    record["curves"] = [{"name": "a", "x": list(range(1, 101)), "differences": [[0.3] + [0.1, 0.2] * 49 + [0.2]]}]
    axes = differences_figure(record).axes[0]
    assert axes.get_ylim()[1] > 0.3 and axes.get_xlabel() == "training tokens"
    record["curves"][0]["differences"][0][0] = -5.0
    axes = differences_figure(record).axes[0]
    assert -0.1 < axes.get_ylim()[0] < 0
    assert axes.get_xlabel() == "training tokens (start cut off, \N{MINUS SIGN}5.00 to 0.20)"


def test_one_seed_has_no_band_and_a_log_axis_is_one(record):
    record |= {"log": True, "curves": [curve("GQA", 0.1, seeds=1)]}
    axes = differences_figure(record).axes[0]
    assert not axes.collections and axes.get_xscale() == "log"
    assert len(axes.lines) == 2 and axes.get_xlim() == (512, 512 * 400)


def test_a_curve_without_a_colour_takes_one_that_no_other_names(record):
    record["curves"] = [
        curve("_a", 0.1, colour="blue"),
        curve("b", 0.1),
        curve("c", 0.1),
        curve("d", 0.1, colour="grey"),
    ]
    legend = differences_figure(record).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["_a", "b", "c", "d"]
    expected = [COLOURS[name] for name in ("blue", "teal", "orange", "grey")]
    assert [line.get_color() for line in legend.get_lines()] == expected


def test_ticks_of_many_tokens_are_short(record):
    record["curves"] = [{"name": "a", "x": [1, 6_000_000_000], "differences": [[0.1, 0.2]]}]
    ticks = [text.get_text() for text in differences_figure(record).axes[0].get_xticklabels()]
    assert {"0", "2B"} <= set(ticks)
    record |= {"axis": "step"}
    assert differences_figure(record).axes[0].get_xlabel() == "#Step"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("x", [[0], [512], [0, 1]])
def test_runs_that_have_only_begun_can_be_drawn(record, x, log):
    record |= {"log": log, "curves": [{"name": "a", "x": x, "differences": [[0.0] * len(x)] * 2}]}
    mean = max(differences_figure(record).axes[0].lines, key=lambda line: line.get_linewidth())
    assert mean.get_marker() == "o"


def test_files(record, tmp_path):
    paths = [tmp_path / name for name in ("a.png", "a.svg", "a.html")]
    draw_differences(record, paths)
    assert all(path.stat().st_size > 10_000 for path in paths)
    page = paths[2].read_text()
    assert "<title>kvfold: Double heads</title>" in page and "http" not in page.split("<svg")[0]


def test_the_page_has_the_colours_of_both_themes_and_no_other(record, tmp_path):
    draw_differences(record, [tmp_path / "a.html"])
    head, drawn = (tmp_path / "a.html").read_text().split("<svg")
    light, dark = head.split("prefers-color-scheme: dark")
    assert list(DARK) == list(COLOURS)
    for place, name in enumerate(COLOURS, start=1):
        assert f"--line-{place}: {COLOURS[name]};" in light and f"--line-{place}: {DARK[name]};" in dark
    assert all(f"var(--line-{place})" in drawn for place in (1, 2, 3))
    assert not any(colour in drawn for colour in COLOURS.values())


def test_mistakes(record, tmp_path):
    with pytest.raises(KvfoldError, match="unknown suffix of a figure"):
        draw_differences(record, [tmp_path / "a.gif"])
    record["curves"][0]["colour"] = "teel"
    with pytest.raises(UnknownNameError, match="unknown colour 'teel'. Did you mean 'teal'"):
        draw_differences(record, [tmp_path / "a.png"])


def test_the_axis_names_a_baseline_that_all_share():
    assert difference_label([("MQA", "MHA"), ("MLA", "MHA")]) == "Loss minus that of MHA, nats"
    assert difference_label([("GQA-double", "GQA"), ("MLA-double", "MLA")]) == "Loss difference, nats"

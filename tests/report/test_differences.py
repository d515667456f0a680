"""The figure of differences: the mean and its band, zero, the legend, and the files."""

import numpy as np
import pytest

from kvfold.errors import KvfoldError
from kvfold.report.differences import COLOURS, differences_figure, draw_differences


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
    mean = next(line for line in axes.lines if line.get_label() == "GQA")
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
    assert axes.get_xlabel() == "training tokens" and axes.get_ylabel() == "Loss difference"


def test_one_seed_has_no_band_and_a_log_axis_is_one(record):
    record |= {"log": True, "curves": [curve("GQA", 0.1, seeds=1)]}
    axes = differences_figure(record).axes[0]
    assert not axes.collections and axes.get_xscale() == "log"


def test_files(record, tmp_path):
    paths = [tmp_path / name for name in ("a.png", "a.svg", "a.html")]
    draw_differences(record, paths)
    assert all(path.stat().st_size > 10_000 for path in paths)
    assert "<title>kvfold: Double heads</title>" in paths[2].read_text()


def test_mistakes(record, tmp_path):
    with pytest.raises(KvfoldError, match="unknown suffix of a figure"):
        draw_differences(record, [tmp_path / "a.gif"])
    record["curves"][0]["colour"] = "teel"
    with pytest.raises(KvfoldError, match="unknown colour 'teel'. Did you mean 'teal'"):
        draw_differences(record, [tmp_path / "a.png"])

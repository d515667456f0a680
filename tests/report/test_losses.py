"""The figure of losses: smoothing against a naive twin, the part that is shown, and the files."""

import numpy as np
import pytest

from kvfold.errors import KvfoldError
from kvfold.report.losses import draw_losses, ends, losses_figure, smoothed


def curve(name, start, end, steps=400):
    x = np.arange(1, steps + 1)
    noise = np.random.default_rng(steps).normal(0, 0.05, steps)
    return {"name": name, "x": x.tolist(), "losses": (end + (start - end) * np.exp(-x / 20) + noise).tolist()}


@pytest.fixture
def record():
    curves = [curve("baseline", 3.0, 2.9), curve("d_kv=16", 14.0, 3.1)]
    panels = [{"title": "MHA2MLA: a", "curves": curves}, {"title": "GQA2MLA: b", "curves": curves[:1]}]
    return {"panels": panels, "axis": "step", "label": "Loss", "smooth": 0.05}


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_smoothing_is_a_mean_of_neighbours(count, share):
    losses = np.random.default_rng(count).normal(size=count).tolist()
    reach = round(share * count / 2)
    naive = [np.mean(losses[max(place - reach, 0) : place + reach + 1]) for place in range(count)]
    np.testing.assert_allclose(smoothed(losses, share), naive, rtol=1e-9, atol=1e-12)


def test_ends_are_means():
    assert ends([4.0, 2.0, 1.0, 3.0], 0.5) == (3.0, 2.0)
    assert ends([4.0], 0.02) == (4.0, 4.0)


def test_what_the_curves_come_down_to_fills_the_panel_and_the_rest_is_told(record):
    above, below = losses_figure(record).axes
    assert 3.0 < above.get_ylim()[1] < 6 and above.get_xlim() == (0, 400)
    assert above.get_title("left") == "MHA2MLA: a" and above.get_title("right").startswith("cut off: 1 of 2, up to 13.")
    assert below.get_title("right") == "" and below.get_xlabel() == "#Step"
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["baseline", "d_kv=16"]


def test_a_curve_that_stays_high_is_not_cut_off(record):
    record["panels"][0]["curves"].append(curve("stuck", 9.0, 8.9))
    assert losses_figure(record).axes[0].get_ylim()[1] > 9


def test_a_spike_that_is_cut_off_is_told(record):
    record["panels"][1]["curves"][0]["losses"][200] = 50.0
    assert losses_figure(record).axes[1].get_title("right") == "cut off: 1 of 1, up to 50.0"


@pytest.mark.parametrize("count", [2, 4, 10])
def test_no_curve_is_behind_the_legend(record, count):
    record["panels"] = [{"title": "", "curves": [curve(f"{place}", 4.0, 3.5 + place / 9) for place in range(count)]}]
    axes = losses_figure(record).axes[0]
    box = axes.get_legend().get_window_extent().transformed(axes.transData.inverted())
    for drawn in record["panels"][0]["curves"]:
        behind = np.asarray(drawn["x"]) >= box.x0
        assert behind.any() and smoothed(drawn["losses"], 0.05)[behind].max() < box.y0


def test_every_curve_is_in_the_legend_and_looks_its_own(record):
    names = ["_old", *(f"{place}" for place in range(8))]
    record["panels"] = [{"title": "", "curves": [curve(name, 4.0, 3.0) for name in names]}]
    legend = losses_figure(record).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == names
    assert len({(line.get_color(), line.get_linestyle()) for line in legend.get_lines()}) == 9


def test_ticks_of_many_tokens_are_short(record):
    record["panels"][0]["curves"] = [{"name": "a", "x": [1, 6_000_000_000], "losses": [3.0, 2.0]}]
    ticks = [text.get_text() for text in losses_figure(record | {"axis": "tokens"}).axes[0].get_xticklabels()]
    assert {"0", "2B"} <= set(ticks)


def test_a_single_point_is_seen(record):
    record["panels"] = [{"title": "", "curves": [{"name": "a", "x": [0], "losses": [3.0]}]}]
    assert losses_figure(record).axes[0].get_lines()[-1].get_marker() == "o"


@pytest.mark.parametrize("losses", [[3.0], [3.0, 3.0], [14.0, 3.0, 2.9]])
def test_a_run_that_has_only_begun_can_be_drawn(record, losses):
    short = {"name": "short", "x": list(range(1, len(losses) + 1)), "losses": losses}
    losses_figure(record | {"panels": [{"title": "", "curves": [short]}]})


def test_the_same_record_gives_the_same_files(record, tmp_path):
    files = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        paths = [folder / f"losses{suffix}" for suffix in (".png", ".svg", ".html")]
        draw_losses(record, paths)
        files.append([path.read_bytes() for path in paths])
    assert files[0] == files[1]
    page = files[0][2].decode()
    assert "var(--line-1)" in page and "<svg" in page and "http" not in page.split("<svg")[0]
    assert "MHA2MLA: a" in page


def test_another_format_is_refused_before_anything_is_written(record, tmp_path, one_line):
    with pytest.raises(KvfoldError) as error:
        draw_losses(record, [tmp_path / "a.png", tmp_path / "a.pdf"])
    assert ".pdf" in one_line(error) and ".svg" in one_line(error)
    assert not list(tmp_path.iterdir())

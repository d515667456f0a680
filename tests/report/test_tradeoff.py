import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from kvfold.errors import OutputError, UnknownNameError
from kvfold.report import tradeoff as module
from kvfold.report.curves import curves, ratio_limits, ratio_ticks, share_ticks
from kvfold.report.tradeoff import draw_tradeoff, tradeoff_figure


def shown_texts(figure: Figure) -> list[Text]:
    figure.canvas.draw()
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def test_both_files_are_written_and_nothing_else(any_tradeoff, tmp_path):
    paths = draw_tradeoff(any_tradeoff, tmp_path / "fig.v1")
    assert paths == [tmp_path / "fig.v1.png", tmp_path / "fig.v1.svg"]
    assert sorted(tmp_path.iterdir()) == paths
    assert imread(paths[0]).shape[:2] == (920, 1360)
    ElementTree.parse(paths[1])


def test_the_same_result_gives_the_same_files(tradeoff, tmp_path):
    first, second = (draw_tradeoff(tradeoff, tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_texts_keep_their_distance_and_stay_inside(any_tradeoff):
    figure = tradeoff_figure(any_tradeoff)
    boxes = {text: text.get_window_extent() for text in shown_texts(figure)}
    for (a, first), (b, second) in combinations(boxes.items(), 2):
        assert not first.overlaps(second), (a.get_text(), b.get_text())
    page = figure.bbox.padded(1)
    assert all(page.containsx(box.x0) and page.containsx(box.x1) for box in boxes.values())
    assert all(page.containsy(box.y0) and page.containsy(box.y1) for box in boxes.values())


def test_names_cover_no_point(tradeoff):
    figure = tradeoff_figure(tradeoff)
    axes = figure.axes[0]
    figure.canvas.draw()
    points = axes.transData.transform([point[:2] for curve in curves(tradeoff) for point in curve.points])
    assert {text.get_text() for text in axes.texts} == {"original", "mixed", "assigned", "rorope"}
    for text in axes.texts:
        x, y = points.T
        box = text.get_window_extent()
        assert not ((box.x0 < x) & (x < box.x1) & (box.y0 < y) & (y < box.y1)).any(), text.get_text()


def test_values_off_the_scale_are_written_out(tradeoff):
    _, strip = tradeoff_figure(tradeoff).axes
    texts = [text.get_text() for text in strip.texts]
    assert texts == ["1,750", "1,040", "226", "120", "80", "2-norm + svd_joint", "rorope"]
    tradeoff["points"] = [point for point in tradeoff["points"] if point["name"] in ("original", "mixed")]
    assert len(tradeoff_figure(tradeoff).axes) == 1


def test_the_axis_ends_beyond_all_but_the_far_off(tradeoff):
    bottom, top = ratio_limits(curves(tradeoff))
    assert 0.8 < bottom < 1
    assert 14 < top < 20  # ten times the worst of `mixed` is 66: nothing between 14 and 80 calls for more
    assert ratio_ticks(bottom, top) == [1, 10, 2, 5, 1.5, 15, 3, 7]


def test_a_ratio_without_end_is_off_the_scale(tradeoff):
    tradeoff["points"][-1]["perplexity"] = float("inf")
    _, strip = tradeoff_figure(tradeoff).axes
    assert "inf" in {text.get_text() for text in strip.texts}


def test_curves_tell_methods_caches_and_predictions_apart(tradeoff):
    found = curves(tradeoff)
    assert [curve.label for curve in found] == [
        "original",
        "mixed, predicted",
        "mixed",
        "mixed, int8, predicted",
        "mixed, int4, predicted",
        "assigned",
        "rorope",
        "2-norm + svd_joint",
    ]
    assert found[0].points == ((313, 1.02, "int4"), (563, pytest.approx(1.001), "int8"), (1000, 1.0, "bfloat16"))
    assert len({curve.colour for curve in found}) == 5
    assert all(list(curve.points) == sorted(curve.points) for curve in found)


def test_ticks_are_the_budgets_and_halvings_between_them(tradeoff):
    assert sorted(share_ticks(curves(tradeoff), 1000)) == [0.0625, 0.125, 0.188, 0.313, 0.5, 1.0]


def test_an_unknown_cache_is_named(tradeoff):
    tradeoff["points"][0]["cache"] = "int9"
    with pytest.raises(UnknownNameError, match=r"unknown cache 'int9'\. Did you mean 'int"):
        tradeoff_figure(tradeoff)


def test_a_failure_leaves_the_old_files(tradeoff, tmp_path, monkeypatch):
    draw_tradeoff(tradeoff, tmp_path / "fig")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "replace", fail)
    with pytest.raises(OutputError, match=r"cannot write .*fig\.png: .*No space left on device"):
        draw_tradeoff(tradeoff, tmp_path / "fig")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_folder_is_named(tradeoff, tmp_path):
    with pytest.raises(OutputError, match=r"cannot write .*none/fig\.png: .*No such file or directory"):
        draw_tradeoff(tradeoff, tmp_path / "none" / "fig")

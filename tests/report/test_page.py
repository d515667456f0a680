import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from kvfold.errors import OutputError
from kvfold.report import render_demo, save_report
from kvfold.report.figures import CSS_NAMES, draw, svg
from kvfold.report.page import verdict


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href") and value]


def test_the_page_needs_nothing_but_itself(results):
    page = Parsed(render_demo(results))
    assert page.tags.count("svg") == 4
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert all(link.startswith("#") for link in page.links)


def test_the_page_shows_the_numbers(results):
    page = render_demo(results)
    for text in (
        "31.25 %",
        "4.00x",
        "1.20x",
        "120 of 384",
        "61.2 s",
        "kvfold demo",
        "0.5 nats per token",
        "2026-11-30",
    ):
        assert text in page


def test_text_is_escaped(results):
    page = render_demo(results)
    assert "tiny &lt;model&gt;" in page
    assert "<b>light</b>" not in page


def test_optional_parts_may_be_missing(results):
    results["per_layer"] = {}
    for row in results["rows"]:
        row["tokens_per_second"] = row["decode_ratio"] = None
    assert Parsed(render_demo(results)).tags.count("svg") == 2


def test_the_verdict_names_the_baseline_of_the_same_size(results):
    text = verdict(results["rows"])
    assert "keeps 31.25 % of the cache; perplexity goes from 30 to 120 (4.00x)" in text
    assert "At 31.25 %, original, int4 cache keeps more quality: 31 (1.03x)" in text
    results["rows"][2]["perplexity"] = 500.0
    assert "int4 cache loses more quality" in verdict(results["rows"])
    assert "int4" not in verdict(results["rows"][:2])


def test_figures_are_xml_in_the_colours_of_the_page(results):
    for figure in draw(results).values():
        text = svg(figure)
        ElementTree.fromstring(text)
        assert not any(colour in text for colour in CSS_NAMES)
        assert "var(--ink)" in text or "var(--muted)" in text


def test_the_same_results_give_the_same_figures(results):
    first, second = ({name: svg(figure) for name, figure in draw(results).items()} for _ in range(2))
    assert first == second


@pytest.mark.parametrize("perplexity", [30.0, 30.5, 45.0, 10_000.0])
def test_names_in_the_quality_figure_keep_their_distance(results, perplexity):
    results["rows"][1]["perplexity"] = perplexity
    figure = draw(results)["quality"]
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    assert len(figure.axes[0].get_yticks()) >= 2


def test_a_saved_report_replaces_the_old_one(results, tmp_path):
    folder = tmp_path / "report"
    save_report(results, folder)
    (folder / "stale.txt").touch()
    page = save_report(results, folder)
    assert page == (folder / "index.html").resolve()
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.html", "results.json", "quality.png", "cache.png", "speed.png", "layers.png"}
    assert json.loads((folder / "results.json").read_text()) == results
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failure_leaves_the_old_report(results, tmp_path):
    folder = tmp_path / "report"
    save_report(results, folder)
    results["provenance"]["date"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_report(results, folder)
    assert (folder / "index.html").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_in_the_way(results, tmp_path):
    (tmp_path / "report").touch()
    with pytest.raises(OutputError, match="existing file"):
        save_report(results, tmp_path / "report")

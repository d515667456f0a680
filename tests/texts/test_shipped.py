"""The shipped texts: present, clean, broad from the start, and licensed."""

from kvfold.texts import CALIBRATION, EVALUATION


def test_the_calibration_text_is_long_and_its_start_is_as_broad_as_the_whole():
    text = CALIBRATION.read_text("utf-8")
    assert 550_000 < len(text) < 650_000
    excerpts = text.split("\n\n\n")
    assert len(excerpts) == len(set(excerpts)) == 15 * 10
    assert max(map(len, excerpts)) < 6_000


def test_the_evaluation_text_starts_at_a_chapter():
    text = EVALUATION.read_text("utf-8")
    assert 110_000 < len(text) < 130_000
    assert text.startswith("II\n\n")


def test_every_shipped_text_has_its_licence():
    licences = (CALIBRATION.parent / "LICENSES.md").read_text("utf-8")
    for path in CALIBRATION.parent.glob("*.txt"):
        assert f"## {path.name}:" in licences

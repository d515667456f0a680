"""Small files appear whole or not at all."""

import json
import os

import pytest

from kvfold.checkpoint import write_json, write_text
from kvfold.errors import OutputError


def test_text_and_json(tmp_path):
    write_text(tmp_path / "a.txt", "één\n")
    write_text(tmp_path / "a.txt", "zwei\n")
    write_json(tmp_path / "a.json", {"k": [1, 2.5, "é"]})
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "zwei\n"
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"k": [1, 2.5, "é"]}
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.txt"]


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("parent", ["none", "file"])
def test_unwritable(tmp_path, parent, one_line):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write") as error:
        write_text(tmp_path / parent / "a.txt", "text")
    one_line(error)
    assert os.listdir(tmp_path) == ["file"]

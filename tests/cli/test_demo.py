"""`kvfold demo`: it replaces only what an earlier demo wrote. (The demo itself runs in `make demo`.)"""

import pytest


@pytest.mark.parametrize("option", ["--out", "--converted"])
def test_a_folder_with_other_content_is_left_alone(option, tmp_path, mistake):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    other = {"--out": "--converted", "--converted": "--out"}[option]
    message = mistake("demo", option, str(folder), other, str(tmp_path / "new"))
    assert message.startswith(f"{folder} holds something else (it has no ")
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]

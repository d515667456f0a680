import re
from pathlib import Path

import pytest

from kvfold.cli import main as cli


@pytest.fixture
def mistake(capsys):
    """Runs a wrong command line and returns the one line that it prints, without its prefix."""

    def line(*argv):
        assert cli.main(argv) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        prefix = "kvfold: error: "
        assert printed.err.startswith(prefix)
        return printed.err.removeprefix(prefix).rstrip("\n")

    return line


@pytest.fixture
def refused(tmp_path, capsys):
    """Like `mistake`, for commands that may report progress before they fail; they must leave `tmp_path` as it was."""

    def line(*argv):
        before = content(tmp_path)
        capsys.readouterr()
        assert cli.main(argv) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        *progress, last = printed.err.removesuffix("\n").split("\n")
        assert all(re.fullmatch(r"[a-z ]+ \.\.\.", stage) for stage in progress), progress
        assert content(tmp_path) == before
        prefix = "kvfold: error: "
        assert last.startswith(prefix)
        return last.removeprefix(prefix)

    return line


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}

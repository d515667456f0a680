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

import importlib
import json
import subprocess
import sys

from kvfold.provenance import provenance

module = importlib.import_module("kvfold.provenance")  # the package's own attribute is the function


def test_it_is_complete_and_json(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/kvfold", "demo", "--out", "my report"])
    record = provenance(seed=3)
    assert json.loads(json.dumps(record)) == record
    assert set(record) == {"commit", "versions", "hardware", "seed", "command", "date"}
    assert set(record["versions"]) == {"python", "kvfold", "torch", "transformers"}
    assert record["seed"] == 3
    assert record["command"] == "kvfold demo --out 'my report'"
    assert record["date"].endswith("+00:00")
    assert record["hardware"]["cores"] >= 1
    assert provenance(command="runs/x.sh")["command"] == "runs/x.sh"


def test_commit_of_a_checkout(tmp_path, monkeypatch):
    file = tmp_path / "code.py"
    file.touch()
    monkeypatch.setattr(module, "__file__", str(file))
    assert module.commit() is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "empty")
    assert module.commit() is None  # the file is not part of it
    git("add", "code.py")
    git("commit", "-m", "code")
    clean = module.commit()
    assert len(clean) == 40
    file.write_text("x = 1")
    assert module.commit() == f"{clean}-dirty"

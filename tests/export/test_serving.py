"""The commands that serve exports; llama.cpp's server answers."""

import json
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from kvfold.cli import main as cli
from kvfold.errors import KvfoldError
from kvfold.export import export, serve_command, serving

SIZES = {"vocab_size": 264, "hidden_size": 64, "head_dim": 32, "eos_token_id": 0}


@pytest.fixture
def tokenizer(byte_level_tokenizer):
    return byte_level_tokenizer


@pytest.fixture
def file(convert, speak_ascii, tmp_path) -> Path:
    export(speak_ascii(convert(**SIZES)), tmp_path / "out.gguf")
    return tmp_path / "out.gguf"


@pytest.fixture
def folder(convert, tmp_path) -> Path:
    export(convert(**SIZES), tmp_path / "out")
    return tmp_path / "out"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answer(port: int, process: subprocess.Popen) -> dict:
    """What the server completes, once it is there."""
    body = json.dumps({"prompt": "the cat", "max_tokens": 4}).encode()
    request = Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    for _ in range(200):
        assert process.poll() is None, "the server ended"
        try:
            return json.load(urlopen(request, timeout=30))
        except URLError:  # not yet
            time.sleep(0.3)
    raise AssertionError("no answer")


def test_llamacpps_server_answers_and_ends(file, monkeypatch):
    monkeypatch.setattr(serving.shutil, "which", lambda _: None)
    port = free_port()
    process = subprocess.Popen(
        serve_command(file, port=port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert answer(port, process)["usage"]["completion_tokens"] > 0
    finally:
        process.terminate()
        process.wait(30)


def test_a_llama_server_is_preferred(file, tmp_path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    server = tmp_path / "bin" / "llama-server"
    server.write_text("#!/bin/sh\nexit 3\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(server.parent), prepend=":")
    assert cli.main(["serve", str(file), "--port", "99", "--dry-run"]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed == [str(server), "-m", str(file), "--host", "127.0.0.1", "--port", "99"]
    assert cli.main(["serve", str(file)]) == 1
    assert "ended with code 3" in capsys.readouterr().out


def test_settings_with_which_vllm_is_right_on_cpus(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "check_installed", lambda *_: None)
    export(convert(**SIZES | {"head_dim": 64}), tmp_path / "out", runtime="vllm")
    for on_cpus in (True, False):
        monkeypatch.setattr(serving, "_on_cpus", lambda _, here=on_cpus: here)
        command = shlex.join(serve_command(tmp_path / "out"))
        assert "--dtype float32" in command
        assert ('--attention-backend CPU_MLA --compilation-config \'{"custom_ops": ["none"]}\'' in command) is on_cpus


@pytest.mark.parametrize("uvicorn", [True, False])
def test_transformers_serves_where_its_server_is_installed(uvicorn, folder, monkeypatch, one_line):
    monkeypatch.setattr(serving, "has_module", lambda *_: uvicorn)
    if uvicorn:
        program = str(Path(sys.executable).with_name("transformers"))
        assert serve_command(folder)[:3] == [program, "serve", str(folder)]
        return
    with pytest.raises(KvfoldError) as error:
        serve_command(folder)
    assert "pip install 'transformers[serving]'" in one_line(error)


def test_mistakes_are_one_line(folder, tmp_path, one_line):
    for path, options, expected in (
        (tmp_path / "nothing", {}, "is no export"),
        (folder, {"port": 70000}, "a port is from 1 to 65535, got 70000."),
        (folder, {"python": "no-python"}, "cannot run 'no-python'"),
    ):
        with pytest.raises(KvfoldError) as error:
            serve_command(path, **options)
        assert expected in one_line(error)
    facts = folder / "kvfold-export.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"runtime": "vllm"}))
    with pytest.raises(KvfoldError) as error:
        serve_command(folder)
    assert "vLLM is not installed for" in one_line(error)

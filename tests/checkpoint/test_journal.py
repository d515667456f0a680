"""The journal of a long run: every bit comes back, nothing damaged does, and a kill at any moment loses one step."""

import json
import os
import random
import resource
import signal
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from kvfold.checkpoint import Journal
from kvfold.errors import OutputError

KEY = {"source": "abc", "options": {"cache_ratio": 0.1, "layers": (1, 2)}, "version": 1}


def run(folder: Path, report: Connection) -> None:
    """Thirty steps: each saves a result and replaces the state it goes on from. Reports its beginning and each step."""
    journal = Journal(folder, {"run": 1})
    assert journal.discarded is None
    state, total, start = torch.arange(5000, dtype=torch.float64), 0.1, 0
    if journal.resumed_from is not None:
        tensors, facts = journal.load("state")
        state, total, start = tensors["state"], facts["total"], facts["step"] + 1
        assert journal.resumed_from == f"step {facts['step']}"
    assert sorted(journal.entries) == sorted([f"step {i}" for i in range(start)] + ["state"] * (start > 0))
    report.send(start)
    for step in range(start, 30):
        state = torch.sin(state * 1.1 + step)
        total = total * 1.01 + state.sum().item()
        new_state = ({"state": state}, {"total": total, "step": step})
        journal.update({"state": new_state, f"step {step}": ({"x": state[::7]}, {"total": total})})
        report.send(step)


def run_and_kill(folder: Path, delay: float | None) -> tuple[int, int | None]:
    """Where a process began, and its exit code; it is killed `delay` seconds after its first step."""
    context = get_context("fork")  # a new interpreter would take seconds to import torch
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(folder, sender))
    process.start()
    sender.close()
    try:
        start = receiver.recv()
        if delay is not None and start < 30:
            receiver.recv()
            time.sleep(delay)
            process.kill()
        process.join(60)
    finally:
        process.kill()
        receiver.close()
    return start, process.exitcode


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def contents(journal: Journal) -> dict[str, tuple]:
    loaded = {name: journal.load(name) for name in journal.entries}
    return {
        name: ({k: (v.dtype, v.shape, bits(v)) for k, v in tensors.items()}, facts)
        for name, (tensors, facts) in loaded.items()
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def filled(folder) -> Path:
    journal = Journal(folder, KEY)
    journal.save("layer 0", {"a": torch.ones(4)}, {"error": 0.5})
    journal.save("layer 1", {"a": torch.zeros(3)})
    journal.save("layer 2", {"a": torch.zeros(2)})
    return folder


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"],
)
def test_every_bit_comes_back(folder, dtype):
    dtype = getattr(torch, dtype)
    raw = torch.randint(0, 256, (3, 4, dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(0))
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype)[..., 0]
    Journal(folder, KEY).save("step", {"x": tensor})
    loaded, _ = Journal(folder, KEY).load("step")
    assert loaded["x"].dtype == dtype
    assert loaded["x"].shape == (3, 4)
    assert bits(loaded["x"]) == bits(tensor)


def test_special_values(folder):
    values = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)
    Journal(folder, KEY).save("step", {"x": values})
    assert bits(Journal(folder, KEY).load("step")[0]["x"]) == bits(values)


def test_tensors_of_any_layout(folder):
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "z transposed": whole.T,
        "rows": whole[1:],
        "whole": whole,
        "again": whole,
        "flat": whole.view(12),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "parameter": torch.nn.Parameter(whole[:, 1]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "nothing": torch.zeros(0),
    }
    Journal(folder, KEY).save("step", tensors)
    loaded, facts = Journal(folder, KEY).load("step")
    assert list(loaded) == list(tensors)  # their order too
    assert facts == {}
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)
    loaded["whole"].zero_()
    assert torch.equal(loaded["again"], whole)


def test_facts_are_the_same_before_and_after_a_restart(folder):
    facts = {"error": 0.1 + 0.2, "pairs": (1, 2), "name": "é", "none": None, "deep": {"x": [1e-300, True]}}
    journal = Journal(folder, KEY)
    journal.save("facts alone", {}, facts)
    wanted = facts | {"pairs": [1, 2]}
    for opened in (journal, Journal(folder, KEY)):
        tensors, loaded = opened.load("facts alone")
        assert tensors == {}
        assert loaded == wanted
        loaded["deep"]["x"].append(0)
        assert opened.load("facts alone")[1] == wanted


def test_what_is_no_json_is_refused(folder):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Journal(folder, {"loss": float("nan")})
    journal = Journal(folder, KEY)
    with pytest.raises(TypeError):
        journal.save("step", {}, {"set": {1}})
    assert Journal(folder, KEY).entries == ()


def test_a_new_journal_is_empty(folder):
    journal = Journal(folder, KEY)
    assert (journal.entries, journal.resumed_from, journal.discarded) == ((), None, None)
    assert not folder.exists()


def test_resumes_after_the_last_step(filled):
    journal = Journal(filled, json.loads(json.dumps(KEY)))
    assert journal.entries == ("layer 0", "layer 1", "layer 2")
    assert (journal.resumed_from, journal.discarded) == ("layer 2", None)
    assert journal.load("layer 0")[1] == {"error": 0.5}
    journal.save("layer 3", {})
    assert journal.resumed_from == "layer 2"
    assert Journal(filled, KEY).resumed_from == "layer 3"


def test_only_the_newest_state_is_kept(folder):
    journal = Journal(folder, KEY)
    for step in range(12):
        journal.replace("state", {"x": torch.full((2,), step)}, {"step": step})
    for opened in (journal, Journal(folder, KEY)):
        assert opened.entries == ("state",)
        tensors, facts = opened.load("state")
        assert (tensors["x"].tolist(), facts) == ([11, 11], {"step": 11})
    assert sorted(os.listdir(folder)) == ["000012.safetensors", "journal.json"]


def test_a_replaced_step_counts_as_new(filled):
    journal = Journal(filled, KEY)
    journal.replace("layer 0", {})
    assert journal.entries == Journal(filled, KEY).entries == ("layer 1", "layer 2", "layer 0")


def test_steps_change_together(filled):
    journal = Journal(filled, KEY)
    journal.update({"state": ({}, {"at": 3}), "layer 1": ({}, {"new": True})}, drop=("layer 0",))
    for opened in (journal, Journal(filled, KEY)):
        assert opened.entries == ("layer 2", "state", "layer 1")
        assert opened.load("layer 1")[1] == {"new": True}
    journal.drop("state")
    assert Journal(filled, KEY).entries == ("layer 2", "layer 1")
    assert len(os.listdir(filled)) == 3


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"source": "other"}, "source"),
        ({"version": True}, "version"),
        ({"version": 1.0}, "version"),
        ({"extra": None}, "extra"),
        ({"options": {"cache_ratio": 0.1}, "source": ""}, "options, source"),
    ],
)
def test_another_key(filled, change, names):
    journal = Journal(filled, KEY | change)
    assert (journal.entries, journal.resumed_from) == ((), None)
    assert journal.discarded == f"it was made with another {names}"
    assert os.listdir(filled) == []
    journal.save("layer 0", {"a": torch.ones(1)})
    assert Journal(filled, KEY | change).entries == ("layer 0",)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)


DAMAGES = {
    "step truncated": lambda folder: truncate(folder / "000002.safetensors", -1),
    "step empty": lambda folder: truncate(folder / "000003.safetensors", 0),
    "step longer": lambda folder: truncate(folder / "000003.safetensors", 4096),
    "step changed": lambda folder: flip(folder / "000001.safetensors", -1),
    "step header changed": lambda folder: flip(folder / "000001.safetensors", 12),
    "step lost": lambda folder: (folder / "000001.safetensors").unlink(),
    "steps exchanged": lambda folder: (folder / "000001.safetensors").replace(folder / "000002.safetensors"),
    "index truncated": lambda folder: truncate(folder / "journal.json", -20),
    "index empty": lambda folder: truncate(folder / "journal.json", 0),
    "index a list": lambda folder: (folder / "journal.json").write_text("[]"),
    "index an object": lambda folder: (folder / "journal.json").write_text("{}"),
    "index not UTF-8": lambda folder: (folder / "journal.json").write_bytes(b"\xff\xfe"),
    "fact changed": lambda folder: (folder / "journal.json").write_text(
        (folder / "journal.json").read_text().replace("0.5", "0.6")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_journal_is_never_trusted(filled, damage):
    damage(filled)
    journal = Journal(filled, KEY)
    assert (journal.entries, journal.resumed_from, journal.discarded) == ((), None, "it is damaged")
    assert os.listdir(filled) == []
    journal.save("layer 0", {"a": torch.ones(1)})
    assert Journal(filled, KEY).entries == ("layer 0",)


def test_every_byte_of_the_index_counts(filled):
    """Whatever single byte of it changes, what is read is as it was written or nothing."""
    index = filled / "journal.json"
    sound = contents(Journal(filled, KEY))
    files = {path: path.read_bytes() for path in filled.iterdir()}
    for position in range(0, len(files[index]), 7):
        flip(index, position)
        journal = Journal(filled, KEY)
        assert journal.entries == () or contents(journal) == sound
        for path, data in files.items():
            path.write_bytes(data)


def test_another_format(filled, monkeypatch):
    monkeypatch.setattr("kvfold.checkpoint.journal._FORMAT", 2)
    assert Journal(filled, KEY).discarded == "it was made by another version"


def test_damage_after_opening_is_one_line(filled, one_line):
    journal = Journal(filled, KEY)
    truncate(filled / "000002.safetensors", 10)
    with pytest.raises(OutputError, match="cannot read step 'layer 1' in ") as error:
        journal.load("layer 1")
    one_line(error)


def test_what_a_killed_process_left_half_is_removed_and_nothing_else(filled):
    for name in ("000004.safetensors", ".journal.json.partial-77", ".tmpa1B2c3", "model.safetensors", "notes.txt"):
        (filled / name).write_text("half")
    steps = [f"00000{number}.safetensors" for number in (1, 2, 3)]
    assert Journal(filled, KEY).entries == ("layer 0", "layer 1", "layer 2")
    assert sorted(os.listdir(filled)) == [*steps, "journal.json", "model.safetensors", "notes.txt"]
    assert Journal(filled, {}).entries == ()
    assert sorted(os.listdir(filled)) == ["model.safetensors", "notes.txt"]


@pytest.mark.parametrize("step", ["write_tensors", "write_json", "sync", "sha256_of"])
@pytest.mark.parametrize("call", [0, 1])
def test_a_failure_leaves_the_journal_as_before_or_as_after(filled, monkeypatch, one_line, step, call):
    before = contents(Journal(filled, KEY))
    changes = {"state": ({"x": torch.ones(2)}, {}), "layer 1": ({"a": torch.ones(3)}, {"new": 1})}
    done = Journal(filled.with_name("done"), KEY)
    for name in before:
        done.save(name, *Journal(filled, KEY).load(name))
    done.update(changes, drop=("layer 2",))
    journal = Journal(filled, KEY)
    real, calls = getattr(sys.modules[Journal.__module__], step), []

    def failing(*arguments):
        calls.append(step)
        if len(calls) > call:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(f"{Journal.__module__}.{step}", failing)
        if (step, call) == ("write_json", 1):  # is called once
            journal.update(changes, drop=("layer 2",))
        else:
            with pytest.raises(OutputError, match="cannot write the journal in .*No space left on device") as error:
                journal.update(changes, drop=("layer 2",))
            one_line(error)
    opened = Journal(filled, KEY)
    assert opened.discarded is None
    assert contents(opened) in (before, contents(done))


def test_a_disk_that_takes_no_more_is_one_line(filled, one_line):
    journal = Journal(filled, KEY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OutputError, match="cannot write the journal in ") as error:
            journal.save("layer 3", {"x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line(error)
    assert Journal(filled, KEY).entries == ("layer 0", "layer 1", "layer 2")
    assert len(os.listdir(filled)) == 4


def test_unwritable(tmp_path, one_line):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write the journal in ") as error:
        Journal(tmp_path / "file" / "journal", KEY).save("step", {})
    one_line(error)


def test_killed_at_any_moment_it_goes_on_to_the_same_end(tmp_path):
    begin = time.perf_counter()
    assert run_and_kill(tmp_path / "whole", None) == (0, 0)
    seconds_per_step = (time.perf_counter() - begin) / 30
    chance, starts, killed = random.Random(0), [], 0
    for _ in range(30):
        start, code = run_and_kill(tmp_path / "killed", chance.uniform(0, seconds_per_step))
        assert code in (0, -signal.SIGKILL)
        starts.append(start)
        killed += code != 0
    assert killed > 3
    assert starts == sorted(set(starts[: killed + 1])) + starts[killed + 1 :]
    assert run_and_kill(tmp_path / "killed", None)[1] == 0
    whole, resumed = (Journal(tmp_path / name, {"run": 1}) for name in ("whole", "killed"))
    assert contents(resumed) == contents(whole)
    assert resumed.entries == whole.entries
    assert len(os.listdir(tmp_path / "killed")) == 32

"""Writing model folders: complete or absent."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

from kvfold.checkpoint import OutputFolder, open_checkpoint, renaming
from kvfold.errors import OutputError


def write_until_killed(out: Path, report: Connection) -> None:
    """Write one shard and two steps of a journal, tell so, and wait."""
    with OutputFolder(out, source=None, overwrite=True, max_shard_bytes=64) as output:
        output.add("a", torch.ones(16))
        output.add("b", torch.ones(16))
        journal = output.journal({"key": 1})
        for step in ("layer 0", "layer 1"):
            journal.save(step, {"x": torch.ones(2)}, {"step": step})
        report.send("written")
        time.sleep(60)


def write(out: Path, value: float = 1.0, **options) -> OutputFolder:
    with OutputFolder(out, source=None, **options) as output:
        output.add("a", torch.full((4, 4), value))
        (output.path / "config.json").write_text("{}")
    return output


def value_at(out: Path) -> float:
    with safe_open(out / "model.safetensors", framework="pt") as file:
        return file.get_tensor("a")[0, 0].item()


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def error_of(one_line):
    def message(out: Path, **options) -> str:
        with pytest.raises(OutputError) as error, OutputFolder(out, **({"source": None} | options)):
            pytest.fail("the block must not be entered")
        return one_line(error)

    return message


def write_and_fail(out: Path, failure: type[BaseException], **options) -> None:
    with OutputFolder(out, source=None, max_shard_bytes=1, **options) as output:
        output.add("a", torch.ones(4))
        output.add("b", torch.ones(4))
        raise failure


@pytest.mark.parametrize(("max_shard_bytes", "files"), [(10**9, 1), (6000, None), (1, 21)])
def test_transformers_loads_it(tmp_path, model, max_shard_bytes, files):
    out = tmp_path / "out"
    with OutputFolder(out, source=None, max_shard_bytes=max_shard_bytes) as output:
        assert output.path.is_relative_to(tmp_path)
        model.config.save_pretrained(output.path)
        for name, tensor in model.state_dict().items():
            output.add(name, tensor)
    assert output.path == output.out == out
    shards = sorted(out.glob("*.safetensors"))
    if files is not None:
        assert len(shards) == files
    if len(shards) > 1:
        assert shards[-1].name == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
        assert max(file.stat().st_size for file in shards) < max(max_shard_bytes, 3000) + 1000
    loaded, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert set(open_checkpoint(out).names()) == set(model.state_dict())
    assert os.listdir(tmp_path) == ["out"]


def test_index(tmp_path):
    with OutputFolder(tmp_path / "out", source=None, max_shard_bytes=64) as output:
        for name in "abc":
            output.add(name, torch.ones(16, dtype=torch.bfloat16))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert index == {"metadata": {"total_size": 96}, "weight_map": {"a": first, "b": first, "c": second}}
    with safe_open(tmp_path / "out" / first, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_views_are_written_alone(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    with OutputFolder(tmp_path / "out", source=None) as output:
        output.add("rows", whole[1:])
        output.add("columns", whole.T)
        output.add("parameter", torch.nn.Parameter(whole[0]))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("rows"), whole[1:])
        assert torch.equal(file.get_tensor("columns"), whole.T)
        assert torch.equal(file.get_tensor("parameter"), whole[0])


def test_missing_parents_are_created(tmp_path):
    write(tmp_path / "x" / "y" / "out")
    assert value_at(tmp_path / "x" / "y" / "out") == 1.0


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_nothing(tmp_path, failure):
    with pytest.raises(failure):
        write_and_fail(tmp_path / "x" / "out", failure)
    assert os.listdir(tmp_path) == []


def test_failure_keeps_the_old_folder(tmp_path):
    write(tmp_path / "out", 1.0)
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(tmp_path / "out", KeyboardInterrupt, overwrite=True)
    assert value_at(tmp_path / "out") == 1.0
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("step", ["write_tensors", "sync", "replace_folder"])
def test_full_disk_leaves_nothing(tmp_path, monkeypatch, step, one_line):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"kvfold.checkpoint.output.{step}", fail)
    with pytest.raises(OutputError, match="No space left on device") as error:
        write(tmp_path / "out")
    one_line(error)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(renaming, "_exchange", lambda first, second: False)
    write(tmp_path / "out", 1.0)
    (tmp_path / "out" / "stale.txt").write_text("")
    write(tmp_path / "out", 2.0, overwrite=True)
    assert value_at(tmp_path / "out") == 2.0
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may replace everything")
def test_a_folder_that_cannot_be_emptied_is_refused_at_once(tmp_path, error_of):
    write(tmp_path / "out", 1.0)
    (tmp_path / "out").chmod(0o555)
    assert "may not be replaced by you" in error_of(tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_spares_what_is_not_a_model(tmp_path, error_of):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    assert "holds something else (it has no config.json)" in error_of(tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]


def test_old_folder_returns_if_the_new_one_cannot_be_put_in_place(tmp_path, monkeypatch):
    write(tmp_path / "out", 1.0)
    monkeypatch.setattr(renaming, "_exchange", lambda first, second: False)
    rename = Path.rename

    def fail_for_new(self, target):
        if self.name == "model":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    monkeypatch.setattr("kvfold.checkpoint.output._temporary_name", lambda position: "model.safetensors")
    with pytest.raises(OutputError, match="Input/output error"):
        write(tmp_path / "out", 2.0, overwrite=True)
    assert value_at(tmp_path / "out") == 1.0
    assert os.listdir(tmp_path) == ["out"]


def test_existing(tmp_path, error_of):
    write(tmp_path / "out")
    assert "already exists; give another name, or --overwrite" in error_of(tmp_path / "out")
    (tmp_path / "file").write_text("")
    assert "is an existing file" in error_of(tmp_path / "file", overwrite=True)


def test_appeared_meanwhile(tmp_path):
    output = OutputFolder(tmp_path / "out", source=None)
    output.__enter__()
    output.add("a", torch.ones(4))
    write(tmp_path / "copy", 3.0)
    (tmp_path / "copy").rename(tmp_path / "out")
    with pytest.raises(OutputError, match="already exists"):
        output.__exit__(None, None, None)
    assert value_at(tmp_path / "out") == 3.0
    assert os.listdir(tmp_path) == ["out"]


def test_overlap_with_the_source(tmp_path, monkeypatch, error_of):
    source = tmp_path / "model"
    source.mkdir()
    assert "is the model itself" in error_of(source, source=source, overwrite=True)
    assert "is inside the model folder" in error_of(source / "x" / "out", source=source)
    assert "contains the model" in error_of(tmp_path, source=source, overwrite=True)
    (tmp_path / "link").symlink_to(source)
    assert "is the model itself" in error_of(tmp_path / "link", source=source, overwrite=True)
    monkeypatch.chdir(source)
    assert "is the model itself" in error_of(Path("."), source=source, overwrite=True)
    assert "contains the model" in error_of(tmp_path, source=source / "model.gguf", overwrite=True)
    assert os.listdir(source) == []


def test_sibling_with_a_common_beginning_is_no_overlap(tmp_path):
    (tmp_path / "model").mkdir()
    with OutputFolder(tmp_path / "model-mla", source=tmp_path / "model") as output:
        output.add("a", torch.ones(4))


def test_unwritable(tmp_path, error_of):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "x" / "out", Path("/proc/none/out")):
        message = error_of(out)
        assert f"cannot create {out}" in message
        assert "give a place you can write to" in message
    assert "root of the file system" in error_of(Path("/"))
    assert os.listdir(tmp_path) == ["file"]


def killed(out: Path) -> Path:
    """What a process that was killed while it wrote `out` has left."""
    context = get_context("fork")  # a new interpreter would take seconds to import torch
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=write_until_killed, args=(out, sender))
    process.start()
    sender.close()
    try:
        assert receiver.recv() == "written"
        partial = out.parent / f".{out.name}.partial"
        assert (partial / "model" / "model-shard-00001.safetensors").is_file()
        with pytest.raises(OutputError, match="another process is writing"):  # it lives
            write(out)
    finally:
        process.kill()
        process.join()
        receiver.close()
    assert process.exitcode == -signal.SIGKILL
    return partial


def test_killed_process_leaves_no_folder_and_the_next_one_finds_its_journal(tmp_path, error_of):
    out = tmp_path / "out"
    partial = killed(out)
    write(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == [partial.name, "other"]
    (tmp_path / "other").rename(out)
    assert "already exists" in error_of(out)  # a forgotten --overwrite costs nothing
    with pytest.raises(ValueError, match="mistyped"), OutputFolder(out, source=None, overwrite=True):
        raise ValueError("mistyped")
    assert sorted(os.listdir(partial)) == ["journal", "lock"]
    with OutputFolder(out, source=None, overwrite=True) as output:
        assert os.listdir(output.path) == []  # the half-written weights are gone
        journal = output.journal({"key": 1})
        assert (journal.resumed_from, journal.discarded) == ("layer 1", None)
        assert journal.load("layer 0")[1] == {"step": "layer 0"}
        output.add("a", torch.full((4, 4), 3.0))
    assert value_at(out) == 3.0
    assert os.listdir(out) == ["model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def interrupt(out: Path, failure: type[BaseException], steps: int) -> BaseException:
    """What comes out of a block that saves some steps and is then interrupted by `failure`."""

    def work() -> None:
        with OutputFolder(out, source=None, max_shard_bytes=1) as output:
            output.add("a", torch.ones(4))
            output.add("b", torch.ones(4))
            journal = output.journal({"key": 0})
            for step in range(steps):
                journal.save(f"layer {step}", {"x": torch.ones(2)})
            raise failure

    with pytest.raises(failure) as error:
        work()
    return error.value


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_keeps_the_journal(tmp_path, failure):
    out = tmp_path / "x" / "out"
    error = interrupt(out, failure, steps=2)
    assert error.__notes__ == ["what is finished is kept: run the same command again to resume"]
    assert sorted(os.listdir(out.parent / ".out.partial")) == ["journal", "lock"]
    with OutputFolder(out, source=None) as output:
        assert output.journal({"key": 0}).resumed_from == "layer 1"
    assert os.listdir(out.parent) == ["out"]


def test_an_interrupt_before_the_first_step_leaves_nothing(tmp_path):
    error = interrupt(tmp_path / "x" / "out", KeyboardInterrupt, steps=0)
    assert getattr(error, "__notes__", []) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failure", [ValueError, OutputError])
def test_an_error_removes_the_journal(tmp_path, failure):
    interrupt(tmp_path / "x" / "out", failure, steps=2)
    assert os.listdir(tmp_path) == []


def test_the_journal_of_other_work_is_thrown_away(tmp_path):
    interrupt(tmp_path / "out", KeyboardInterrupt, steps=2)
    with OutputFolder(tmp_path / "out", source=None) as output:
        journal = output.journal({"key": 1})
        assert (journal.entries, journal.discarded) == ((), "it was made with another key")
    assert os.listdir(tmp_path) == ["out"]


def test_an_interrupt_at_the_end_keeps_the_journal(tmp_path, monkeypatch):
    def fail(file, tensors):
        raise KeyboardInterrupt

    output = OutputFolder(tmp_path / "out", source=None)
    output.__enter__()
    output.journal({}).save("layer 0", {})
    output.add("a", torch.ones(4))
    with monkeypatch.context() as patched:
        patched.setattr("kvfold.checkpoint.output.write_tensors", fail)
        with pytest.raises(KeyboardInterrupt):
            output.__exit__(None, None, None)
    assert sorted(os.listdir(tmp_path / ".out.partial")) == ["journal", "lock"]
    write(tmp_path / "out")  # asks for no journal: none stays
    assert os.listdir(tmp_path) == ["out"]


def test_killed_just_after_the_end(tmp_path, monkeypatch):
    """The folder is in place, the old one and what was the journal are not yet removed."""
    out = tmp_path / "out"
    write(out, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr("kvfold.checkpoint.workplace.Workplace.release", lambda *_, **__: None)
        patched.setattr("kvfold.checkpoint.renaming.shutil.rmtree", lambda *_, **__: None)
        with OutputFolder(out, source=None, overwrite=True) as output:
            output.journal({}).save("layer 0", {})
            output.add("a", torch.full((4, 4), 2.0))
        place = output._place
    assert sorted(os.listdir(tmp_path / ".out.partial")) == ["done", "lock", "model"]
    assert value_at(out) == 2.0
    place._unlock()  # as the kernel does
    with pytest.raises(OutputError, match="already exists"):
        write(out)
    assert os.listdir(tmp_path) == ["out"]


def test_one_writer_at_a_time(tmp_path, error_of):
    out = tmp_path / "out"
    with OutputFolder(out, source=None) as output:
        output.add("a", torch.full((4, 4), 1.0))
        assert error_of(out) == (
            f"another process is writing {out} at this moment; wait for it, or give another folder"
        )
        assert output.path.is_dir()
        write(tmp_path / "other")
    assert value_at(out) == 1.0
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_the_lock_of_a_writer_that_is_just_leaving_keeps_out(tmp_path, monkeypatch, error_of):
    def unlink_and_lock(descriptor, operation):
        (tmp_path / ".out.partial" / "lock").unlink()

    monkeypatch.setattr("kvfold.checkpoint.workplace.fcntl.flock", unlink_and_lock)
    assert "another process is writing" in error_of(tmp_path / "out")


def test_a_file_system_without_locks(tmp_path, monkeypatch, error_of):
    def refuse(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("kvfold.checkpoint.workplace.fcntl.flock", refuse)
    message = error_of(tmp_path / "out")
    assert "cannot lock" in message
    assert message.endswith("Function not implemented; give an output folder on another file system")


def test_what_is_not_its_own_stays(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.tex").write_text("")
    write(tmp_path / "out")
    assert os.listdir(tmp_path / ".out.partial") == ["thesis.tex"]


def test_cleans_up_only_what_is_its_own(tmp_path):
    dead = dead_process()
    kept = [f".other.partial-{dead}", f".out.partial-{os.getppid()}", ".out.partial-x", f"out.partial-{dead}"]
    for name in [*kept, f".out.partial-{dead}", f".out.partial-{os.getpid()}", f".out.partial-{2**70}"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    write(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "out"])


def test_old_folder_moved_aside_by_a_killed_process(tmp_path, error_of):
    aside = tmp_path / f".out.old-{dead_process()}"
    write(aside, 1.0)
    assert "already exists" in error_of(tmp_path / "out")  # it is back
    assert value_at(tmp_path / "out") == 1.0
    write(aside, 0.0)
    write(tmp_path / "out", 2.0, overwrite=True)
    assert value_at(tmp_path / "out") == 2.0
    assert os.listdir(tmp_path) == ["out"]

"""Training text: windows, document boundaries, shares, formats, and what is kept."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.errors import KvfoldError
from kvfold.train import data
from kvfold.train.data import WindowReader

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def windows(tokenizer, tmp_path):
    tokenizer.eos_token = "<unk>"

    def build(*sources, windows=4, vocabulary=32, column=None, **options):
        reader = WindowReader(
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=8,
            cache=tmp_path / "cache",
            progress=lambda *_: None,
        )
        return reader.mixed({str(name): column for name in sources}, windows, **options)

    return build


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(*lengths):
    return [{"text": " ".join(LETTERS[:length])} for length in lengths]


def test_brackets_in_a_name_are_no_pattern(windows, tmp_path):
    write_rows(tmp_path / "rows1.jsonl", [{"text": " ".join("a" * 20)}])
    built = windows(write_rows(tmp_path / "rows[1].jsonl", [{"text": " ".join("b" * 20)}]), windows=1)
    assert len(set(built[0]["input_ids"].tolist()[:4])) == 1
    other = windows(tmp_path / "rows1.jsonl", windows=1)
    assert built[0]["input_ids"].tolist() != other[0]["input_ids"].tolist()


def test_documents_lie_end_to_end_and_positions_begin_with_each(windows, tmp_path):
    built = windows(write_rows(tmp_path / "rows.jsonl", documents(3, 5, 9, 7)), windows=3)
    rows = sorted((built[index] for index in range(3)), key=lambda row: row["position_ids"].tolist())
    by_place = {tuple(row["input_ids"].tolist()): row for row in rows}
    first = by_place[(1, 2, 3, 0, 1, 2, 3, 4)]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert first["labels"].tolist() == [1, 2, 3, 0, -100, 2, 3, 4]
    second = by_place[(5, 0, 1, 2, 3, 4, 5, 6)]
    assert second["position_ids"].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    third = by_place[(7, 8, 9, 0, 1, 2, 3, 4)]
    assert third["labels"].tolist() == [7, 8, 9, 0, -100, 2, 3, 4]


def test_documents_do_not_see_each_other(windows, tmp_path, original):
    built = windows(write_rows(tmp_path / "rows.jsonl", documents(3, 25)), windows=1)
    row = {name: tensor[None] for name, tensor in built[0].items() if name != "labels"}
    model = AutoModelForCausalLM.from_pretrained(original).eval()
    model.config.use_cache = False
    with torch.no_grad():
        packed = model(**row).logits[0, 4:]
        alone = model(row["input_ids"][:, 4:]).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_sources_share_the_windows_by_weight(windows, tmp_path):
    for name, letter in (("a.txt", "a"), ("b.txt", "b")):
        (tmp_path / name).write_text(" ".join(letter * 40))
    built = windows(tmp_path / "a.txt", tmp_path / "b.txt", weights=(3, 1), windows=8)
    firsts = [int(built[index]["input_ids"][0]) for index in range(len(built))]
    assert sorted(firsts) == [1] * 6 + [2] * 2 and firsts != sorted(firsts)


def test_a_short_source_is_passed_through_again(windows, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(LETTERS[:19]))
    built = windows(tmp_path / "a.txt", windows=5)
    assert {tuple(built[index]["input_ids"].tolist()) for index in range(5)} == {
        tuple(range(1, 9)),
        tuple(range(9, 17)),
    }


def test_tables_and_chats_are_read(windows, tmp_path):
    pytest.importorskip("datasets")
    from datasets import Dataset

    chats = [{"messages": [{"role": "user", "content": "a b c "}, {"role": "assistant", "content": "d e f g h"}]}]
    chat = windows(write_rows(tmp_path / "chat.jsonl", chats), windows=1)
    assert chat[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    Dataset.from_list([{"body": " ".join(LETTERS)}]).to_parquet(tmp_path / "table.parquet")
    table = windows(tmp_path / "table.parquet", column="body", windows=1)
    assert table[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_source_is_tokenised_once(windows, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", documents(26, 26))
    first = windows(path)[0]
    kept = sorted((tmp_path / "cache").rglob("*.bin"))
    times = [file.stat().st_mtime_ns for file in kept]
    assert torch.equal(windows(path)[0]["input_ids"], first["input_ids"])
    assert [file.stat().st_mtime_ns for file in sorted((tmp_path / "cache").rglob("*.bin"))] == times
    path.write_text(path.read_text() * 2)
    windows(path)
    assert len(list((tmp_path / "cache").rglob("ids.bin"))) == 2


MISTAKES = {
    "empty": ("empty.txt", "", {}, "is empty"),
    "short": ("short.txt", "a b c", {}, "has 4 tokens, one sequence takes 8"),
    "no column": ("rows.jsonl", '{"body": "a"}\n', {}, "has no column 'text', only body: name one with --column."),
    "no text": ("rows.jsonl", '{"text": 3}\n', {}, "column 'text' of"),
    "damaged": ("rows.jsonl", '{"text": "a b\n', {}, "cannot be read"),
    "no documents": ("rows.jsonl", "", {}, "rows.jsonl is empty: give a file with some text in it."),
    "another format": ("rows.csv", "text\na b", {}, "has none of the endings .txt, .md, .jsonl, .json, .parquet"),
    "vocabulary": ("long.txt", "a b c d z z z z z", {"vocabulary": 8}, "the tokenizer gives token 26"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(name, windows, tmp_path, one_line):
    file, content, options, expected = MISTAKES[name]
    (tmp_path / file).write_text(content)
    with pytest.raises(KvfoldError) as error:
        windows(tmp_path / file, **options)
    assert expected in one_line(error)
    assert not list((tmp_path / "cache").glob(".*"))


def test_shipped_texts_need_no_file(windows, monkeypatch, tmp_path):
    (tmp_path / "short.txt").write_text(" ".join("a" * 20))
    monkeypatch.setattr(data, "CALIBRATION", tmp_path / "short.txt")
    assert windows("default", windows=2)[0]["input_ids"].tolist() == [1] * 8

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvfold.errors import CheckpointError, TextError
from kvfold.texts import check_vocabulary, read_slice, read_text, text_size, token_ids


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_text_becomes_ids(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_text("a b é", encoding="utf-8")
    assert token_ids(tokenizer, read_text(path), minimum=3).tolist() == [1, 2, 0]


def test_a_short_text(tokenizer):
    with pytest.raises(TextError, match="the text has 2 tokens, 16 are needed"):
        token_ids(tokenizer, "a b", minimum=16)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TextError, match=r"cannot read text file .*none.txt: No such file"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(TextError, match="Is a directory"):
        read_text(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(TextError, match=r"text file .*empty.txt is empty"):
        read_text(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TextError, match=r"latin.txt is not UTF-8 \(byte 3\)"):
        read_text(tmp_path / "latin.txt")

    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    with pytest.raises(TextError, match=r"binary.txt is binary, it holds NUL"):
        read_text(tmp_path / "binary.txt")
    with pytest.raises(TextError, match=r"cannot read text file .*none.txt: No such file"):
        text_size(tmp_path / "none.txt")


def test_line_breaks_of_other_systems(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"a\r\nb\rc\n")
    assert read_text(tmp_path / "text.txt") == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("text", "start", "length", "part"),
    [
        ("one two three four", 0, 9, "one two"),
        ("one two three four", 0, 18, "one two three four"),
        ("one two three four", 2, 14, "two three"),
        ("one two three four", 5, 99, "three four"),
        ("a line\nand the next one is longer", 2, 31, "and the next one is longer"),
        ("日本語のテキスト", 4, 12, "語のテ"),
        ("日本語のテキスト", 0, 10, "日本語"),
        ("aé" * 10, 2, 5, "aéa"),
    ],
)
def test_slices_end_between_words(tmp_path, text, start, length, part):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    assert read_slice(path, start, length) == part
    assert text_size(path) == len(text.encode())


def test_a_damaged_slice_names_the_byte(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"plain text " * 3 + b"\xff\xfe more")
    assert read_slice(path, 3, 20) == "text plain text"
    for start in (0, 20, 32):
        with pytest.raises(TextError, match=r"text.txt is not UTF-8 \(byte 33\)"):
            read_slice(path, start, 40)
    path.write_bytes(b"\x80" * 40)
    with pytest.raises(TextError, match=r"text.txt is not UTF-8 \(byte 7\)"):
        read_slice(path, 7, 20)


def test_a_tokenizer_of_another_model():
    ids = torch.tensor([[0, 5, 2]])
    check_vocabulary(ids, 6)
    check_vocabulary(ids[:, :0], 6)
    with pytest.raises(CheckpointError, match="gives token 5, the model has 5 embeddings"):
        check_vocabulary(ids, 5)

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvfold.errors import CheckpointError, TextError
from kvfold.texts import check_vocabulary, read_text, token_ids


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


def test_a_tokenizer_of_another_model():
    ids = torch.tensor([[0, 5, 2]])
    check_vocabulary(ids, 6)
    check_vocabulary(ids[:, :0], 6)
    with pytest.raises(CheckpointError, match="gives token 5, the model has 5 embeddings"):
        check_vocabulary(ids, 5)

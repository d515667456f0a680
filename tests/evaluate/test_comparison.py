"""Models held against each other, around a stand-in for the loader."""

import importlib
import math
from copy import deepcopy

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvfold.errors import OptionError, TextError
from kvfold.evaluate import TaskScore, TaskScores, compare, perplexity
from kvfold.provenance import provenance
from kvfold.report.comparison import render_comparison
from kvfold.report.tables import show_comparison

MODULE = importlib.import_module("kvfold.evaluate.comparison")
SCORES = TaskScores(
    tasks={"quiz": TaskScore(accuracy=0.5, acc_norm=None, standard_error=0.1, items=20)}, limit=20, seed=0
)


@pytest.fixture
def texts(llama, monkeypatch, tmp_path, token_ids):
    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 128)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    monkeypatch.setattr(MODULE, "load_model", lambda model, dtype=None: (deepcopy(llama), tokenizer))
    paths = []
    for name, ids in (("one.txt", token_ids), ("two.txt", token_ids.flip(0))):
        paths.append(tmp_path / name)
        paths[-1].write_text(" ".join(f"w{i}" for i in ids.tolist()))
    return paths


def test_every_model_reads_the_same_windows(texts, llama, token_ids):
    result = compare({"original": "tiny", "again": "tiny"}, texts, context=20, windows=2)
    names = [row.name for row in result.rows]
    assert names == ["original", "again", "original, int4 cache"]
    original, again, int4 = result.to_dict()["rows"]
    for text, ids in (("one.txt", token_ids), ("two.txt", token_ids.flip(0))):
        known = ids.where(ids > 1, 0)  # there is no word w1
        expected = perplexity(llama, known, context=20, windows=2)
        assert original["nats_per_token"][text] == pytest.approx(expected.nats_per_token, abs=1e-6)
        assert original["perplexity"][text] == math.exp(original["nats_per_token"][text])
    assert again["ratio"] == {"one.txt": 1.0, "two.txt": 1.0}
    assert original["cache_percent"] == 100
    assert int4["cache_bytes_per_token"] < original["cache_bytes_per_token"] / 2


def test_benchmarks_leave_out_the_quantised_cache(texts, monkeypatch):
    monkeypatch.setattr(MODULE, "tasks_if_any", lambda tasks, **options: (tasks, options))
    monkeypatch.setattr(MODULE, "score_tasks", lambda model, tokenizer, selection, **options: SCORES)
    result = compare({"original": "tiny"}, texts[:1], context=20, windows=1, tasks=["quiz"], limit=20)
    assert [row.tasks for row in result.rows] == [SCORES, None]
    only_tasks = compare({"original": "tiny"}, tasks=["quiz"]).to_dict()
    assert [row["name"] for row in only_tasks["rows"]] == ["original"]


def test_table_and_page_show_every_number(texts, monkeypatch, capsys):
    monkeypatch.setattr(MODULE, "tasks_if_any", lambda tasks, **options: (tasks, options))
    monkeypatch.setattr(MODULE, "score_tasks", lambda model, tokenizer, selection, **options: SCORES)
    result = compare({"original": "tiny", "<b>": "tiny"}, texts, context=20, windows=1, tasks=["quiz"]).to_dict()
    show_comparison(result)
    shown, page = capsys.readouterr().out, render_comparison(result | {"provenance": provenance(seed=0)})
    for part in ("one.txt", "two.txt", "50.0 ± 10.0", "(1.00x)", "original, int4 cache"):
        assert part in shown
        assert part in page
    assert "<svg" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_mistakes(texts, tmp_path):
    with pytest.raises(OptionError, match="nothing to compare on"):
        compare({"original": "tiny"})
    with pytest.raises(OptionError, match="no model to compare"):
        compare({}, texts)
    with pytest.raises(OptionError, match="two texts are called one.txt"):
        compare({"original": "tiny"}, [texts[0], texts[0]])
    with pytest.raises(OptionError, match="name the tasks"):
        compare({"original": "tiny"}, texts, limit=3)
    with pytest.raises(TextError, match=r"gone\.txt"):
        compare({"original": "tiny"}, [tmp_path / "gone.txt"])
    with pytest.raises(TextError, match="give more text"):
        compare({"original": "tiny"}, texts, context=50, windows=1000)

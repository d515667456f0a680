"""`evaluate` and `generate` around a stand-in for the loader, which has its own tests."""

import importlib

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvfold.errors import OptionError, TextError
from kvfold.evaluate import TaskScore, TaskScores, evaluate, generate

MODULES = [importlib.import_module(f"kvfold.evaluate.{name}") for name in ("run", "generate")]


@pytest.fixture
def loaded(llama, monkeypatch):
    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 128)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    for module in MODULES:
        monkeypatch.setattr(module, "load_model", lambda model, dtype=None: (llama, tokenizer))
    return tokenizer


@pytest.fixture
def text(tmp_path, token_ids):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in token_ids.tolist()))
    return path


def test_evaluate_measures_all_three(loaded, text):
    stages = []
    result = evaluate("tiny", text, context=40, windows=2, progress=lambda *step: stages.append(step)).to_dict()
    assert result["model"] == "tiny"
    assert result["dtype"] == "float32"
    assert result["cache_bytes_per_token"] == 2 * 64 * 4
    assert result["cache_elements_per_token_and_layer"] == 64
    assert (result["windows"], result["context"], result["tokens"]) == (2, 40, 78)
    assert result["perplexity"] > 1
    assert result["tokens_per_second"] > 0
    assert {stage for stage, _, _ in stages} == {"scoring windows", "timing decode"}


def test_evaluate_without_a_text(loaded, monkeypatch):
    scores = TaskScores(
        tasks={"quiz": TaskScore(accuracy=0.5, acc_norm=None, standard_error=0.1, items=20)}, limit=20, seed=0
    )
    monkeypatch.setattr(MODULES[0], "tasks_if_any", lambda tasks, **options: (tasks, options))
    monkeypatch.setattr(MODULES[0], "score_tasks", lambda model, tokenizer, selection, **options: scores)
    result = evaluate("tiny", tasks=["quiz"], limit=20).to_dict()
    assert result["perplexity"] is result["tokens_per_second"] is result["text"] is None
    assert result["cache_elements_per_token_and_layer"] == 64
    assert result["tasks"] == scores.to_dict()
    assert result["tasks"]["average"] == 0.5


def test_evaluate_on_nothing():
    with pytest.raises(OptionError, match="there is nothing to evaluate on: give a text, tasks, or both"):
        evaluate("tiny")
    with pytest.raises(OptionError, match="a task folder or a limit was given without tasks"):
        evaluate("tiny", "text.txt", limit=5)


def test_evaluate_refuses_a_short_text(loaded, text):
    with pytest.raises(TextError, match="the text has 300 tokens, 512 are needed"):
        evaluate("tiny", text)


def test_greedy_generation_repeats_itself(loaded):
    first = generate("tiny", "w2 w3", max_new_tokens=8)
    assert first == generate("tiny", "w2 w3", max_new_tokens=8, seed=1)
    assert not first.startswith("w2 w3")


def test_sampling_follows_the_seed(loaded):
    texts = [generate("tiny", "w2 w3", max_new_tokens=16, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_chat_uses_the_template(loaded):
    with pytest.raises(OptionError, match="no chat template"):
        generate("tiny", "w2", chat=True)
    loaded.chat_template = "{% for message in messages %}w9 {{ message.content }}{% endfor %}"
    assert isinstance(generate("tiny", "w2", chat=True, max_new_tokens=2), str)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": -0.5}, "temperature must be 0, or 0.01 or above, not -0.5"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(OptionError, match=message):
        generate("tiny", **{"prompt": "w2", **options})

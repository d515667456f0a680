"""Benchmarks by the harness: tiny tasks in a folder, tiny models, no network."""

import importlib.util
import json
import math
import socket

import pytest
import torch
import yaml

from kvfold.errors import CheckpointError, OptionError, UnknownNameError
from kvfold.evaluate import TaskScore, TaskScores, evaluate_tasks
from kvfold.evaluate.tasks import spread

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'kvfold[eval]'"
)
LETTERS = "bcdefghijklmnopqrstuvwxy"
QUIZ = {
    "task": "quiz",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "quiz/test.jsonl"}},
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
ACC = {"metric_list": QUIZ["metric_list"][:1]}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a test went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def speaker(tokenizer):
    """The tokenizer of one token per letter, with the end-of-text token that the harness asks for."""
    tokenizer.eos_token = "<unk>"
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """A folder `tasks` with the task `quiz`, whose 30 questions lie in the folder above; their right answers vary."""
    generator = torch.Generator().manual_seed(0)

    def words(count):
        return " ".join(LETTERS[i] for i in torch.randint(len(LETTERS), (count,), generator=generator))

    (tmp_path / "quiz").mkdir()
    rows = [
        {"question": words(3 + i % 4), "choices": [words(1 + j) for j in range(3)], "answer": i % 3} for i in range(30)
    ]
    (tmp_path / "quiz/test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    add_task(tmp_path / "tasks")
    return tmp_path / "tasks"


def add_task(folder, **values):
    folder.mkdir(exist_ok=True)
    task = QUIZ | values
    text = yaml.safe_dump(task, width=1000)
    (folder / f"{task['task']}.yaml").write_text(text.replace("'!function ", "!function ").replace(".pick'", ".pick"))


def harness_scores(model, tokenizer, path):
    """What the harness gives with its own scoring."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_defaults=False).load([str(path)])
    model = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=4)
    return evaluate(lm=model, task_dict=tasks, log_samples=False, bootstrap_iters=10)["results"]["quiz"]


@needs_harness
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek"])
def test_scores_are_the_harness_own(request, name, folder, speaker):
    model = request.getfixturevalue(name)
    score = evaluate_tasks(model, speaker, ["quiz"], folder=folder).tasks["quiz"]
    assert speaker.pad_token is None
    data = {"data_files": {"test": str(folder.parent / "quiz/test.jsonl")}}
    add_task(folder, dataset_kwargs=data)
    expected = harness_scores(model, speaker, folder / "quiz.yaml")
    assert score.items == 30
    assert score.accuracy == pytest.approx(expected["acc,none"])
    assert score.acc_norm == score.score == pytest.approx(expected["acc_norm,none"])
    assert score.standard_error == pytest.approx(expected["acc_norm_stderr,none"])


@needs_harness
def test_the_items_are_spread_and_the_same(llama, folder, speaker, monkeypatch):
    from kvfold.evaluate import harness

    asked = []
    score = harness.score_continuations

    def recorded(model, pairs, **options):
        asked.append(pairs)
        return score(model, pairs, **options)

    monkeypatch.setattr(harness, "score_continuations", recorded)
    everything, *some = (
        evaluate_tasks(llama, speaker, ["quiz"], folder=folder, limit=limit, seed=seed)
        for limit, seed in ((None, 0), (4, 0), (4, 1), (99, 0))
    )
    assert [result.tasks["quiz"].items for result in (everything, *some)] == [30, 4, 4, 30]
    whole, first, second, _ = asked
    assert first == second == [whole[3 * item + choice] for item in (0, 7, 15, 22) for choice in range(3)]


@needs_harness
def test_nothing_reaches_the_terminal_but_progress(llama, folder, speaker, capfd):
    steps = []

    def progress(stage, done, total):
        steps.append((stage, done, total))
        print("heard", flush=True)

    evaluate_tasks(llama, speaker, ["quiz"], folder=folder, progress=progress)
    printed = capfd.readouterr()
    assert set(printed.out.split()) == {"heard"}
    assert printed.err == ""
    assert {stage for stage, _, _ in steps} == {"loading tasks", "scoring answers"}
    assert steps[-1] == ("scoring answers", 90, 90)


@needs_harness
def test_functions_beside_the_file_and_tasks_without_acc_norm(llama, folder, speaker):
    (folder / "choosing.py").write_text("def pick(doc):\n    return doc['choices'][:2]\n")
    (folder / "quiz/part").mkdir(parents=True)  # beside the file comes first
    row = {"question": "b", "choices": ["c", "d", "e"], "answer": 1}
    (folder / "quiz/test.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    add_task(folder, task="pair", doc_to_choice="!function choosing.pick", **ACC)
    result = evaluate_tasks(llama, speaker, ["pair", "quiz"], folder=folder)
    pair, quiz = result.tasks.values()
    assert pair.acc_norm is None
    assert (pair.metric, quiz.metric) == ("acc", "acc_norm")
    assert (pair.items, pair.score) in ((2, 0.0), (2, 1.0))
    assert pair.standard_error == 0
    assert result.average == pytest.approx((pair.score + quiz.score) / 2)
    assert json.loads(json.dumps(result.to_dict()))["tasks"]["quiz"]["metric"] == "acc_norm"


@needs_harness
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dataset_kwargs": {"data_files": "none.jsonl"}}, "data file none.jsonl is neither in .*tasks nor in .*: put"),
        ({"doc_to_target": "!function missing.pick"}, "task 'quiz' cannot be loaded: .*missing"),
        ({"test_split": "exam"}, "task 'quiz' cannot be loaded: "),
        ({"output_type": "guess"}, "task 'quiz' cannot be loaded: .*guess"),
        ({"metric_list": [{"metric": "brier_score"}]}, r"task 'quiz' measures brier_score, not accuracy \(acc\)"),
    ],
)
def test_tasks_that_cannot_be_used(change, says, llama, folder, speaker, one_line):
    add_task(folder, **change)
    with pytest.raises(OptionError, match=says) as error:
        evaluate_tasks(llama, speaker, ["quiz"], folder=folder)
    one_line(error)


@needs_harness
def test_names_that_are_not_there(llama, folder, speaker, tmp_path):
    add_task(folder, task="quiz_hard")
    with pytest.raises(UnknownNameError, match=r"unknown task 'quizz'. Near names: quiz\."):
        evaluate_tasks(llama, speaker, ["quiz", "quizz"], folder=folder)
    with pytest.raises(UnknownNameError, match="unknown task 'mmlu'. Some that are known: quiz, quiz_hard"):
        evaluate_tasks(llama, speaker, ["mmlu"], folder=folder)
    with pytest.raises(OptionError, match="quiz holds no task of the harness"):
        evaluate_tasks(llama, speaker, ["quiz"], folder=tmp_path / "quiz")


@needs_harness
def test_a_tokenizer_without_an_end(llama, folder, tokenizer):
    with pytest.raises(CheckpointError, match="neither a bos nor an eos token"):
        evaluate_tasks(llama, tokenizer, ["quiz"], folder=folder)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"tasks": []}, "no tasks were given"),
        ({"tasks": ["quiz", "quiz"]}, "named twice among quiz, quiz"),
        ({"folder": "nowhere"}, "task folder nowhere does not exist"),
    ],
)
def test_options_out_of_range(options, says):
    with pytest.raises(OptionError, match=says):
        evaluate_tasks(None, None, **{"tasks": ["quiz"], **options})


def test_without_the_harness(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"tasks need lm-eval, which is not installed: pip install 'kvfold\[eval\]'"):
        evaluate_tasks(None, None, ["quiz"])


def test_the_average_counts_arc_once():
    def score(value, norm=None):
        return TaskScore(accuracy=value, acc_norm=norm, standard_error=0.1, items=10)

    tasks = {"arc_easy": score(0.5, 0.6), "offline_arc_challenge": score(0.1, 0.2), "piqa": score(0.7)}
    scores = TaskScores(tasks=tasks, limit=10, seed=0)
    assert scores.average == pytest.approx((0.4 + 0.7) / 2)
    assert scores.average_standard_error == pytest.approx(0.1 * math.sqrt(2 * 0.25**2 + 0.5**2))
    lone = TaskScores(tasks={"arc_easy": score(0.5), "piqa": score(0.75)}, limit=None, seed=0)
    assert lone.average == 0.625


def test_spread():
    assert spread(10, 3) == [0, 3, 6]
    assert spread(3, 3) == [0, 1, 2]
    assert spread(10042, 1000)[-1] == 10031

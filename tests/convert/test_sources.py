"""Where calibration text comes from: shares, order, slices of large files, and the model itself."""

import gc
import re
import weakref

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, LlamaConfig

import kvfold
from kvfold.cli import main as cli
from kvfold.convert import ConvertOptions, sampling, sources
from kvfold.convert.sampling import ordinary_tokens, sample_from, sample_windows
from kvfold.convert.sources import calibration_ids, interleave
from kvfold.errors import CheckpointError, TextError
from kvfold.texts import CALIBRATION, read_text, token_ids

WINDOW = 16


def silent(stage, done, total):
    """No progress display."""


def options(*calibration, tokens, **more):
    return ConvertOptions(
        cache_ratio=0.5, calibration=calibration, calibration_tokens=tokens, calibration_window=WINDOW, **more
    )


def write_letters(path, tokens, first=0):
    """A text in which token `t` is letter `first + t mod 7`."""
    path.write_text(" ".join(chr(97 + first + index % 7) for index in range(tokens)))
    return str(path)


@pytest.fixture
def network(randomise):
    """A tiny model with more embeddings than its tokenizer has words."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return randomise(AutoModelForCausalLM.from_config(config))


@pytest.fixture
def folder(network, tokenizer, tmp_path):
    network.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_any_prefix_is_a_mix_of_all_sources_and_of_all_their_parts():
    many, few = torch.arange(32)[:, None], 100 + torch.arange(8)[:, None]
    order = interleave([many, few])[:, 0]
    assert sorted(order.tolist()) == [*range(32), *range(100, 108)]
    for length in range(5, 41):
        prefix = order[:length]
        assert abs(int((prefix >= 100).sum()) - length / 5) <= 1
    assert sorted((order[:10] // 4).tolist()) == [*range(8), 100 // 4, 104 // 4]


def test_files_share_the_tokens_by_weight(tmp_path, tokenizer):
    first = write_letters(tmp_path / "a.txt", 200)
    second = write_letters(tmp_path / "b.txt", 200, first=10)
    chosen = options(first, second, tokens=12 * WINDOW - 5, calibration_weights=(2.0, 1.0))
    ids = calibration_ids(tmp_path, tokenizer, chosen, silent)
    assert ids.shape == (12, WINDOW)
    assert ((ids > 10).all(1) | (ids < 10).all(1)).all()
    assert (ids > 10).all(1).tolist() == [False, True, False] * 4
    assert len(ids.unique(dim=0)) > 8


def test_the_shipped_text_is_the_default_and_is_spread(tmp_path, tokenizer):
    whole = token_ids(tokenizer, read_text(CALIBRATION), minimum=0)
    ids = calibration_ids(tmp_path, tokenizer, options("default", tokens=8 * WINDOW), silent)
    windows = len(whole) // WINDOW
    starts = [index * windows // 8 * WINDOW for index in (0, 4, 2, 6, 1, 5, 3, 7)]
    assert torch.equal(ids, torch.stack([whole[start : start + WINDOW] for start in starts]))


def test_a_file_that_is_just_long_enough_gives_all_of_its_windows(tmp_path, tokenizer, one_line):
    path = write_letters(tmp_path / "a.txt", 5 * WINDOW)
    ids = calibration_ids(tmp_path, tokenizer, options(path, tokens=5 * WINDOW), silent)
    assert sorted(ids.tolist()) == sorted(token_ids(tokenizer, read_text(path), minimum=0).view(5, -1).tolist())
    with pytest.raises(TextError, match=re.escape(f"the calibration text {path!r} has 80 tokens, 96")) as error:
        calibration_ids(tmp_path, tokenizer, options(path, tokens=6 * WINDOW), silent)
    one_line(error)


class TestLargeFiles:
    @pytest.fixture(autouse=True)
    def _every_file_is_large(self, monkeypatch):
        monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 0)

    @pytest.fixture
    def whole_files(self, monkeypatch):
        """The files that are read whole."""
        read = []
        monkeypatch.setattr(sources, "read_text", lambda path: read.append(path) or read_text(path))
        return read

    def test_only_slices_are_read_and_they_are_evenly_spread(self, tmp_path, tokenizer, whole_files):
        path = tmp_path / "a.txt"
        path.write_text("".join(f"{chr(97 + line // 100)} b c d e f g\r\n" for line in range(2600)))
        ids = calibration_ids(tmp_path, tokenizer, options(str(path), tokens=13 * WINDOW), silent)
        assert not whole_files
        marks = {int(window[0]) for window in ids}
        assert len(marks) == 13 and max(marks) - min(marks) > 22
        # Every slice starts at a line: "x b c d e f g".
        assert (ids[:, 1:7] == torch.arange(2, 8)).all()
        assert torch.equal(ids, calibration_ids(tmp_path, tokenizer, options(str(path), tokens=13 * WINDOW), silent))

    def test_a_sparse_file_is_read_in_longer_slices(self, tmp_path, tokenizer, whole_files):
        path = tmp_path / "a.txt"
        path.write_text("a" + " " * 9 + (" " * 9).join("bcdefg" * 200))
        ids = calibration_ids(tmp_path, tokenizer, options(str(path), tokens=4 * WINDOW), silent)
        assert not whole_files and ids.shape == (4, WINDOW)

    def test_a_file_with_a_gap_is_read_whole(self, tmp_path, tokenizer, whole_files):
        path = tmp_path / "a.txt"
        path.write_text("a b c d " * WINDOW + " " * 10_000)
        ids = calibration_ids(tmp_path, tokenizer, options(str(path), tokens=4 * WINDOW), silent)
        assert whole_files == [str(path)] and (ids == torch.tensor([1, 2, 3, 4] * 4)).all()

    def test_damage_is_one_line(self, tmp_path, tokenizer, one_line):
        path = tmp_path / "a.txt"
        for damage, message in ((b"\xff", "is not UTF-8 (byte "), (b"\0", "is binary"), (b" ", "is empty")):
            path.write_bytes(damage * 10_000)
            with pytest.raises(TextError, match=re.escape(message)) as error:
                calibration_ids(tmp_path, tokenizer, options(str(path), tokens=4 * WINDOW), silent)
            assert str(path) in one_line(error)


def test_text_of_the_model_is_mixed_in(folder, tmp_path, tokenizer):
    path = write_letters(tmp_path / "a.txt", 100)
    stages = []
    chosen = options("sampled", path, tokens=8 * WINDOW, calibration_weights=(3.0, 1.0), seed=4)
    ids = calibration_ids(folder, tokenizer, chosen, lambda *stage: stages.append(stage))
    own = sample_from(folder, tokenizer, windows=6, length=WINDOW, seed=4, progress=silent)
    rows = ids.tolist()
    assert sum(row in own.tolist() for row in rows) == 6 and len(rows) == 8
    assert stages[-1] == ("sampling calibration text", 6, 6)


def test_random_tokens_are_ordinary_ones_and_follow_the_seed(tmp_path, tokenizer):
    path = write_letters(tmp_path / "a.txt", 100)
    first, same, other = (
        calibration_ids(
            tmp_path, tokenizer, options("random", path, tokens=8 * WINDOW, seed=seed, one_shot=True), silent
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert set(first.unique().tolist()) <= set(ordinary_tokens(tokenizer).tolist())


def test_a_short_file_is_found_out_before_the_model_is_loaded(tmp_path, tokenizer):
    path = write_letters(tmp_path / "a.txt", 5)
    with pytest.raises(TextError, match="has 5 tokens"):
        calibration_ids(tmp_path / "no model", tokenizer, options("sampled", path, tokens=4 * WINDOW), silent)


def test_the_seed_decides_and_no_global_random_state_does(folder, tokenizer):
    def sample(seed, before):
        torch.manual_seed(before)
        state = torch.get_rng_state()
        ids = sample_from(folder, tokenizer, windows=3, length=WINDOW, seed=seed, progress=silent)
        assert torch.equal(torch.get_rng_state(), state)
        return ids

    assert torch.equal(sample(0, before=1), sample(0, before=2))
    assert not torch.equal(sample(0, before=1), sample(1, before=1))


def test_the_model_is_freed(network, tokenizer, monkeypatch):
    loaded = [AutoModelForCausalLM.from_config(network.config)]
    watched = weakref.ref(loaded[0])
    monkeypatch.setattr(sampling, "load_model", lambda model: (loaded.pop(), None))
    sample_from("model", tokenizer, windows=1, length=WINDOW, seed=0, progress=silent)
    gc.collect()
    assert watched() is None


def test_windows_do_not_depend_on_the_batch_and_the_cache_changes_nothing(network, tokenizer, monkeypatch):
    at_once = sample_windows(network, tokenizer, windows=5, length=WINDOW, seed=3, progress=silent)
    for limit, value in (("MOST_WINDOWS", 2), ("CACHE_BYTES", 1)):
        monkeypatch.setattr(sampling, limit, value)
        again = sample_windows(network, tokenizer, windows=5, length=WINDOW, seed=3, progress=silent)
        assert torch.equal(again, at_once)
    generator = torch.Generator().manual_seed(3)
    torch.randint(26, (5,), generator=generator)
    draws = torch.rand(5, WINDOW, generator=generator, dtype=torch.float64)
    for window, draw in zip(at_once, draws, strict=True):
        with torch.no_grad():
            sums = network(window[None]).logits[0, :, :27].double().softmax(-1).cumsum(-1)
        for position in range(1, WINDOW):
            token = int(window[position])
            below = float(sums[position - 1, token - 1]) if token else 0.0
            assert below - 1e-6 <= float(draw[position]) <= float(sums[position - 1, token]) + 1e-6


def test_tokens_come_at_their_probabilities(network, tokenizer):
    with torch.no_grad():
        for parameter in network.model.layers.parameters():
            parameter.zero_()
    ids = sample_windows(network, tokenizer, windows=160, length=32, seed=0, progress=silent)
    starts = ordinary_tokens(tokenizer)
    assert set(ids[:, 0].tolist()) <= set(starts.tolist()) and len(ids[:, 0].unique()) > 20
    # Without its layers the model is a Markov chain.
    with torch.no_grad():
        chain = network(torch.arange(27)[:, None]).logits[:, 0, :27].softmax(-1)
    pairs = torch.zeros(27, 27).index_put((ids[:, :-1].flatten(), ids[:, 1:].flatten()), torch.ones(()), True)
    expected = pairs.sum(1, keepdim=True) * chain
    noise = (expected * (1 - chain)).sqrt()
    deviation = ((pairs - expected) / noise.clamp_min(1e-9))[expected > 5]
    assert deviation.square().mean() == pytest.approx(1, abs=0.25)


def test_a_window_starts_with_bos_only_if_the_tokenizer_marks_the_start(network, tokenizer):
    tokenizer.add_special_tokens({"bos_token": "z"})
    assert 26 not in ordinary_tokens(tokenizer) and 0 not in ordinary_tokens(tokenizer)
    ids = sample_windows(network, tokenizer, windows=40, length=WINDOW, seed=0, progress=silent)
    assert 26 not in ids[:, 0]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="z $A", special_tokens=[("z", 26)])
    ids = sample_windows(network, tokenizer, windows=40, length=WINDOW, seed=0, progress=silent)
    assert (ids[:, 0] == 26).all() and 26 not in ids[:, 1] and len(ids[:, 1].unique()) > 5


def test_sampling_mistakes(network, tokenizer, one_line):
    with torch.no_grad():
        network.lm_head.weight[3] = torch.nan
    with pytest.raises(CheckpointError, match="gives NaN where text is sampled") as error:
        sample_windows(network, tokenizer, windows=1, length=WINDOW, seed=0, progress=silent)
    one_line(error)
    small = AutoModelForCausalLM.from_config(LlamaConfig(**(network.config.to_dict() | {"vocab_size": 20})))
    with pytest.raises(CheckpointError, match="the tokenizer gives token 26, the model has 20") as error:
        sample_windows(small, tokenizer, windows=1, length=WINDOW, seed=0, progress=silent)
    one_line(error)


def test_a_recipe_repeats_the_conversion(folder, tmp_path):
    texts = ["sampled", write_letters(tmp_path / "a.txt", 100), "default"]
    method = {"calibration_tokens": 6 * WINDOW, "calibration_window": WINDOW, "calibration_weights": [2, 1, 1]}
    kvfold.convert(folder, tmp_path / "out", cache_ratio=0.5, calibration=texts, seed=5, **method)
    recipe = ["--config", str(tmp_path / "out/recipe.yaml")]
    assert cli.main(["convert", str(folder), str(tmp_path / "again"), *recipe, "--json"]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert weights[0] == weights[1]
    assert cli.main(["convert", str(folder), str(tmp_path / "other"), *recipe, "--seed", "6", "--json"]) == 0
    assert (tmp_path / "other/model.safetensors").read_bytes() != weights[0]

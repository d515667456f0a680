import pytest

from kvfold.report import tables


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def layer(index: int, elements: int = 384) -> dict:
    return {
        "layer": index,
        "attention": "GQA",
        "query_heads": 9,
        "kv_heads": 3,
        "sliding_window": None,
        "cached_elements": elements,
        "cached_bytes": 2 * elements,
        "attention_parameters": 1000,
    }


INSPECTION = {
    "model": "smollm2",
    "model_type": "llama",
    "dtype": "bfloat16",
    "parameters": 134_515_008,
    "convertible": True,
    "reason": None,
    "cached_elements_per_token": 1024,
    "cached_bytes_per_token": 2048,
    "layers": (layer(0), layer(1), layer(2, 256)),
}
PLAN = {
    "source": "smollm2",
    "model_type": "llama",
    "layout": "shared",
    "rope": "mixed",
    "factorize": "svd_joint",
    "dtype": "bfloat16",
    "calibration_tokens": 8192,
    "calibration_window": 512,
    "elements_before": 11520,
    "elements_after": 3600,
    "bytes_before": 23040,
    "bytes_after": 7200,
    "kept": 0.3125,
    "attention_parameters_before": 2000,
    "attention_parameters_after": 1500,
    "estimated_memory_bytes": 3 * 2**30,
    "layers": [
        {
            "first": 0,
            "last": 29,
            "count": 30,
            "source": {"name": "GQA"},
            "target": {"name": "MLA", "rotary_heads": 1, "qk_rope_head_dim": 24, "kv_lora_rank": 96},
            "sliding_window": None,
            "elements_before": 384,
            "elements_after": 120,
        }
    ],
}


def test_inspection_joins_layers_that_are_alike(capsys):
    tables.show_inspection(INSPECTION)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "smollm2"
    assert any(line.split() == ["0–1", "GQA", "9", "3", "–", "384", "768"] for line in lines)
    assert any(line.split() == ["2", "GQA", "9", "3", "–", "256", "512"] for line in lines)
    assert any("1,024 elements, 2.0 KiB" in line for line in lines)
    assert max(map(len, lines)) <= 100


def test_inspection_says_why_not(capsys):
    tables.show_inspection(INSPECTION | {"convertible": False, "reason": "it has no [rotary] positions", "layers": ()})
    assert "no: it has no [rotary] positions" in capsys.readouterr().out


def test_plan(capsys):
    tables.show_conversion(PLAN)
    plan = capsys.readouterr().out
    assert "Plan for smollm2" in plan
    assert "22.5 KiB to 7.0 KiB (31.25%, bfloat16)" in plan
    assert any(line.split() == ["0–29", "GQA", "MLA", "1", "x", "24", "96", "384", "120"] for line in plan.splitlines())


CONVERSION = {
    "out": "o",
    "plan": PLAN,
    "options": {},
    "stage_errors": {"rotary": [0.1, 0.3], "low rank": [0.5, 0.2]},
    "stage_losses": {"original": 3.0, "rotary": 3.25, "low rank": 2.875},
    "seconds": {"fold": 2.0, "write": 1.5},
}


def test_conversion(capsys):
    tables.show_conversion(CONVERSION)
    out = capsys.readouterr().out
    assert "Plan for" not in out
    assert "Converted smollm2 to o in 3.5 s" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["original", "3.000"] in rows
    assert ["rotary", "3.250", "+0.250", "0.200", "0.300,", "layer", "1"] in rows
    assert ["low", "rank", "2.875", "-0.125", "0.350", "0.500,", "layer", "0"] in rows
    assert ["fold", "2", "s"] in rows


def test_conversion_of_the_weights_alone(capsys):
    tables.show_conversion(CONVERSION | {"stage_errors": {}, "stage_losses": {}})
    out = capsys.readouterr().out
    assert "Converted smollm2 to o in 3.5 s" in out
    assert "original" not in out


def test_verification(capsys, results):
    tables.show_verification(results["verify"])
    out = capsys.readouterr().out
    for text in (
        "smollm2-mla against smollm2",
        "62.5% of 256",
        "model.layers.0.self_attn (25.0%)",
        "14,400 and 14,400",
    ):
        assert text in out
    assert "50.0% in model.layers.1" in out
    assert "yes" in out
    tables.show_verification(results["verify"] | {"first_diverging_module": None, "passed": False})
    out = capsys.readouterr().out
    assert "none" in out
    assert "NO: a bug" in out


def test_evaluation(capsys):
    result = {
        "model": "smollm2",
        "text": "novel.txt",
        "dtype": "float32",
        "perplexity": 29.98,
        "context": 512,
        "windows": 4,
        "cache_elements_per_token_and_layer": 384.0,
        "cache_bytes_per_token": 46080.0,
        "tokens_per_second": 21.5,
        "tasks": None,
    }
    tables.show_evaluation(result)
    out = capsys.readouterr().out
    for text in ("29.98", "4 windows of 512 tokens of novel.txt", "384 elements per layer, 45.0 KiB", "21.5 tokens/s"):
        assert text in out
    assert "acc_norm" not in out


def test_evaluation_on_tasks_alone(capsys):
    piqa = {"items": 1838, "accuracy": 0.68, "acc_norm": 0.7, "score": 0.7, "standard_error": 0.0107}
    lone = {"items": 1, "accuracy": 1.0, "acc_norm": None, "score": 1.0, "standard_error": None}
    result = {
        "model": "smollm2",
        "text": None,
        "dtype": "float32",
        "perplexity": None,
        "cache_elements_per_token_and_layer": 384.0,
        "cache_bytes_per_token": 46080.0,
        "tasks": {"tasks": {"piqa": piqa, "lone": lone}, "average": 0.85, "average_standard_error": None},
    }
    tables.show_evaluation(result)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert ["piqa", "1,838", "68.00", "70.00", "70.00", "1.07"] in rows
    assert ["lone", "1", "100.00", "–", "100.00", "–"] in rows
    assert ["average", "–", "–", "85.00", "–"] in rows
    assert not any("perplexity" in line for line in lines)


def test_demo(capsys, results):
    tables.show_demo(results)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[-7:] == ["120", "7,200", "31.25", "120.00", "(4.00x)", "24", "(1.20x)"] for line in lines)
    assert any(line.split()[-2:] == ["–", "(–)"] for line in lines)
    assert max(map(len, lines)) <= 100


def test_tradeoff(capsys, tradeoff):
    tables.show_tradeoff(tradeoff)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Trade-off of tiny <model>"
    assert any(line.split() == ["windows", "4"] for line in lines)
    rows = [line.split() for line in lines if "bf16" in line or "int" in line]
    assert rows[0] == ["original", "bf16", "–", "–", "1,000", "100.00", "–", "20.00", "(1.00x)"]
    assert ["mixed", "int4", "8", "24", "40", "4.00", "132.00", "(6.60x)", "–"] == rows[-1]
    assert len(rows) == 1 + len(tradeoff["points"])
    sizes = [int(row[-5 if row[-1] == "–" or row[-3] == "–" else -6].replace(",", "")) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert max(map(len, lines)) <= 100

"""The scripts of `benchmarks/` around the quality numbers: bars, tables, greedy comparison, lm-eval's pieces."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the quality benchmarks need the calibration environment")

from toy import write_toy
from vllm_tilequant import hf

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_bars_are_checked_one_by_one(monkeypatch):
    bench = script("bench_quality", monkeypatch)

    def verdict(stored=5.63, static=70.0, graded=180.0, loaded=3.06):
        common = {"stored_bits": stored, "profile": "3.0"}
        rows = [
            common | {"phase": "static", "kl_milli": 1.0, "loaded_bits": 5.6},
            common | {"phase": "static", "kl_milli": static, "loaded_bits": 5.6},
            common | {"phase": "graded", "kl_milli": 900.0, "loaded_bits": 2.5},
            common | {"phase": "graded", "kl_milli": graded, "loaded_bits": loaded},
            common | {"phase": "graded", "kl_milli": 10.0, "loaded_bits": 5.6},
        ]
        return [passed for passed, _ in bench.check_bars(rows)]

    assert verdict() == [True, True, True]
    assert verdict(stored=5.65) == [False, True, True]
    assert verdict(static=70.1) == [True, False, True]
    assert verdict(graded=180.1) == [True, True, False]
    assert verdict(loaded=3.07) == [True, True, False]


def test_a_report_is_complete_and_its_table_readable(monkeypatch, tmp_path):
    report = script("report", monkeypatch)
    path = tmp_path / "results" / "x.json"
    report.write(path, report.envelope("x", "cpu", [{"a": "one", "b": 1.25}, {"a": "two", "b": None}]))
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    data = json.loads(path.read_text())
    assert list(data) == ["stem", "device", "driver", "versions", "commit", "measured_at", "rows"]
    assert data["driver"] is None and data["versions"]["torch"]
    assert report.table(data["rows"], {"a": "", "b": ".1f"}).splitlines() == [
        "| a   |   b |",
        "|-----|----:|",
        "| one | 1.2 |",
        "| two |     |",
    ]
    assert report.default_path("quality", "cpu").name == "quality.cpu.json"


@pytest.mark.parametrize("length,count", [(7, 1), (20, 1), (21, 2), (53, 3)])
def test_pieces_score_every_token_once_with_all_the_context_that_fits(monkeypatch, length, count):
    pieces = script("lm_eval_perplexity", monkeypatch).pieces
    tokens = list(range(100, 100 + length))
    found = list(pieces(tokens, 1, 20))
    assert len(found) == count
    assert [t for ids, scored in found for t in ids[-scored:]] == tokens
    assert found[0][0][0] == 1
    for ids, scored in found[1:]:
        assert len(ids) == 21 > scored


def test_greedy_is_that_of_transformers(monkeypatch, tmp_path):
    greedy = script("compare_server", monkeypatch).greedy
    model = hf.load_dense(write_toy(tmp_path / "toy"))
    prompt = list(range(3, 20))
    wanted = model.generate(
        model.dummy_inputs["input_ids"].new_tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )
    assert [step.token for step in greedy(model, prompt, 6)] == wanted[0, len(prompt) :].tolist()
    assert all(step.margin >= 0 for step in greedy(model, prompt, 6))


def test_greedy_in_rows_mode_grades_single_tokens_only(monkeypatch, tmp_path):
    greedy = script("compare_server", monkeypatch).greedy
    model = hf.load_reference(write_toy(tmp_path / "toy"), graded="rows")
    greedy(model, list(range(3, 20)), 4)
    counts = hf.take_counts(model)
    modules = model.tilequant.schema.modules.values()
    assert counts.weights == (17 + 3) * sum(m.out_features * m.in_features for m in modules)
    assert sum(counts.channels) == 3 * sum(m.out_features * m.in_features for m in modules)


def test_the_readme_shows_the_committed_figures(monkeypatch):
    readme = script("readme", monkeypatch)
    text = (readme.ROOT / "README.md").read_text()
    assert readme.updated(text) == text, "run python benchmarks/readme.py"

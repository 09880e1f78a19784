"""What `benchmarks/trace_rows.py` makes of a trace: calls and times by kernel and grid, and what kernels cover together."""

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def trace_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import trace_rows

    yield trace_rows
    for name in ("trace_rows", "report"):
        sys.modules.pop(name, None)


def event(name, ts, dur, grid=None):
    return {"name": name, "ts": ts, "dur": dur, "args": {"grid": grid} if grid else {}}


def test_kernels_are_told_apart_by_grid_and_overlap_counts_once(trace_rows):
    events = [
        event("void gemv<4, true>(Args)", 0, 10, [8, 1, 1]),
        event("void gemv<4, true>(Args)", 8, 10, [8, 1, 1]),  # starts before the one before has ended
        event("void gemv<4, true>(Args)", 30, 4, [16, 1, 1]),
        event("Memcpy DtoH", 31, 1),  # inside of another
        event("<lambda>", 40, 2, [1, 1, 1]),
    ]
    *rows, together = trace_rows.summed(events, steps=2)
    got = [(r["kernel"], r["grid"], r["calls"], r["us"]) for r in rows]
    assert got == [
        ("gemv", "8x1x1", 1.0, 10.0),
        ("gemv", "16x1x1", 0.5, 2.0),
        ("<lambda>", "1x1x1", 0.5, 1.0),
        ("Memcpy DtoH", "", 0.5, 0.5),
    ]
    assert together["us"] == (18 + 4 + 2) / 2 and together["calls"] == 2.5


def test_a_step_is_what_a_trace_has_beyond_that_of_the_prompt(trace_rows):
    prompt = trace_rows.summed([event("a", 0, 100, [1]), event("long", 100, 50, [1])], 1)
    steps = [event("a", 200 + 20 * i, 10, [1]) for i in range(4)] + [event("b", 212 + 20 * i, 5, [2]) for i in range(4)]
    whole = trace_rows.summed([event("a", 0, 100, [1]), event("long", 100, 51, [1]), *steps], 1)
    got = [(r["kernel"], r["grid"], r["calls"], r["us"]) for r in trace_rows.without(whole, prompt, 4)]
    assert got == [("a", "1", 1.0, 10.0), ("b", "2", 1.0, 5.0), ("(any kernel)", "", 2.0, 15.25)]


def test_a_case_replaces_its_own_rows(trace_rows, tmp_path):
    case = dict(zip(trace_rows.CASE, ("m", "decode", 1, 128, None), strict=True))
    rows = [
        {"kernel": "a", "grid": "1", "calls": 1, "us": 6.0, "full_name": "a"},
        {"kernel": "(any kernel)", "grid": "", "us": 6.0},
    ]
    path = tmp_path / "trace.json"
    for step_us in (10.0, 8.0):
        for batch in (1, 2):
            got = trace_rows.store(path, "cpu", case | {"batch": batch}, rows, step_us, steps=4)
    assert [r["share"] for r in got] == [0.75, 0.75]
    stored = json.loads(path.read_text())["rows"]
    assert [(r["batch"], r["step_us"], r["steps"]) for r in stored] == [(1, 8.0, 4)] * 2 + [(2, 8.0, 4)] * 2


def test_the_document_shows_the_committed_traces(trace_rows):
    import performance_tables

    text = (performance_tables.ROOT / "docs" / "performance.md").read_text()
    sys.modules.pop("performance_tables")
    assert performance_tables.updated(text) == text, "run python benchmarks/performance_tables.py"

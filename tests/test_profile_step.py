"""What `benchmarks/profile_step.py` makes of a trace: calls and times by kernel and grid, and what kernels cover together."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def profile_step(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import profile_step

    yield profile_step
    for name in ("profile_step", "bench_e2e", "engine_run", "synthetic", "report", "legal_sizes", "shapes"):
        sys.modules.pop(name, None)


def event(name, ts, dur, grid=None):
    return {"name": name, "ts": ts, "dur": dur, "args": {"grid": grid} if grid else {}}


def test_kernels_are_told_apart_by_grid_and_overlap_counts_once(profile_step):
    events = [
        event("void gemv<4, true>(Args)", 0, 10, [8, 1, 1]),
        event("void gemv<4, true>(Args)", 8, 10, [8, 1, 1]),  # starts before the one before has ended
        event("void gemv<4, true>(Args)", 30, 4, [16, 1, 1]),
        event("Memcpy DtoH", 31, 1),  # inside of another
        event("<lambda>", 40, 2, [1, 1, 1]),
    ]
    *rows, together = profile_step.summed(events, steps=2)
    got = [(r["kernel"], r["grid"], r["calls"], r["us"]) for r in rows]
    assert got == [
        ("gemv", "8x1x1", 1.0, 10.0),
        ("gemv", "16x1x1", 0.5, 2.0),
        ("<lambda>", "1x1x1", 0.5, 1.0),
        ("Memcpy DtoH", "", 0.5, 0.5),
    ]
    assert together["us"] == (18 + 4 + 2) / 2 and together["calls"] == 2.5

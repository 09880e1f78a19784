"""Engines of `benchmarks/bench_e2e.py --together`: all start at once, and measure one after the other."""

import argparse
import sys
import threading
import time
from pathlib import Path

import pytest


@pytest.fixture
def bench_e2e(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import bench_e2e

    yield bench_e2e
    for name in ("bench_e2e", "engine_run", "synthetic", "report", "legal_sizes", "shapes", "trace_rows"):
        sys.modules.pop(name, None)


def test_nobody_measures_before_all_have_started_nor_beside_another(bench_e2e, monkeypatch, tmp_path):
    events, lock = [], threading.Lock()

    def note(*event):
        with lock:
            events.append(event)

    def engine(args, method, device, model, turn):
        time.sleep({"slow": 0.5, "broken": 0.2}.get(method, 0.0))
        if method == "broken":
            raise OSError("no such engine")
        note("started", method)
        bench_e2e.wait_for_turn(turn)
        note("measures", method)
        time.sleep(0.3)
        note("done", method)
        return [method]

    monkeypatch.setattr(bench_e2e, "measure", engine)
    monkeypatch.setattr(bench_e2e, "write_model", lambda args, method, device, model: note("written", method))
    (tmp_path / "quick.go").touch()  # of a run before
    args = argparse.Namespace(folder=tmp_path, methods=["quick", "broken", "slow"])
    got = {}
    for method, rows in bench_e2e.together(args, "cpu", None):
        try:
            got[method] = rows()
        except OSError as e:
            got[method] = str(e)
    assert got == {"quick": ["quick"], "broken": "no such engine", "slow": ["slow"]}
    assert events == [
        *(("written", m) for m in args.methods),
        *(("started", m) for m in ("quick", "slow")),
        *((what, m) for m in ("quick", "slow") for what in ("measures", "done")),
    ]


def test_graphs_are_those_that_a_run_replays(bench_e2e):
    assert bench_e2e.captured([1, 8], 128) == [1, 8, 64, 128]
    assert bench_e2e.captured([64, 1], 129) == [1, 64]

"""The cost of a large model's calibration, tried on a tiny one; what is held where on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tiny import llama, records
from vllm_tilequant.calibrate import placing
from vllm_tilequant.calibrate.capture import observing_gradients
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.kernels.portable import PortableWeight

pytestmark = pytest.mark.calibrate

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench_calibration_cost.py"
TINY = ["--shape", "tiny", "--records", "2", "--held-out", "1", "--length", "48", "--device", "cpu"]
#: Ends itself by SIGKILL after the third layer's codes.
KILLED = """
import os, runpy, signal, sys
from vllm_tilequant.calibrate.progress import Progress

write = Progress._write
def and_die(self, line):
    write(self, line)
    if "codes 3 of" in line:
        os.kill(os.getpid(), signal.SIGKILL)
Progress._write = and_die
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def bench(folder, *command):
    arguments = [sys.executable, *command, str(BENCH), "--folder", str(folder), "--json", str(folder) + ".json", *TINY]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_a_killed_run_goes_on_and_its_time_is_summed(tmp_path):
    folder = tmp_path / "cost"
    done = bench(folder, "-c", KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    first = json.loads((folder / "spent.0.json").read_text())["seconds"]
    done = bench(folder)
    assert done.returncode == 0, done.stderr
    assert "codes: 3 of 12 layers from the work folder" in done.stdout
    (row,) = json.loads((tmp_path / "cost.json").read_text())["rows"]
    second = json.loads((folder / "spent.1.json").read_text())["seconds"]
    assert row["total_s"] == pytest.approx(first + second) and row["processes"] == 2
    assert list(row["seconds"]) == ["model", "inputs", "scales", "scores", "codes", "thresholds", "check", "save"]
    assert row["prefill_records"] == row["decode_records"] == 2 and row["scores"] == "joint"
    assert verify(folder / "checkpoint").modules == 21


def test_what_does_not_fit_is_fetched_and_the_codes_are_the_same(monkeypatch):
    model, linears = llama(torch.float32)
    settings = Settings(scores="joint", codes="rtn")
    here = Calibration(model, linears, records(), settings).run()
    asked = []
    monkeypatch.setattr(placing, "room", lambda device: asked.append(device) or 0)
    away = Calibration(model, linears, records(), settings).run()
    assert len(asked) == 2  # weights and differences of weights
    for name, w in here.weights.items():
        assert torch.equal(w.plane0, away.weights[name].plane0) and torch.equal(w.tile_bits, away.weights[name].tile_bits)


def test_held_values_lie_on_the_cpu_where_the_room_is_too_small(monkeypatch):
    linears = {"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}
    for free, away in ((8191 + 5, True), (8192 + 5, False)):
        monkeypatch.setattr(placing, "room", lambda device, free=free: free)
        held = placing.Held(linears, {"a": 4096, "b": 4096}, spare=5)
        assert bool(held.away) == away
        weight = PortableWeight(*(torch.full((2,), float(i)) for i in range(4)))
        held.put("b", weight)
        assert list(held) == ["b"] and torch.equal(held["b"].tile_scale, weight.tile_scale)


def test_the_device_of_an_offloaded_linear_is_known_without_bringing_it(monkeypatch):
    from compressed_tensors.offload import offload_module

    linear = nn.Linear(64, 64)
    offload_module(linear, "meta" if not torch.cuda.is_available() else "cuda", "cpu")
    monkeypatch.setattr(type(linear._parameters), "onload", None)  # bringing would fail
    with pytest.raises(TypeError):
        linear.weight  # noqa: B018
    assert placing.device_of(linear).type in ("meta", "cuda") and placing.offloaded(linear)
    here = nn.Linear(64, 64)
    assert not placing.offloaded(here)
    offload_module(here, "cpu", "cpu")
    assert not placing.offloaded(here)


def test_gradients_of_an_offloaded_model_bring_no_copy_of_it():
    """Every layer's weight is a copy while it runs; the list of frozen parameters must hold those that are kept."""
    from compressed_tensors.offload import disable_onloading, offload_module

    model, linears = llama(torch.float32)
    for m in list(model.modules()):
        if m._parameters:
            offload_module(m, "cpu", "cpu")
    with disable_onloading():
        kept = list(model.parameters())
    seen = []
    with observing_gradients(model, linears, lambda name, x, g: seen.append(name)):
        assert not any(p.requires_grad for p in kept)
        model(records()[0]["input_ids"], use_cache=False).logits.sum().backward()
    assert set(seen) == set(linears) and all(p.grad is None for p in kept) and all(p.requires_grad for p in kept)

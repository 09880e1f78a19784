"""What is said before a calibration against what it then takes."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from tiny import write_model, write_text
from vllm_tilequant.calibrate import estimate as e
from vllm_tilequant.calibrate.capture import find_groups
from vllm_tilequant.calibrate.modifier import find_linears
from vllm_tilequant.calibrate.run import _skeleton, quantize
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.checkpoint.reader import Checkpoint

pytestmark = pytest.mark.calibrate

#: Peak of the process over what it held when everything was imported, as the operating system counts it.
MEASURED = """
import json, resource, sys
from pathlib import Path
import datasets, llmcompressor, psutil, transformers
from vllm_tilequant.calibrate import estimate, modifier
from vllm_tilequant.calibrate.run import quantize
before = psutil.Process().memory_info().rss
quantize(sys.argv[1], Path(sys.argv[2]), data=sys.argv[3], samples=8, length=int(sys.argv[4]), seed=0)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before))
"""
#: Settings of the C library: what is freed goes back to the system. Else it keeps some, and how much differs by a third.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
SHAPES = {
    "codes": (dict(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4), 64),
    "scores": (dict(vocab_size=32768), 256),
}


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="of a process on a Linux CPU")
@pytest.mark.parametrize("phase", SHAPES)
def test_memory_within_30_percent_and_time_within_a_factor_of_5(phase, tmp_path):
    changes, length = SHAPES[phase]
    model, out = write_model(tmp_path / "model", **changes), tmp_path / "tq"
    text = write_text(tmp_path / "text.txt")
    command = [sys.executable, "-c", MEASURED, str(model), str(out), str(text), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | FREED_AT_ONCE)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    report = json.loads((out / "calibration_report.json").read_text())
    expected = report["expected"]["memory_bytes"]
    assert max(expected, key=expected.get) == phase
    assert 0.7 < expected[phase] / measured < 1.3, (expected, measured)
    seconds, took = report["expected"]["seconds"], report["seconds"]
    assert list(seconds) == list(took)
    assert 1 / 5 < sum(seconds.values()) / sum(took.values()) < 5, (seconds, took)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.mark.parametrize("recipe", ["{}", "max_bits: 4", "max_bits: 6\nstored_bits: 5.0", "w4_fraction: 0.0\ncodes: rtn"])
def test_a_dry_run_tells_size_and_budget_and_writes_nothing(recipe, model, text, tmp_path):
    file, out = tmp_path / "recipe.yaml", tmp_path / "tq"
    file.write_text(recipe)
    arguments = dict(data=text, samples=2, length=32, seed=0, recipe=file)
    said = quantize(str(model), out, dry_run=True, **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]
    rows = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert list(rows) == ["model", "targets", "dense", "budget", "text", "output", "memory", "time"]
    quantize(str(model), out, **arguments)
    checkpoint = Checkpoint.open(out)
    counts = {b: sum(m.tile_counts.get(b, 0) for m in checkpoint.schema.modules.values()) for b in (4, 6, 8)}
    assert rows["budget"].startswith(f"{counts[4]} tiles of 4 bits, {counts[6] + counts[8]} of ")
    assert rows["budget"].endswith(f"{checkpoint.stored_bits():.3f} stored bits per weight")
    assert rows["targets"].startswith("14 linears in 8 groups (2 q_proj, 2 k_proj") and rows["dense"] == "lm_head"
    assert rows["text"] == "2 records of 32 tokens, 64 used"
    size, unit = rows["output"].split()
    assert unit == "MiB" and math.isclose(float(size), (out / "model.safetensors").stat().st_size / 2**20, abs_tol=0.06)


def test_the_command_prints_a_dry_run(model, text, tmp_path):
    code = "from vllm_tilequant.cli import main; main()"
    command = [sys.executable, "-c", code, "quantize", str(model), str(tmp_path / "tq"), "--data", str(text), "--dry-run"]
    done = subprocess.run([*command, "--length", "64"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "iB free" in done.stdout and "stored bits per weight" in done.stdout
    assert "written" not in done.stdout and not list(tmp_path.iterdir())


def test_what_cannot_fit_is_refused_before_the_model_is_read(model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(e, "free_memory", lambda: 1 << 20)
    arguments = dict(data=text, samples=2, length=32, seed=0)
    with pytest.raises(
        OSError, match=r"not enough memory: about \d+\.\d MiB needed \(codes\), 1\.0 MiB free.*--no-memory-check"
    ):
        quantize(str(model), tmp_path / "tq", **arguments)
    assert not list(tmp_path.iterdir())
    quantize(str(model), tmp_path / "tq", memory_check=False, **arguments)
    assert (tmp_path / "tq" / "config.json").is_file()


def test_a_container_s_limit_counts(tmp_path):
    whole = e.free_memory(tmp_path)  # no such files: the machine's own
    (tmp_path / "memory.current").write_text(str(5 << 20))
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 << 20}\n")
    (tmp_path / "memory.max").write_text("max")
    assert e.free_memory(tmp_path) > whole / 2
    (tmp_path / "memory.max").write_text(str(10 << 20))
    assert e.free_memory(tmp_path) == 7 << 20


def test_larger_work_needs_more(model):
    skeleton = _skeleton(model)
    linears = find_linears(skeleton, ["Linear"], ["lm_head"])
    rates = e.Rates(1e9, 1e9, 1e9)

    def need(settings=None, **changes):
        shape = dict(records=8, length=64, held_out=1) | changes
        return e.estimate(skeleton, linears, settings or Settings(), rates=rates, **shape)

    base = need()
    assert need(length=4096).peak[1] > 1.5 * base.peak[1] and need(length=4096).memory["scores"] > 1.5 * base.memory["scores"]
    assert need(records=64).seconds["codes"] > 4 * base.seconds["codes"] and need(records=64).memory != base.memory
    rtn, joint = need(Settings(codes="rtn")), need(Settings(scores="joint"))
    assert rtn.seconds["codes"] < base.seconds["codes"] < joint.seconds["scores"] + base.seconds["codes"]
    assert joint.seconds["scores"] > base.seconds["scores"] and rtn.memory["codes"] < base.memory["codes"]
    assert need(Settings(output_transform="best")).seconds["scales"] == pytest.approx(9 * base.seconds["scales"])
    assert need(Settings(thresholds="search")).seconds["thresholds"] > base.seconds["thresholds"]


def test_groups_are_seen_without_weights(model):
    from transformers import AutoModelForCausalLM

    real, skeleton = AutoModelForCausalLM.from_pretrained(model), _skeleton(model)
    targets = ["Linear"], ["lm_head"]
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    assert e._groups(skeleton, find_linears(skeleton, *targets)) == find_groups(real, find_linears(real, *targets), batch)

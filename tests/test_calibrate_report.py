"""What is said before a calibration, during it and afterwards; entries that match nothing; models of the hub."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny import hashes, write_model
from vllm_tilequant import evaluate as ev
from vllm_tilequant.calibrate.data import batches, load_records
from vllm_tilequant.calibrate.progress import Progress, clock
from vllm_tilequant.calibrate.run import quantize
from vllm_tilequant.checkpoint.reader import Checkpoint

pytestmark = pytest.mark.calibrate


@pytest.fixture(scope="module")
def quantized(model, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "tq"
    quantize(str(model), out, data=text, samples=8, length=64, seed=0)
    return out


def report_of(folder):
    return json.loads((folder / "calibration_report.json").read_text())


def test_the_report_describes_every_module_as_stored(quantized):
    report, checkpoint = report_of(quantized), Checkpoint.open(quantized)
    assert list(report["modules"]) == list(checkpoint.schema.modules)
    for name, said in report["modules"].items():
        w = checkpoint.module(name).weight
        assert said["tile_counts"] == {str(b): int((w.tile_bits == b).sum()) for b in (4, 8) if bool((w.tile_bits == b).any())}
        assert said["scale"]["smallest"] == float(w.tile_scale.min()) and said["scale"]["largest"] == float(w.tile_scale.max())
        assert said["input_group"] == checkpoint.schema.modules[name].input_group
        assert said["score_mass"] > 0
    assert sum(m["score_mass"] for m in report["modules"].values()) == pytest.approx(1)
    stored = sum(
        t.numel() * t.element_size() for n in checkpoint.schema.modules for t in checkpoint.module_tensors(n).values()
    )  # fmt: skip
    weights = sum(m.out_features * m.in_features for m in checkpoint.schema.modules.values())
    assert report["stored_bits"] == pytest.approx(8 * stored / weights)
    assert report["versions"]["torch"] == torch.__version__ and report["settings"]["codes"] == "gptq"
    assert report["peak_memory_bytes"]["host"] > 2**27 and set(report["seconds"]) >= {"inputs", "codes", "check"}


def test_the_report_tells_the_tokens_and_the_data(quantized, model, text):
    report = report_of(quantized)
    data = load_records(text, AutoTokenizer.from_pretrained(model), samples=8, length=64)
    assert report["data"] == data.report and report["data"]["source"] == "text.txt"
    assert report["calibration_tokens"] == report["data"]["tokens_used"] == 8 * 64
    assert report["data"]["held_out_tokens"] == 64


def test_measured_bits_are_those_of_the_held_out_records(quantized, model, text):
    """Once more with plain counting: the levels of every row of every linear, tile by tile."""
    report, checkpoint = report_of(quantized), Checkpoint.open(quantized)
    tokenizer = AutoTokenizer.from_pretrained(model)
    (record,) = batches(load_records(text, tokenizer, samples=8, length=64).held_out)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    read = torch.zeros(len(report["profiles"]), dtype=torch.float64)
    taken = torch.zeros(len(report["profiles"]), 5, dtype=torch.float64)
    weights = 0
    stored = {n: checkpoint.module(n) for n in checkpoint.schema.modules}

    def hook(name):
        def count(module, args):
            nonlocal weights
            x, own = args[0][0].float().abs(), stored[name]
            for i, thresholds in enumerate(own.thresholds):
                level = sum((x > t).double() * 2 for t in thresholds)  # [rows, K]
                taken[i] += torch.stack([(level == b).sum() for b in (0, 2, 4, 6, 8)]) * module.out_features
                for tile in own.weight.tile_bits.double():
                    read[i] += 64 * torch.minimum(level, tile.repeat_interleave(64)).sum() / len(x)
            weights += module.weight.numel()

        return count

    for name in stored:
        network.get_submodule(name).register_forward_pre_hook(hook(name))
    with torch.no_grad():
        network(**record)
    for i, (name, said) in enumerate(report["profiles"].items()):
        assert said["measured"]["average"] == pytest.approx(float(read[i]) / weights, abs=1e-6), name
        assert abs(said["measured"]["average"] - said["target"]) < 0.25, name
        assert set(said["measured"]["layers"]) == set(checkpoint.schema.groups)
        shares = said["measured"]["level_shares"]
        assert list(shares) == ["0", "2", "4", "6", "8"]
        assert list(shares.values()) == pytest.approx((taken[i] / taken[i].sum()).tolist(), abs=1e-6)
        for name, share in said["measured"]["layer_level_shares"].items():
            assert name in checkpoint.schema.groups and sum(share) == pytest.approx(1)


def test_quality_is_that_of_the_packed_checkpoint_on_the_held_out_record(quantized, model, text):
    rows = report_of(quantized)["quality"]
    held_out = load_records(text, AutoTokenizer.from_pretrained(model), samples=8, length=64).held_out
    ids = torch.tensor(held_out[0]["input_ids"])[None]
    wanted = [ev.Configuration("off", "static", "none"), ev.Configuration("3.0", "graded", "group64")]
    found = ev.evaluate(quantized, str(model), ids, wanted, dtype=torch.bfloat16)
    assert len(rows) == 2
    for said, judged in zip(rows, found, strict=True):
        assert {k: said[k] for k in ("profile", "phase", "activation", "tokens")} == {
            k: judged[k] for k in ("profile", "phase", "activation", "tokens")
        }
        for key in ("kl_milli", "kl_se", "kl_p99", "ppl", "ppl_reference"):  # sums in bfloat16, in another order
            assert said[key] == pytest.approx(judged[key], rel=0.05), key
        assert abs(said["top1"] - judged["top1"]) < 0.05
    assert rows[0]["kl_milli"] < rows[1]["kl_milli"]


def test_rotated_inputs_are_judged_as_they_are_served(model, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("input_rotation: 'on'\nw4_fraction: 0.0\ncodes: rtn\nnested_scales: false\n")
    quantize(str(model), tmp_path / "tq", data=text, samples=8, length=32, seed=0, recipe=recipe)
    static, graded = report_of(tmp_path / "tq")["quality"]
    held_out = load_records(text, AutoTokenizer.from_pretrained(model), samples=8, length=32).held_out
    ids = torch.tensor(held_out[0]["input_ids"])[None]
    judged = ev.evaluate(tmp_path / "tq", str(model), ids, [ev.Configuration("3.0", "graded", "group64")], dtype=torch.bfloat16)
    assert graded["kl_milli"] == pytest.approx(judged[0]["kl_milli"], rel=0.05) and static["kl_milli"] < graded["kl_milli"]


def test_without_held_out_text_nothing_is_claimed(model, text, tmp_path):
    quantize(str(model), tmp_path / "tq", data=text, samples=2, length=32, seed=0)
    report = report_of(tmp_path / "tq")
    assert report["quality"] is None
    assert all(p["measured"] is None for p in report["profiles"].values()) and report["data"]["held_out_records"] == 0


@pytest.mark.parametrize("entry,where", [("targets", "re:.*no_such$"), ("ignore", "lm_haed")])
def test_entries_that_match_nothing_are_a_warning_or_an_error(entry, where, model, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    both = {"targets": ["Linear"], "ignore": ["lm_head"]}
    both[entry].append(where)
    recipe.write_text(json.dumps(both | {"codes": "rtn"}))
    arguments = dict(data=text, samples=2, length=32, seed=0, recipe=recipe)
    with pytest.raises(ValueError, match="match nothing in this model") as e:
        quantize(str(model), tmp_path / "tq", strict=True, **arguments)
    assert f"{entry} entry {where!r}" in str(e.value) and [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]
    from loguru import logger

    said = []
    sink = logger.add(lambda m: said.append(m.record), level=logging.WARNING)
    quantize(str(model), tmp_path / "tq", **arguments)
    logger.remove(sink)
    assert [m["message"] for m in said if "match nothing" in m["message"]] == [
        f"{entry} entry {where!r} match nothing in this model"
    ]


def test_ragged_shapes_are_refused_with_entries_that_help(text, tmp_path):
    ragged = write_model(tmp_path / "ragged", intermediate_size=200)
    arguments = dict(data=text, samples=2, length=32, seed=0)
    with pytest.raises(ValueError, match="not multiples of 64") as e:
        quantize(str(ragged), tmp_path / "tq", **arguments)
    entries = str(e.value).rpartition("ignore: ")[2]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"codes: rtn\nignore: {entries}\n")
    quantize(str(ragged), tmp_path / "tq", recipe=recipe, **arguments)
    assert len(Checkpoint.open(tmp_path / "tq").schema.modules) == 8


def test_a_model_of_the_hub_is_read_from_its_cache(model, text, quantized, tmp_path):
    """The cache as the hub's client lays it out, without network; and a name that is not in it."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(model, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    code = "from vllm_tilequant.cli import main; main()"
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    def run(name):
        command = [sys.executable, "-c", code, "quantize", name, str(tmp_path / "tq"), "--data", str(text)]
        command += ["--samples", "8", "--length", "64"]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)

    done = run("someone/tiny")
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "tq") == hashes(quantized)
    shutil.rmtree(tmp_path / "tq")
    done = run("someone/other")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tilequant: someone/other is no folder here and cannot be read from the")


def test_progress_counts_and_foretells(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("vllm_tilequant.calibrate.progress.time.perf_counter", lambda: now[0])
    progress = Progress(tmp_path / "log.txt", expected={"first": 10, "second": 100})
    with progress.phase("first"):
        for _ in progress.track([1, 2], "first"):
            now[0] += 20  # four times slower than expected
    with progress.phase("second", before=50):
        for _ in progress.track(range(4), "loop"):
            now[0] += 90
    lines = [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    # 20 s of the 5 expected: 20 more, and four times 100
    assert lines[0].startswith("first 1 of 2, 20.0 s, about 7:00 left, ") and lines[0].endswith("GiB")
    assert lines[2].startswith("first done in 40.0 s")
    assert lines[3].startswith("second: loop 1 of 4, 2:20, about 4:30 left, ")  # more than 400 - 140: the loop knows better
    assert lines[-1].startswith("second done in 6:50") and progress.seconds == {"first": 40, "second": 410}
    err = capsys.readouterr().err
    assert "second: loop 1 of 4" in err and "first done" in err


@pytest.mark.parametrize("seconds,said", [(3.21, "3.2 s"), (245, "4:05"), (3723, "1:02:03")])
def test_clock(seconds, said):
    assert clock(seconds) == said

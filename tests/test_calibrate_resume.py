"""Runs that end too early: what they leave, what goes on from it, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import hashes
from vllm_tilequant.calibrate.run import quantize
from vllm_tilequant.calibrate.work import WorkFolder, model_fingerprint
from vllm_tilequant.checkpoint.verify import verify

pytestmark = pytest.mark.calibrate

#: Runs `tilequant` and ends itself by SIGKILL right after the first line of the log that holds the marker.
KILLED = """
import os, signal, sys
from vllm_tilequant.calibrate.progress import Progress
from vllm_tilequant.cli import main

write = Progress._write
def and_die(self, line):
    write(self, line)
    if sys.argv[1] in line:
        os.kill(os.getpid(), signal.SIGKILL)
Progress._write = and_die
main(sys.argv[2:])
"""
OPTIONS = dict(samples=8, length=32, seed=0)


@pytest.fixture(scope="module")
def whole(model, text, tmp_path_factory):
    """The checkpoint of a run that nothing ended."""
    out = tmp_path_factory.mktemp("out") / "tq"
    quantize(str(model), out, data=text, **OPTIONS)
    return out


def killed(marker, model, text, out, *more):
    options = [f"--{k}={v}" for k, v in OPTIONS.items()]
    command = [sys.executable, "-c", KILLED, marker, "quantize", str(model), str(out), f"--data={text}", *options, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    return out.with_name(out.name + ".work")


@pytest.fixture(scope="module")
def ended(model, text, tmp_path_factory):
    """The work folder of a run killed after the third layer; copied by the tests."""
    return killed("codes 3 of 8", model, text, tmp_path_factory.mktemp("ended") / "tq")


@pytest.mark.parametrize(
    "marker,restored",
    [
        ("scales 2 of 8", ["inputs: from"]),
        ("prefill scores 1 of", ["inputs: from", "scales: from"]),
        ("codes 3 of 8", ["inputs: from", "scales: from", "scores: from", "codes: 3 of 8 layers from"]),
        ("thresholds done", ["codes: 8 of 8 layers from"]),
    ],
)
def test_a_killed_run_goes_on_and_gives_the_same_bytes(marker, restored, model, text, whole, ended, tmp_path, capsys):
    out = tmp_path / "tq"
    at_codes = marker == "codes 3 of 8"
    work = shutil.copytree(ended, tmp_path / "tq.work") if at_codes else killed(marker, model, text, out)
    assert marker in (work / "log.txt").read_text().splitlines()[-1]
    assert {f.suffix for f in (work / "state").iterdir()} == {".safetensors"}
    quantize(str(model), out, data=text, resume=True, **OPTIONS)
    said = capsys.readouterr().err
    for line in restored:
        assert line in said
    assert hashes(out) == hashes(whole)
    verify(out)
    assert [p.name for p in tmp_path.iterdir()] == ["tq"], "the work folder is gone when the checkpoint is complete"
    report = json.loads((out / "calibration_report.json").read_text())
    assert set(report["seconds"]) == {"inputs", "scales", "scores", "codes", "thresholds", "check"}


def test_a_folded_diagonal_is_folded_once_however_often_a_run_begins(model, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("input_diagonal: folded\nscores: joint\n")
    quantize(str(model), tmp_path / "whole", data=text, recipe=recipe, **OPTIONS)
    out = tmp_path / "tq"
    killed("codes 3 of 8", model, text, out, "--recipe", str(recipe))
    quantize(str(model), out, data=text, recipe=recipe, resume=True, **OPTIONS)
    assert hashes(out) == hashes(tmp_path / "whole")


def test_a_run_may_be_killed_twice(model, text, whole, ended, tmp_path):
    shutil.copytree(ended, tmp_path / "tq.work")
    out = tmp_path / "tq"
    killed("codes 2 of 5", model, text, out, "--resume")
    quantize(str(model), out, data=text, resume=True, **OPTIONS)
    assert hashes(out) == hashes(whole)


def test_resume_with_nothing_to_go_on_from_begins(model, text, whole, tmp_path):
    quantize(str(model), tmp_path / "tq", data=text, resume=True, **OPTIONS)
    assert hashes(tmp_path / "tq") == hashes(whole)


def test_another_recipe_text_or_model_is_refused_and_the_state_stays(model, text, ended, tmp_path):
    work = shutil.copytree(ended, tmp_path / "tq.work")
    out, before = tmp_path / "tq", sorted(p.name for p in (work / "state").iterdir())
    with pytest.raises(FileExistsError, match=r"unfinished run: go on with it by --resume, or remove"):
        quantize(str(model), out, data=text, **OPTIONS)
    with pytest.raises(ValueError, match=r"begun with another recipe \(w4_fraction None, now 0.5\): resume with the same"):
        quantize(str(model), out, data=text, resume=True, w4_fraction=0.5, **OPTIONS)
    with pytest.raises(ValueError, match="begun with another data: "):
        quantize(str(model), out, data=text, resume=True, **(OPTIONS | {"length": 16}))
    other = shutil.copytree(model, tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="begun with another model: "):
        quantize(str(other), out, data=text, resume=True, **OPTIONS)
    assert sorted(p.name for p in (work / "state").iterdir()) == before and not out.exists()


def test_an_error_in_the_middle_keeps_what_is_done(model, text, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("vllm_tilequant.calibrate.quantize.gptq", full)
    with pytest.raises(OSError, match="No space"):
        quantize(str(model), tmp_path / "tq", data=text, **OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["tq.work"]
    assert "--resume goes on from there" in capsys.readouterr().err


@dataclass(frozen=True)
class Pair:
    first: torch.Tensor
    second: tuple[int, str]


def test_state_comes_back_as_it_was(tmp_path):
    work = WorkFolder.open(tmp_path / "w", (Pair,), {}, resume=False)
    shared = torch.arange(6).view(2, 3)
    state = {"a": {4: shared, 8: shared.T}, "b": [Pair(shared[0].bfloat16(), (1, "x")), None], "c": 0.1}
    work.save("step", state)
    back = work.load("step")
    assert torch.equal(back["a"][4], shared) and torch.equal(back["a"][8], shared.T) and back["c"] == 0.1
    pair = back["b"][0]
    assert torch.equal(pair.first, shared[0].bfloat16()) and pair.second == (1, "x") and back["b"][1] is None
    assert work.load("other") is None
    with pytest.raises(TypeError, match="cannot be kept"):
        work.save("bad", {"x": object()})


def test_a_running_run_holds_its_folder_and_foreign_folders_are_left_alone(tmp_path):
    held = WorkFolder.open(tmp_path / "w", (), {}, resume=False)
    with pytest.raises(BlockingIOError, match="another run is at work"):
        WorkFolder.open(tmp_path / "w", (), {}, resume=True)
    assert held.empty
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="not the work folder"):
        WorkFolder.open(tmp_path / "foreign", (), {}, resume=True)


def test_the_model_fingerprint_sees_names_sizes_headers_and_samples(model, tmp_path):
    first = model_fingerprint(model)
    assert model_fingerprint(shutil.copytree(model, tmp_path / "same")) == first
    renamed = shutil.copytree(model, tmp_path / "renamed")
    (renamed / "model.safetensors").rename(renamed / "other.safetensors")
    changed = shutil.copytree(model, tmp_path / "changed")
    (changed / "config.json").write_text((changed / "config.json").read_text() + " ")
    assert len({first, model_fingerprint(renamed), model_fingerprint(changed)}) == 3

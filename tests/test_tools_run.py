"""Verbs that leave the checkpoint format: convert, serve, doctor, report."""

import importlib.util
import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from toy import ROTATED, write_toy
from vllm_tilequant.checkpoint import convert
from vllm_tilequant.checkpoint.reader import Checkpoint

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


@needs_transformers
@pytest.mark.parametrize("shard_bytes", [convert.SHARD_BYTES, 300_000])
def test_a_dense_copy_has_the_same_logits(toy, tmp_path, shard_bytes):
    from transformers import AutoModelForCausalLM

    from vllm_tilequant import hf

    files = convert.to_dense(toy, tmp_path / "dense", shard_bytes=shard_bytes)
    assert (len(files) > 3) == (shard_bytes == 300_000)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, hf.load_dense(toy, torch.bfloat16)(ids).logits)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "dense" / name).read_bytes() == (toy / name).read_bytes()
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_convert_is_all_or_nothing(toy, tmp_path, tilequant, monkeypatch):
    code, out, err = tilequant("convert", toy, tmp_path / "dense", "--json")
    assert code == 0, err
    assert json.loads(out)["files"] == ["model.safetensors"]
    assert {t.dtype for t in load_file(tmp_path / "dense" / "model.safetensors").values()} == {torch.bfloat16}
    code, _, err = tilequant("convert", toy, tmp_path / "dense")
    assert code == 1 and "is there already" in err

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(convert, "write_manifest", fail)
    code, _, err = tilequant("convert", toy, tmp_path / "other")
    assert code == 1 and "disk full" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense"]


def test_serve_prints_the_command(toy, tilequant):
    code, out, err = tilequant("serve", toy, "--profile", "2.0", "--tp", 2, "--json", "--", "--port", 9000)
    assert code == 0, err
    command = json.loads(out)
    assert command[:7] == ["vllm", "serve", str(toy), "--quantization", "tilequant", "--dtype", "bfloat16"]
    assert command[7:9] == ["--tensor-parallel-size", "2"] and command[-2:] == ["--port", "9000"]
    assert json.loads(command[10]) == {"tilequant": {"profile": "2.0", "activation": "group64"}}
    command = json.loads(tilequant("serve", toy, "--prefill-activation", "group64", "--json")[1])
    assert json.loads(command[-1])["tilequant"]["prefill_activation"] == "group64"
    command = json.loads(tilequant("serve", toy, "--int8-copy", "--json")[1])
    assert json.loads(command[-1])["tilequant"]["int8_copy"] is True
    code, out, _ = tilequant("serve", toy, "--print")
    assert code == 0 and f"vllm serve {toy}" in out and '"profile": "3.0"' in out
    assert "unknown profile '9'" in tilequant("serve", toy, "--profile", "9")[2]
    assert "legal tensor-parallel sizes are [1, 2, 4]" in tilequant("serve", toy, "--tp", 3)[2]


def test_serve_runs_it_or_names_the_extra(toy, tilequant, monkeypatch):
    from vllm_tilequant.cli import serve

    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    code, _, err = tilequant("serve", toy)
    assert code == 3 and "pip install 'vllm-tilequant[serve]'" in err
    ran = []
    monkeypatch.setattr(serve, "find_spec", lambda _: True)
    monkeypatch.setattr(serve.shutil, "which", lambda _: "/usr/bin/vllm")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(os, "execv", lambda program, command: ran.append((program, command)))
    assert tilequant("serve", toy)[0] == 0
    assert ran[0][0] == "/usr/bin/vllm" and ran[0][1][:2] == ["vllm", "serve"]


def test_doctor(tilequant):
    code, out, err = tilequant("doctor", "--json")
    data = json.loads(out)
    assert data["packages"]["torch"] and data["packages"]["vllm-tilequant"]
    kernels = {f"{phase} {path}" for phase in ("decode", "prefill") for path in ("cuda", "triton")}
    assert set(next(iter(data["kernels"].values()))) == kernels
    installed = importlib.util.find_spec("vllm") is not None
    assert data["plugin"]["expected"] == data["plugin"]["registered"] == installed, data["plugin"]
    assert code == 0, err
    if not torch.cuda.is_available():
        assert data["kernels"] == {"no GPU": dict.fromkeys(kernels, "no CUDA GPU; the portable path serves")}
    code, out, _ = tilequant("doctor")
    assert code == 0 and out.startswith("```text\n") and out.endswith("```\n") and torch.__version__ in out


def test_report_is_one_page_with_pictures(toy, tmp_path, tilequant):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "toy"
    shutil.copytree(toy, folder)
    names = list(Checkpoint.open(folder).schema.modules)
    calibration = {
        "modules": {n: {"score_mass": 2.5} for n in names}
        | {"unknown": {"score_mass": 1.0}, names[0]: {"score_mass": "no number"}, names[1]: 7},
        "search": {"2.0": {"shares": [0.1, 0.2, 0.3, 0.2, 0.2]}, "3.0": 7},
    }
    (folder / "calibration_report.json").write_text(json.dumps(calibration))
    row = {"phase": "graded", "activation": "group64", "kl_se": 1.0, "top1": 0.9, "ppl": 20.0, "level_shares": None}
    rows = [row | {"profile": p, "loaded_bits": b, "kl_milli": 100 / b} for p, b in (("2.0", 2.0), ("<b>", 4.0))]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    timed = {
        "batch": 1,
        "ttft_ms": 9.0,
        "tpot_ms": 3.0,
        "memory": "gpu",
        "weights_gib": 1.0,
        "resident_gib": 2.0,
        "peak_gib": 3.0,
    }
    speed = [timed | {"method": "bf16", "profile": None}, timed | {"method": "tilequant", "profile": "2.0"}]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": speed}))
    arguments = ["report", folder, tmp_path / "r.html", "--quality", tmp_path / "rows.json", "--speed", tmp_path / "bench.json"]
    arguments += ["--png", tmp_path / "png", "--json"]
    code, out, err = tilequant(*arguments)
    assert code == 0, err
    pictures = [
        "share",
        "depth",
        "maps",
        "mass",
        "pareto",
        "speed",
        "speed_pareto",
        "levels",
        "maps of layer 0",
        "maps of layer 1",
    ]
    assert json.loads(out)["pictures"] == pictures
    text = (tmp_path / "r.html").read_text()
    assert text.count('src="data:image/png;base64,') == len(pictures) and "&lt;b&gt;" in text and "<b>" not in text
    assert "http" not in text and "<script" not in text  # needs nothing from elsewhere
    for name in pictures:
        png = (tmp_path / "png" / f"{name.replace(' ', '-')}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 3000
    (tmp_path / "bench.json").write_text("[1]")
    assert "does not hold rows of tilequant bench" in tilequant(*arguments)[2]
    (tmp_path / "rows.json").write_text("[1]")
    assert "does not hold rows" in tilequant(*arguments)[2]


def test_report_names_the_missing_package(toy, tmp_path, tilequant, monkeypatch):
    for module in ("report", "cli.report", "checkpoint.report", "checkpoint.pictures"):
        monkeypatch.delitem(sys.modules, f"vllm_tilequant.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    from vllm_tilequant import checkpoint

    for name in ("report", "pictures"):
        monkeypatch.delattr(checkpoint, name, raising=False)
    code, _, err = tilequant("report", toy, tmp_path / "r.html")
    assert code == 3 and "pip install 'vllm-tilequant[report]'" in err and not (tmp_path / "r.html").exists()


@needs_transformers
def test_rotated_inputs_through_the_tools(tmp_path, tilequant):
    """The dense copy computes what the rotated form does; inspect, diff and --deep know of it, compressed-tensors refuses."""
    from vllm_tilequant import hf

    toy, other = write_toy(tmp_path / "toy", rotated=ROTATED), write_toy(tmp_path / "other")
    data = json.loads(tilequant("inspect", toy, "--json")[1])
    rotated = {row["name"] for row in data["modules"] if row["rotated_inputs"]}
    assert rotated == {f"model.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")}
    assert data["rotated_inputs"] == 6 and "inputs rotated in 6 of 14" in tilequant("inspect", toy)[1]
    changed = json.loads(tilequant("diff", toy, other, "--json")[1])["modules"]
    assert {name for name, row in changed.items() if row == {"input_transform": "only in one"}} == rotated == set(changed)
    assert "input transform 6" in tilequant("diff", toy, other)[1]
    convert.to_dense(toy, tmp_path / "dense", torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        got = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)(ids).logits
        want = hf.load_reference(toy, profile="off", activation="none")(ids).logits  # rotates its inputs
    assert (got - want).norm() / want.norm() < 1e-5
    assert max(json.loads(tilequant("verify", toy, "--deep", tmp_path / "dense", "--json")[1])["errors"].values()) < 1e-6
    code, _, err = tilequant("verify", other, "--deep", tmp_path / "dense")
    assert code == 1 and "no quantization of this source" in err and err.count("relative error 1.") == 6
    code, _, err = tilequant("convert", toy, tmp_path / "out", "--to", "w8a16")
    assert code == 1 and "model.layers.0.self_attn.o_proj: its inputs are rotated" in err

"""The verbs around a checkpoint, in this process: what they print, their JSON, and their exit codes."""

import importlib.util
import json
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from toy import write_toy
from vllm_tilequant.checkpoint.parallel import tensor_parallel
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.kernels import layout, portable

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
Q = "model.layers.0.self_attn.q_proj"


def copy(toy, tmp_path, change):
    """A copy whose tensors went through `change`."""
    folder = tmp_path / "copy"
    shutil.copytree(toy, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_inspect_counts_every_byte(toy, tilequant):
    code, out, err = tilequant("inspect", toy, "--json")
    assert code == 0, err
    data = json.loads(out)
    tensors = load_file(toy / "model.safetensors")
    assert data["tensor_bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert data["tensor_bytes"] + data["header_bytes"] == (toy / "model.safetensors").stat().st_size
    assert sum(p["bytes"] for p in data["parts"].values()) == data["tensor_bytes"]
    assert data["stored_bits"] == Checkpoint.open(toy).stored_bits()
    assert sum(data["tile_counts"].values()) == sum(sum(r["tile_counts"].values()) for r in data["modules"])
    assert data["skipped"] == {
        "model.embed_tokens": "embedding: looked up, not multiplied",
        "lm_head": "tied to the embeddings, stores nothing",
    }
    code, out, _ = tilequant("inspect", toy, "--layers")
    assert code == 0 and Q in out and "tied to the embeddings" in out and f"{data['stored_bits']:.3f}" in out


def test_inspect_says_what_is_legal(toy, tilequant):
    code, out, _ = tilequant("inspect", toy, "--tp", 2, "--pp", 2)
    assert code == 0 and "tensor-parallel size 2: legal" in out and "pipeline-parallel size 2: legal" in out
    code, out, _ = tilequant("inspect", toy, "--tp", 8)
    assert code == 1 and "4 attention heads do not divide" in out and "next legal sizes: 4 below, none above" in out
    assert f"{Q.replace('.0.', '.0-1.')}: 256 outputs / 8 = 32, not a multiple of 64" in out
    code, out, _ = tilequant("inspect", toy, "--tp", 3, "--pp", 3, "--json")
    assert code == 1
    assert json.loads(out)["tensor_parallel"]["legal_sizes"] == [1, 2, 4]  # at 4, two ranks hold copies of a key-value head
    assert "2 layers" in json.loads(out)["pipeline_parallel"]["faults"][0]


def test_legal_sizes_are_those_that_tiles_can_be_cut_at(toy):
    """Against `slice_weight`, which raises where a cut does not fall on a border of tiles."""
    checkpoint = Checkpoint.open(toy)

    def cut(name, size):
        weight = checkpoint.module(name).weight
        n, k = weight.out_features, weight.in_features
        if name.endswith(("k_proj", "v_proj")):
            size = min(size, 2)  # beyond its two heads, ranks hold copies
        rows = name.endswith(("o_proj", "down_proj"))
        layout.slice_weight(weight, (0, n if rows else n // size), (0, k // size if rows else k))

    for size in (1, 2, 4, 8):
        try:
            for name in checkpoint.schema.modules:
                cut(name, size)
            whole = True
        except ValueError:
            whole = False
        assert whole == (not tensor_parallel(checkpoint, size).faults) == (size <= 4)


def test_verify_has_json(toy, tilequant):
    code, out, err = tilequant("verify", toy, "--json")
    assert code == 0 and json.loads(out)["modules"] == 14, err


def test_verify_deep(toy, tmp_path, tilequant):
    """Against the dense form of the same checkpoint: no error. Against one with a changed weight and a changed norm: named."""
    checkpoint = Checkpoint.open(toy)
    tensors = {n: checkpoint.tensor(n) for n in checkpoint.dense_names}
    for name in checkpoint.schema.modules:
        module = checkpoint.module(name)
        tensors[f"{name}.weight"] = portable.dequantize(module.weight, checkpoint.transforms, torch.float32)
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.clone()
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "pytorch_model.bin").write_bytes(b"")  # not read; a source is the user's own
    code, out, err = tilequant("verify", toy, "--deep", source, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert set(data["errors"]) == set(checkpoint.schema.modules) and max(data["errors"].values()) == 0
    assert data["equal_to_source"] == len(checkpoint.dense_names) + 6
    tensors[f"{Q}.weight"][:64] *= 1.5
    noise = 0.5 * float(tensors[f"{Q}.weight"][:64].norm()) / 1.5 / float(tensors[f"{Q}.weight"].norm())
    save_file(tensors, source / "model.safetensors")
    code, out, _ = tilequant("verify", toy, "--deep", source, "--json")
    assert code == 0 and json.loads(out)["errors"][Q] == pytest.approx(noise, rel=1e-4)
    tensors["model.norm.weight"][5] += 1
    tensors[f"{Q}.weight"].neg_()
    tensors["extra.weight"] = torch.ones(2, 2)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    code, out, err = tilequant("verify", toy, "--deep", source)
    assert code == 1 and "4 faults" in err
    for fault in (
        f"{Q}: relative error 1.",
        "model.norm.weight: differs from the source in 1 of 256",
        "model.layers.1.mlp.up_proj.weight: not in the source",
        "extra.weight: in the source, not in the checkpoint",
    ):
        assert fault in err


def test_manifest(toy, tmp_path, tilequant):
    folder = copy(toy, tmp_path, lambda t: None)
    assert "none there" in tilequant("verify", folder)[1]
    assert tilequant("manifest", folder, "--check")[0] == 1
    code, out, err = tilequant("manifest", folder, "--json")
    assert code == 0 and json.loads(out)["files"] == 5, err
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    (folder / "README.md").write_text("a card, added later")
    assert "all files match" in tilequant("verify", folder)[1]
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    for verb in (("verify", folder), ("manifest", folder, "--check")):
        code, _, err = tilequant(*verb)
        assert code == 1 and "tokenizer_config.json: changed" in err and "generation_config.json: missing" in err
    for line in (f"{'0' * 64}  ../x", "x", f"{'0' * 64}  sub/x"):
        (folder / "SHA256SUMS").write_text(line + "\n")
        assert "line 1: wanted a SHA-256 and a file name of this folder" in tilequant("verify", folder)[2]
    assert tilequant("manifest", folder)[0] == 0


def test_diff(toy, tmp_path, tilequant):
    same = tilequant("diff", toy, toy, "--json", "--exit-code")
    assert same[0] == 0 and json.loads(same[1])["identical"]

    def change(t):
        t[f"{Q}.weight_tile_scale"][0, 1] *= 1.25
        for member in ("q", "k", "v"):
            t[f"model.layers.0.self_attn.{member}_proj.thresholds"][1] *= 2
        t["model.norm.weight"][:3] += 1
        t["model.layers.1.mlp.down_proj.weight_plane0"][7, 1] ^= 1

    other = copy(toy, tmp_path, change)
    code, out, err = tilequant("diff", toy, other, "--json", "--exit-code")
    assert code == 1, err
    data = json.loads(out)
    assert data["modules"][Q]["scale"] == {"changed": 1, "largest_relative": 0.25}
    assert data["modules"][Q]["thresholds"] == {"3.0": {"changed": 4, "largest_relative": 1.0}}
    assert data["modules"]["model.layers.1.mlp.down_proj"] == {"codes_changed": 1}
    assert len(data["modules"]) == 4 and data["dense"] == {"model.norm.weight": "3 of 256 entries differ"}
    assert not data["config"] and not data["map_changes"]
    code, out, _ = tilequant("diff", toy, other)
    assert code == 0 and Q in out and "25.00%" in out and "100.00%" in out


def test_diff_of_maps_and_config(tmp_path, tilequant):
    narrow = write_toy(tmp_path / "4", kind="all4", layers=1)
    wide = write_toy(tmp_path / "8", kind="all8", layers=1, tied=False)
    data = json.loads(tilequant("diff", narrow, wide, "--json")[1])
    tiles = sum(m.n_tiles * m.k_tiles for m in Checkpoint.open(narrow).schema.modules.values())
    assert data["map_changes"] == {"4->8": tiles} and data["config"] == {"tie_word_embeddings": [True, False]}
    assert data["dense"]["lm_head.weight"] == "only in the second"
    assert data["stored_bits"][0] < 4.2 and data["stored_bits"][1] > 8

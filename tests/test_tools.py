"""The verbs around a checkpoint, in this process: what they print, their JSON, and their exit codes."""

import importlib.util
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from toy import write_toy
from vllm_tilequant import cli
from vllm_tilequant.checkpoint.parallel import tensor_parallel
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.kernels import layout

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("toy") / "toy", bias=True, heads=4, kv_heads=2, hidden=256, intermediate=256)


@pytest.fixture
def tilequant(capsys):
    """Run a verb; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        with pytest.raises(SystemExit) as e:
            cli.main([str(a) for a in arguments])
        out = capsys.readouterr()
        return e.value.code or 0, out.out, out.err

    return call


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
    assert f"{Q}: 256 outputs / 8 = 32, not a multiple of 64" in out
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

"""Opening and verifying checkpoints: what is sound opens, each class of fault is named."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from toy import write_toy
from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.reader import Checkpoint, CheckpointError, dense_faults
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.kernels import layout

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def folder(tmp_path):
    return write_toy(tmp_path / "toy")


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_sound_checkpoint(folder):
    summary = verify(folder)
    assert summary.modules == 14 and summary.profiles == ["2.0", "3.0", "4.0"] and summary.default_profile == "3.0"
    checkpoint = Checkpoint.open(folder)
    assert sum(summary.tile_counts.values()) == sum(m.n_tiles * m.k_tiles for m in checkpoint.schema.modules.values())
    tensors = load_file(folder / "model.safetensors")
    own = {n: t for n, t in tensors.items() if n not in checkpoint.dense_names}
    weights = sum(m.out_features * m.in_features for m in checkpoint.schema.modules.values())
    total = sum(t.numel() * t.element_size() for t in own.values())
    assert checkpoint.stored_bits() == summary.stored_bits == 8 * total / weights
    assert all(t.dim() == 2 for t in own.values())
    module = checkpoint.module(Q)
    assert layout.unpack(module.weight).shape == (128, 128) and module.bias is None


def test_bias_is_read_under_its_usual_name(tmp_path):
    checkpoint = Checkpoint.open(write_toy(tmp_path / "toy", bias=True))
    assert checkpoint.module(Q).bias.shape == (128,) and checkpoint.module(DOWN).bias is None


def test_a_sharded_checkpoint(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert verify(folder).modules == 14
    for target in ("../other.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "x.bin"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
        with pytest.raises(CheckpointError, match="outside the folder"):
            Checkpoint.open(folder)
    index["weight_map"]["ghost.weight"] = "model-1.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="ghost.weight: the index names it"):
        Checkpoint.open(folder)


CONFIG_FAULTS = {
    "no quantization_config": (lambda c: c.pop("quantization_config"), "is not quantized"),
    "foreign method": (lambda c: c["quantization_config"].update(quant_method="gptq"), "quant_method is 'gptq'"),
    "newer format": (lambda c: c["quantization_config"].update(format_version=2), "format_version is 2.*upgrade"),
    "unknown feature": (lambda c: c["quantization_config"].update(required_features=["trellis"]), "trellis"),
    "other tile": (lambda c: c["quantization_config"].update(tile=32), "tile is 32"),
    "not a multiple": (
        lambda c: c["quantization_config"]["modules"][Q].update(out_features=100),
        "100, 128. is not a multiple of 64",
    ),
    "counts": (lambda c: c["quantization_config"]["modules"][Q].update(tile_counts={"4": 1}), "tile_counts sum to 1"),
    "bad default": (lambda c: c["quantization_config"]["profiles"].update(default="9"), "default profile '9'"),
    "unknown transform": (
        lambda c: c["quantization_config"]["transforms"].append({"kind": "dct"}),
        "unknown transform kind 'dct'",
    ),
    "unknown generator": (
        lambda c: c["quantization_config"]["transforms"][1].update(generator=7),
        "generator version 7",
    ),
    "no modules": (lambda c: c["quantization_config"].update(modules={}), "modules"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_config_faults_are_named(folder, fault):
    change, message = CONFIG_FAULTS[fault]
    edit_config(folder, change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


TENSOR_FAULTS = {
    "missing": (lambda t: t.pop(f"{Q}.{s.SCALE}"), f"{Q}.{s.SCALE}: missing"),
    "wrong shape": (
        lambda t: t.update({f"{Q}.{s.PLANE0}": t[f"{Q}.{s.PLANE0}"][:64]}),
        r"I32 \[64, 8\], wanted I32 \[128, 8\]",
    ),
    "wrong dtype": (lambda t: t.update({f"{Q}.{s.MAP}": t[f"{Q}.{s.MAP}"].int()}), "I32.*wanted U8"),
    "extra": (lambda t: t.update({f"{Q}.weight": torch.ones(2)}), f"{Q}.weight: extra"),
    "unannounced module": (lambda t: t.update({f"x.{s.MAP}": torch.ones(2)}), f"x.{s.MAP}: extra"),
    "map value": (lambda t: t[f"{Q}.{s.MAP}"].fill_(5), r"holds \[5\]"),
    "map counts": (lambda t: t[f"{Q}.{s.MAP}"].fill_(2), "config.json promises"),
    "scale zero": (lambda t: t[f"{Q}.{s.SCALE}"][0].fill_(0), "not finite and > 0"),
    "scale nan": (lambda t: t[f"{DOWN}.{s.SCALE}"][0].fill_(float("nan")), f"{DOWN}.{s.SCALE} holds 3 entries"),
    "thresholds": (lambda t: t[f"{DOWN}.{s.THRESHOLDS}"][0, 1].fill_(-5), "not finite and ascending"),
    "group thresholds": (lambda t: t[f"{Q}.{s.THRESHOLDS}"].mul_(2), "differ within the shared-input group"),
    "transform": (lambda t: t[f"{Q}.{s.OUTPUT_TRANSFORM}"].fill_(3), "holds 3, the checkpoint has 3 transforms"),
    "dense nan": (lambda t: t["model.norm.weight"][0].fill_(float("nan")), "model.norm.weight is not finite"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensor_faults_are_named(folder, fault):
    change, message = TENSOR_FAULTS[fault]
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        verify(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype):
    bad = [float("nan")] if dtype == torch.float8_e4m3fn else [float("nan"), float("inf"), -float("inf")]
    for size in (1, 7, 64, 1000, 70_001):
        sound = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        assert dense_faults("t", sound) == []
        for value, place in itertools.product(bad, {0, size // 3, size // 2, size - 1}):
            tensor = sound.clone()
            tensor[place] = value
            assert dense_faults("t", tensor) == ["t is not finite"]
    assert dense_faults("t", torch.empty(0, 3, dtype=dtype)) == []


def test_two_bit_tiles_keep_their_second_plane_empty(tmp_path):
    folder = write_toy(tmp_path / "toy", kind="all2")
    assert verify(folder).tile_counts == {2: verify(folder).tile_counts[2]}
    edit_tensors(folder, lambda t: t[f"{Q}.{s.PLANE1}"][3, 1].fill_(64))
    with pytest.raises(CheckpointError, match="not empty under 2-bit tiles"):
        verify(folder)


def test_every_fault_is_in_one_message(folder):
    edit_tensors(folder, lambda t: [t.pop(f"{Q}.{s.SCALE}"), t.pop(f"{DOWN}.{s.MAP}")])
    with pytest.raises(CheckpointError, match=f"2 faults(.|\n)*{Q}.{s.SCALE}(.|\n)*{DOWN}.{s.MAP}"):
        Checkpoint.open(folder)


def test_damaged_and_absent_files(folder, tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        Checkpoint.open(folder)

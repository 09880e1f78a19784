"""Weights that arrive again while an engine runs, through vLLM's own reload of a model, layer by layer."""

import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from cases import make_case
from layers import Toy, build, feed, on_rank, one_rank  # noqa: F401 - a fixture
from vllm_tilequant import schema as s
from vllm_tilequant.config import TileQuantConfig

pytestmark = pytest.mark.serve

QKV = {"a.q_proj": (768, 128), "a.k_proj": (192, 128), "a.v_proj": (192, 128)}
SHARDS = {"a.q_proj": "q", "a.k_proj": "k", "a.v_proj": "v"}


def qkv(toy, bias=True):
    return build(QKVParallelLinear, toy, 128, 64, 12, 3, prefix="a.qkv_proj", bias=bias)


def down(toy):
    return build(RowParallelLinear, toy, 768, 128, prefix="a.down_proj")


def gate_up(toy):
    return build(MergedColumnParallelLinear, toy, 128, [768, 768], prefix="a.gate_up_proj")


CASES = {
    "qkv": (qkv, QKV, tuple(QKV), SHARDS),
    "gate_up": (gate_up, {"a.gate_proj": (768, 128), "a.up_proj": (768, 128)}, (), {"a.gate_proj": 0, "a.up_proj": 1}),
    "down": (down, {"a.down_proj": (128, 768)}, (), {"a.down_proj": None}),
}


def other(toy, shapes, bias):
    """The same maps with other codes, scales, thresholds and transforms."""
    new = Toy(shapes, bias=bias, make=lambda n, k, kind, seed: make_case(n, k, kind, seed=seed))
    g = torch.Generator().manual_seed(9)
    factor = torch.rand(1, generator=g) + 1
    for tensors in new.tensors.values():
        tensors[s.PLANE0].copy_(torch.randint(-(2**31), 2**31, tensors[s.PLANE0].shape, generator=g))
        tensors[s.EXTENSION].copy_(torch.randint(-(2**31), 2**31, tensors[s.EXTENSION].shape, generator=g))
        tensors[s.SCALE].mul_(3)
        tensors[s.THRESHOLDS].mul_(factor)
        tensors[s.OUTPUT_TRANSFORM].copy_(tensors[s.OUTPUT_TRANSFORM].flip(0))
        if s.BIAS in tensors:
            tensors[s.BIAS].neg_()
    assert new.config == toy.config
    return new


def start(make, toy, shards):
    model = torch.nn.ModuleList([make(toy)])
    record_metadata_for_reloading(model)
    feed(model[0], toy, shards)
    return model


def held(layer):
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_reloaded_weights_lie_where_the_first_did(monkeypatch, case, size, seed):
    make, shapes, bias, shards = CASES[case]
    toy = Toy(shapes, bias=bias)
    new = other(toy, shapes, bias)
    on_rank(monkeypatch, size - 1, size)
    model, fresh = start(make, toy, shards), start(make, new, shards)
    layer, want = model[0], held(fresh[0])
    before = {name: (t, t.data_ptr(), t.clone()) for name, t in held(layer).items()}
    assert any(not torch.equal(copy, want[name]) for name, (*_, copy) in before.items())
    for i in range(3):
        again = new if i < 2 else toy
        initialize_layerwise_reload(model)
        feed(layer, again, shards, seed=seed + i, process=False)
        assert not layer.get_parameter("weight_packed").is_meta  # processed with its last tensor, not at the end of all
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
        got = held(layer)
        assert got.keys() == before.keys() == want.keys()
        for name, (tensor, address, old) in before.items():
            assert got[name] is tensor and tensor.data_ptr() == address
            assert torch.equal(tensor, want[name] if again is new else old), name


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_that_is_not_reloaded_is_named(case):
    make, shapes, bias, shards = CASES[case]
    toy = Toy(shapes, bias=bias)
    for suffix in toy.tensors[next(iter(shapes))]:
        model = start(make, toy, shards)
        initialize_layerwise_reload(model)
        feed(model[0], toy, shards, skip=((last := list(shapes)[-1], suffix),), process=False)
        with pytest.raises(ValueError, match=rf"1 tensors.*did not arrive:\n  {last}.{suffix}"):
            finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))


def test_another_map_is_refused_before_anything_is_overwritten():
    """With the counts of the config it gets past the first checks; on one rank of several its size differs."""
    toy = Toy({"a.down_proj": (128, 768)})
    model = start(down, toy, {"a.down_proj": None})
    layer = model[0]
    new = {name: t.clone() for name, t in held(layer).items()}
    kept, new["weight_packed"] = new["weight_packed"], new["weight_packed"][1:]
    with pytest.raises(ValueError, match=r"another precision map.*weight_packed: \[768, 128\], reloaded \[767, 128\]"):
        layer.quant_method._into(layer.tilequant_held, new)
    counts = Toy({"a.down_proj": (128, 768)}, make=lambda n, k, kind, seed: make_case(n, k, "all8"))
    initialize_layerwise_reload(model)
    with pytest.raises(ValueError, match="a.down_proj.weight_(tile_bits|extension)"):
        feed(layer, counts, {"a.down_proj": None}, process=False)
    assert torch.equal(layer.tilequant_held["weight_packed"], kept)


def test_a_folder_whose_config_differs_is_refused(tmp_path):
    """vLLM never reads it, so that its transforms or profiles would be taken for the running ones."""
    toy = Toy({"a.down_proj": (128, 768)})
    config = TileQuantConfig.from_config(toy.config)
    config.model_config, config.loaded_from = SimpleNamespace(model="first"), "first"
    config.check_reload()
    config.model_config.model = str(tmp_path)
    with pytest.raises(ValueError, match="there is no .*config.json; name a complete folder"):
        config.check_reload()
    other_config = toy.config | {"transforms": toy.config["transforms"][::-1], "ignore": ["lm_head", "other"]}
    for given, faults in ((toy.config, None), (other_config, "ignore, transforms"), ({}, "quant_method")):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": given}))
        config.loaded_from = "first"
        if faults is None:
            config.check_reload()
            assert config.loaded_from == str(tmp_path)
            continue
        with pytest.raises(ValueError, match=faults):
            config.check_reload()


def test_loaders_do_not_keep_a_layer_alive():
    make, shapes, bias, shards = CASES["qkv"]
    model = start(make, Toy(shapes, bias=bias), shards)
    layer = weakref.ref(model[0])
    del model
    gc.collect()
    assert layer() is None

"""What a traced model and a captured graph see of our layers."""

import json

import pytest
import torch
import vllm.model_executor.layers.linear as vllm_linear
from vllm.config import ModelConfig

from cases import make_case
from layers import Toy, build, feed, one_rank, prepare_for_kernels, vllm_settings  # noqa: F401 - a fixture
from toy import write_toy
from vllm_tilequant import linear, ops, register

pytestmark = pytest.mark.serve


def test_layers_with_different_maps_look_alike_to_a_traced_model(monkeypatch):
    """vLLM compiles layers once that differ in nothing but values, and keeps what it compiled beyond a checkpoint's life."""
    monkeypatch.setattr(linear, "prepare", prepare_for_kernels)
    seen = []

    def tile_linear(x, static, graded, kernel, outputs, rotation, bias, thresholds, *settings):
        tensors = [x, *static, *graded, thresholds]
        seen.append(([(t.shape, t.stride(), t.dtype) for t in tensors], kernel, outputs, rotation, settings))
        return x.new_empty(*x.shape[:-1], outputs)

    monkeypatch.setattr(ops, "tile_linear", tile_linear)
    sizes = set()
    for kind in ("all4", "mixed48", "all8"):
        toy = Toy({"fc": (576, 320)}, make=lambda n, k, _, seed, kind=kind: make_case(n, k, kind, seed=seed))
        layer = build(vllm_linear.ReplicatedLinear, toy, 320, 576, prefix="fc")
        feed(layer, toy, {"fc": None})
        layer(torch.zeros(3, 320))
        sizes.add(layer.weight_packed.numel())
    assert len(sizes) == 3 and all(s == seen[0] for s in seen)
    assert seen[0][1] and layer.codes_start.data_ptr() == layer.weight_packed.data_ptr()


def test_an_int8_copy_is_a_weight(monkeypatch):
    """What an engine that sleeps throws away, and what is handed to the product."""
    monkeypatch.setattr(linear, "prepare", prepare_for_kernels)
    given = []
    monkeypatch.setattr(ops, "tile_linear", lambda x, *rest: given.append(rest[-1]) or x.new_empty(*x.shape[:-1], 128))
    toy = Toy({"fc": (128, 64)})
    for wanted in (False, True):
        with vllm_settings(int8_copy=wanted):
            layer = build(vllm_linear.ReplicatedLinear, toy, 64, 128, prefix="fc")
            feed(layer, toy, {"fc": None})
        layer(torch.zeros(3, 64))
        assert given[-1] is layer.int8_copy and ("int8_copy" in dict(layer.named_parameters())) == wanted
        assert layer.int8_copy.shape == (128, 64) if wanted else layer.int8_copy is None


def test_a_changed_config_is_another_graph(tmp_path):
    """What a trace does depend on, such as rotated inputs and smoothings, is part of vLLM's key for compiled graphs."""
    register()
    folder = write_toy(tmp_path / "toy")
    config = json.loads((folder / "config.json").read_text())

    def key():
        return ModelConfig(model=str(folder), quantization="tilequant", dtype="bfloat16").compute_hash()

    before = key()
    assert key() == before
    next(iter(config["quantization_config"]["modules"].values()))["smoothing"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert key() != before

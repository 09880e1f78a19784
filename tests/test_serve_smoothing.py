"""The smoothing of a shared input on its way through vLLM's loaders: fused members, ranks, dummy weights."""

import pytest
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from layers import Toy, build, feed, on_rank, one_rank, vllm_settings  # noqa: F401 - one_rank is a fixture
from vllm_tilequant import schema as s

pytestmark = pytest.mark.serve

SHAPES = {"a.gate_proj": (128, 256), "a.up_proj": (64, 256), "a.down_proj": (128, 256)}
SHARDS = {"a.gate_proj": 0, "a.up_proj": 1}


def smoothed(names=tuple(SHAPES)):
    toy = Toy(SHAPES)
    codes = torch.arange(256, dtype=torch.uint8)
    for name, module in toy.config["modules"].items():
        module["input_group"] = name.replace("up", "gate")
        if name in names:
            module["smoothing"] = True
            toy.tensors[name][s.SMOOTHING] = codes.clone()
    return toy, codes


def gate_up(toy):
    return build(MergedColumnParallelLinear, toy, 256, [128, 64], prefix="a.gate_up_proj")


def test_fused_members_bring_one_smoothing():
    toy, codes = smoothed()
    layer = gate_up(toy)
    feed(layer, toy, SHARDS, process=False)
    assert torch.equal(layer.tilequant_loading.finish().smoothing, codes)
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, s.SMOOTHING)


def test_members_that_differ_are_named():
    toy, _ = smoothed()
    toy.tensors["a.up_proj"][s.SMOOTHING][7] += 1
    with pytest.raises(ValueError, match=r"a\.\w+\.smoothing and a\.\w+\.smoothing differ"):
        feed(gate_up(toy), toy, SHARDS)


def test_a_missing_smoothing_is_named():
    toy, _ = smoothed()
    with pytest.raises(ValueError, match=r"a\.up_proj\.smoothing"):
        feed(gate_up(toy), toy, SHARDS, skip=[("a.up_proj", s.SMOOTHING)])


def test_half_smoothed_layers_are_refused():
    toy, _ = smoothed(["a.gate_proj"])
    toy.config["modules"]["a.up_proj"]["input_group"] = "another"  # else the config itself is refused
    with pytest.raises(ValueError, match="only some have a smoothing"):
        gate_up(toy)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_the_smoothing_of_its_inputs(rank, monkeypatch):
    on_rank(monkeypatch, rank, 2)
    toy, codes = smoothed()
    layer = build(RowParallelLinear, toy, 256, 128, prefix="a.down_proj")
    feed(layer, toy, {"a.down_proj": None}, process=False)
    want = codes[128 * rank : 128 * rank + 128]
    assert torch.equal(layer.tilequant_loading.finish().smoothing, want)


def test_dummy_weights_take_ones():
    with vllm_settings(load_format="dummy"):
        toy, _ = smoothed()
        layer = gate_up(toy)
        layer.tilequant_loading.fill_dummy()
        assert torch.equal(layer.tilequant_loading.finish().smoothing, torch.full((256,), s.SMOOTHING_ONE))

"""Calibration of a model whose layers lie on several devices, as accelerate spreads them: each module's own device decides."""

import pytest
import torch

pytest.importorskip("transformers", reason="calibrates a model")
pytest.importorskip("accelerate", reason="spreads a model")

import accelerate

from tiny import llama, records
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.report import measured_bits
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.kernels import layout, portable

CHOICES = {
    "joint, static propagation": dict(scores="joint", profiles={"2.5": 2.5, "3.0": 3.0}),
    "rotated inputs, graded propagation": dict(
        scores="joint", input_rotation="auto", propagation="graded", profiles={"3.0": 3.0}
    ),
    "a searched distribution": dict(codes="rtn", thresholds="search", search_candidates=3, profiles={"3.0": 3.0}),
    "folded": dict(codes="rtn", input_diagonal="folded", scores="decode"),
}


def padded():
    """The first record ends in padding, so that masks have to follow the rows to their device."""
    batches = records(n=3)
    mask = batches[0]["attention_mask"].clone()
    mask[:, -7:] = 0
    return [batches[0] | {"attention_mask": mask}, *batches[1:]]


def calibrated(places, settings):
    """Result of a run and loaded bits of every profile. places: devices of the first layer, and of the second with the rest."""
    model, linears = llama(torch.float32)
    first, second = places
    if first == second:
        model.to(first)
    spread = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first}
    spread |= {"model.layers.1": second, "model.norm": second, "lm_head": second}
    accelerate.dispatch_model(model, spread, force_hooks=True)
    result = Calibration(model, linears, padded(), settings).run()
    measured = measured_bits(model, linears, result, padded()[:1])
    return result, [m["average"] for m in measured]


@pytest.mark.parametrize("choice", CHOICES)
def test_hooks_that_move_inputs_change_nothing(choice):
    settings = Settings(**CHOICES[choice])
    model, linears = llama(torch.float32)
    plain = Calibration(model, linears, padded(), settings).run()
    hooked, _ = calibrated(("cpu", "cpu"), settings)
    for name, w in plain.weights.items():
        for part in ("plane0", "plane1", "extension", "tile_bits", "tile_scale"):
            assert torch.equal(getattr(w, part), getattr(hooked.weights[name], part)), (name, part)
    for group, t in plain.thresholds.items():
        assert torch.equal(t, hooked.thresholds[group]), group


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("choice", CHOICES)
def test_two_gpus_give_what_one_gives(choice):
    settings = Settings(**CHOICES[choice])
    one, bits_of_one = calibrated(("cuda:0", "cuda:0"), settings)
    two, bits_of_two = calibrated(("cuda:0", "cuda:1"), settings)
    transforms = layout.transform_stack(one.transforms)
    same = sum(int((w.tile_bits == two.weights[n].tile_bits).sum()) for n, w in one.weights.items())
    assert same >= 0.98 * sum(w.tile_bits.numel() for w in one.weights.values())
    for name, w in one.weights.items():
        a, b = (portable.dequantize(r.weights[name], transforms, torch.float32) for r in (one, two))
        kept = layout.expand_tiles(w.tile_bits == two.weights[name].tile_bits)
        # Codes at an edge may round the other way where sums differ in their last bit, and carry on from there.
        assert float(((a - b) * kept).norm() / a.norm()) < 0.02, name
        assert w.plane0.device.type == two.weights[name].plane0.device.type == "cpu"
    assert bits_of_two == pytest.approx(bits_of_one, rel=0.01)

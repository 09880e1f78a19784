"""What each choice of the settings changes, in whole calibrations of a tiny Llama (others: the tests of their own steps)."""

import pytest
import torch
from torch import nn

from tiny import llama, records
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.report import measured_bits
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.kernels import layout, portable

pytestmark = pytest.mark.calibrate


def run(**choices):
    """A tiny Llama whose layers differ in size, calibrated: model, linears, result."""
    model, linears = llama(torch.float32)
    with torch.no_grad():
        for name, m in model.named_modules():
            if isinstance(m, nn.Linear) and "layers.1" in name:
                m.weight *= 1.5
    return model, linears, Calibration(model, linears, records(n=3), Settings(**choices)).run()


def differ(a, b):
    """Of two results: whether codes, maps and thresholds are not the same."""
    pairs = [(a.weights[n], b.weights[n]) for n in a.weights]
    return (
        any(not torch.equal(x.plane0, y.plane0) for x, y in pairs),
        any(not torch.equal(x.tile_bits, y.tile_bits) for x, y in pairs),
        any(not torch.equal(t, b.thresholds[g]) for g, t in a.thresholds.items()),
    )


@pytest.mark.parametrize("unit", ["row", "column", "module"])
def test_whole_units_get_one_width_but_for_the_one_in_which_the_budget_ends(unit):
    _, _, result = run(map_unit=unit, codes="rtn", scores="activation", w4_fraction=0.55)
    axis = {"row": 1, "column": 0, "module": None}[unit]
    broken = 0
    for w in result.weights.values():
        units = [w.tile_bits.flatten()] if axis is None else list(w.tile_bits.unbind(1 - axis))
        broken += sum(len(u.unique()) > 1 for u in units)
    assert broken <= 1
    narrow = sum(int((w.tile_bits == 4).sum()) for w in result.weights.values())
    assert narrow == round(0.55 * sum(w.tile_bits.numel() for w in result.weights.values()))


def test_optimal_per_layer_gives_every_layer_the_wanted_bits():
    found = {}
    for kind in ("optimal", "optimal_per_layer"):
        model, linears, result = run(thresholds=kind, codes="rtn", scores="activation", w4_fraction=0.0, profiles={"3.0": 3.0})
        (found[kind],) = measured_bits(model, linears, result, records(n=3))
    assert all(abs(bits - 3.0) < 0.05 for bits in found["optimal_per_layer"]["layers"].values())
    assert max(abs(bits - 3.0) for bits in found["optimal"]["layers"].values()) > 0.2
    assert all(abs(f["average"] - 3.0) < 0.05 for f in found.values())


@pytest.mark.parametrize(
    ("choices", "others", "changed"),
    [
        ({"propagation": "graded", "propagation_bits": 2.5}, {"propagation": "graded", "propagation_bits": 4.0}, "codes"),
        ({"propagation": "static"}, {"propagation": "off"}, "codes"),
        ({"propagation": "off"}, {"propagation_strength": 0.0}, None),
        ({"propagation_strength": 0.25}, {"propagation_strength": 0.75}, "codes"),
        ({"damping": 0.01}, {"damping": 0.3}, "codes"),
        ({"codes": "gptq"}, {"codes": "rtn"}, "codes"),
        ({"scales": "activation", "codes": "rtn"}, {"scales": "mse", "codes": "rtn"}, "codes"),
        ({"scales": "absmax", "codes": "rtn"}, {"scales": "mse", "codes": "rtn"}, "codes"),
        ({"output_seed": 1, "codes": "rtn"}, {"output_seed": 2, "codes": "rtn"}, "codes"),
        (
            {"score_steps": 1, "scores": "decode", "codes": "rtn"},
            {"score_steps": 16, "scores": "decode", "codes": "rtn"},
            "map",
        ),
        ({"score_samples": 1, "codes": "rtn"}, {"score_samples": 3, "codes": "rtn"}, "map"),
        ({"seed": 0, "scores": "random", "codes": "rtn"}, {"seed": 1, "scores": "random", "codes": "rtn"}, "map"),
        ({"level_errors": "source", "codes": "rtn"}, {"level_errors": "stored", "codes": "rtn"}, "thresholds"),
    ],
)
def test_a_choice_changes_what_it_says(choices, others, changed):
    a, b = run(**choices)[2], run(**others)[2]
    codes, maps, thresholds = differ(a, b)
    if changed is None:
        assert not (codes or maps or thresholds)
        return
    assert {"codes": codes, "map": maps, "thresholds": thresholds}[changed]
    if changed == "thresholds":
        assert not codes and not maps


def test_smoothing_can_be_left_out_and_rotated_inputs_have_none():
    assert set(run(codes="rtn", scores="activation")[2].smoothing) == {g.name for g in run(codes="rtn")[2].groups}
    assert not run(codes="rtn", scores="activation", prefill_smoothing="none")[2].smoothing
    assert not run(codes="rtn", scores="activation", input_rotation="on")[2].smoothing


@pytest.mark.parametrize("max_bits", [4, 6, 8])
def test_wide_tiles_have_max_bits(max_bits):
    _, linears, result = run(max_bits=max_bits, codes="rtn", scores="activation")
    assert {int(b) for w in result.weights.values() for b in w.tile_bits.unique()} == {4, max_bits}
    transforms = layout.transform_stack(result.transforms)
    for name, w in result.weights.items():
        dense = portable.dequantize(w, transforms, torch.float32)
        assert float((dense - linears[name].weight).norm() / linears[name].weight.norm()) < 0.2

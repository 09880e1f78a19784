"""The smoothing of long prompts: what the search promises, and its way through a checkpoint."""

import json

import pytest
import torch

from cases import TRANSFORMS, make_case, make_rows
from tiny import llama, records
from vllm_tilequant import schema as s
from vllm_tilequant.calibrate import smoothing
from vllm_tilequant.calibrate.allocation import narrow_tiles
from vllm_tilequant.calibrate.checkpoint import build_schema
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.kernels import layout, reference

pytestmark = pytest.mark.calibrate


def outliers(m, k):
    """Rows whose scale a few channels set."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0))
    x[:, :4] *= 60
    return x


def test_the_search_lowers_the_error_it_reports():
    cases = [make_case(128, 320, seed=i) for i in (0, 1)]
    members = [(c.weight, c.matrices) for c in cases]
    x = outliers(96, 320)
    codes, errors = smoothing.search(x, members, x.square().mean(0))
    assert min(errors, key=errors.get) != "none" and min(errors.values()) < errors["none"] / 2
    values = layout.smoothing_values(codes)

    def error(by):
        exact = [reference.linear_ref(x, w, u, int8=False) for w, u in members]
        got = [reference.prefill_int8_ref(x, w, u, smoothing=by) for w, u in members]
        return sum((a - b).square().sum() for a, b in zip(exact, got, strict=True)) / sum(a.square().sum() for a in exact)

    assert float(error(values)) == pytest.approx(min(errors.values()), rel=1e-3)
    assert float(error(None)) == pytest.approx(errors["none"], rel=1e-3)


def test_silent_channels_and_silent_weights_are_left_alone():
    codes = smoothing.candidate(torch.tensor([0.0, 2.0, 1.0, 0.5]), torch.tensor([1.0, 1.0, 0.0, 1.0]), 0.5)
    assert codes.tolist() == [128, 132, 128, 124]  # roots of 2 and 1/2 about their mean, silent ones as they are
    assert smoothing.candidate(torch.zeros(4), torch.ones(4), 0.5).tolist() == [128] * 4


def test_stored_steps_are_eighths_of_an_octave():
    codes = torch.arange(256, dtype=torch.uint8)
    values = layout.smoothing_values(codes)
    assert values[128] == 1 and values[136] == 2 and values[120] == 0.5
    assert torch.equal(layout.smoothing_codes(values), codes)
    assert layout.smoothing_codes(torch.tensor([1e-30, 1e30])).tolist() == [0, 255]


@pytest.mark.parametrize(("rotation", "search"), [("off", "search"), ("on", "search"), ("off", "none")])
def test_a_calibration_keeps_it_where_inputs_are_not_rotated(rotation, search):
    model, linears = llama(torch.float32)
    with torch.no_grad():  # norms as real models have them: a few channels far above the rest
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p[:3] = 40.0
    settings = Settings(input_rotation=rotation, prefill_smoothing=search, profiles={"3.0": 3.0}, score_samples=1)
    result = Calibration(model, linears, records(n=3, length=48), settings).run()
    schema = build_schema(result, linears, ["3.0"], "3.0", [])
    again = s.QuantizationSchema.parse(json.loads(json.dumps(schema.dump())))
    if (rotation, search) != ("off", "search"):
        assert not result.smoothing and not any(m.smoothing for m in again.modules.values())
        return
    q = "model.layers.0.self_attn.q_proj"
    assert q in result.smoothing and result.smoothing[q].dtype == torch.uint8
    assert all(again.modules[n].smoothing for n in again.groups[q])
    assert again.tensor_specs(q)[s.SMOOTHING] == s.TensorSpec(("U8",), (128,))
    errors = result.report["smoothing"][q]
    assert (
        set(errors) == {"none", *(f"{size} {alpha}" for size, alpha in smoothing.CANDIDATES)}
        and min(errors.values()) < errors["none"]
    )


def test_the_budget_pays_for_it():
    shapes = {"a": (8, 8), "b": (2, 8)}
    plain, smooth = (narrow_tiles(shapes, 0.6, 5.6, 8, 1, smooths) for smooths in (False, True))
    bits = {False: plain, True: smooth}
    assert bits[True] >= bits[False]
    stored = 8 - 4 * smooth / 80 + 40 / 4096 + (10 * 8 + 2 * 128 + 2 * 512 * 8) / (80 * 4096)
    assert stored <= 5.6 < stored + 4 / 80


def test_what_a_schema_refuses():
    module = dict(out_features=64, in_features=64, tile_counts={8: 1}, input_group="g", smoothing=True)
    with pytest.raises(ValueError, match="smoothing beside input_transform"):
        s.Module(**module, input_transform=0)
    data = dict(
        quant_method="tilequant", format_version=1, tile=64, max_bits=8, transforms=[{"kind": "identity"}],
        profiles={"names": ["3.0"], "default": "3.0"},
        modules={"a": module | {"tile_counts": {"8": 1}}, "b": module | {"tile_counts": {"8": 1}, "smoothing": False}},
    )  # fmt: skip
    with pytest.raises(s.FormatError, match=r"differ in smoothing: input groups \['g'\]"):
        s.QuantizationSchema.parse(data)


def test_rows_are_divided_and_weights_multiplied():
    """A smoothing of powers of two changes nothing but the rounding."""
    case = make_case(64, 128, "all8")
    x = make_rows(5, 128)
    by = layout.smoothing_values(torch.where(torch.arange(128) % 2 == 0, 136, 120).to(torch.uint8))
    exact = reference.linear_ref(x, case.weight, TRANSFORMS[case.weight.output_transform.long()], int8=False)
    got = reference.prefill_int8_ref(x, case.weight, case.matrices, smoothing=by)
    assert float((got - exact).norm() / exact.norm()) < 0.05

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


def measured(x, members, output_weights, by):
    """What `search` estimates, by the references and with every product: error over power of the rows that it judges on."""
    error = power = 0.0
    exact = [reference.linear_ref(x, w, u, int8=False) for w, u in members]
    mean = torch.cat(output_weights).mean()
    weighed = [layout.rotate_outputs(y.T.contiguous(), u).T for y, (_, u) in zip(exact, members, strict=True)]
    rows = sum(y.square() @ (f / mean).double() for y, f in zip(weighed, output_weights, strict=True)).rsqrt()[1::2]
    for (w, u), y, wanted, f in zip(members, exact, weighed, output_weights, strict=True):
        got = reference.prefill_int8_ref(x, w, u, smoothing=by) - y
        lost = layout.rotate_outputs(got.T.contiguous(), u).T
        error += float(rows @ lost[1::2].square() @ f.double())
        power += float(rows @ wanted[1::2].square() @ f.double())
    return error / power


def searched(m=256, k=320, spread=1.0):
    cases = [make_case(128, k, seed=i) for i in (0, 1)]
    members = [(c.weight, c.matrices.double()) for c in cases]
    g = torch.Generator().manual_seed(4)
    output_weights = [torch.exp(spread * torch.randn(128, generator=g)) for _ in cases]
    x = outliers(m, k)
    x[5] *= 1000  # a row like those that some models make of their first token
    return x, members, output_weights


def test_the_search_lowers_the_error_it_reports():
    x, members, output_weights = searched()
    codes, errors = smoothing.search(x, members, x.square().mean(0), output_weights)
    assert min(errors, key=errors.get) != "none" and min(errors.values()) < errors["none"] / 2
    # independent roundings are a model: 256 rows and outputs leave a few per cent
    assert measured(x, members, output_weights, layout.smoothing_values(codes)) == pytest.approx(min(errors.values()), rel=0.1)
    assert measured(x, members, output_weights, None) == pytest.approx(errors["none"], rel=0.1)


def test_refining_lowers_it_further():
    x, members, output_weights = searched(m=1024)
    codes, errors = smoothing.search(x, members, x.square().mean(0), output_weights)
    refined = errors.pop(smoothing.REFINED)
    assert refined < 0.99 * min(errors.values())
    again, _ = smoothing.search(x, members, x.square().mean(0), output_weights)
    assert torch.equal(codes, again)


def test_one_row_and_nothing_at_all():
    x, members, output_weights = searched(m=8)
    codes, errors = smoothing.search(x[:1], members, x[:1].square().mean(0), output_weights)
    assert codes.shape == (320,) and all(0 < e < 1 for e in errors.values())
    zeros = torch.zeros(4, 320)
    codes, errors = smoothing.search(zeros, members, zeros[0], [torch.zeros(128)] * 2)
    assert codes.tolist() == [128] * 320 and set(errors.values()) == {0.0}


def test_a_huge_row_does_not_decide_alone():
    x, members, output_weights = searched()
    with_it, _ = smoothing.search(x, members, x.square().mean(0), output_weights)
    x[5] /= 1000
    without, _ = smoothing.search(x, members, x.square().mean(0), output_weights)
    assert int((with_it.int() - without.int()).abs().max()) <= 16  # two octaves


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
    assert set(errors) == {"none", smoothing.REFINED, *(f"{size} {alpha}" for size, alpha in smoothing.CANDIDATES)}
    assert min(errors.values()) < errors["none"]


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

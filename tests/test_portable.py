"""The portable products against the float64 reference, and the promises of the graded path."""

import pytest
import torch

from cases import MAPS, ROWS, SHAPES, THRESHOLDS, TRANSFORMS, make_case, make_rows
from tolerances import FLOAT32_RMS, OUTPUT_RMS, relative_rms
from vllm_tilequant.kernels import dispatch, layout, portable, reference
from vllm_tilequant.kernels.dispatch import tile_linear
from vllm_tilequant.schema import LEVELS, NEVER

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def setup(n, k, kind, dtype=torch.float32):
    case = make_case(n, k, kind)
    return case, dispatch.prepare(case.weight, TRANSFORMS, dtype, "group64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("n,k", SHAPES)
def test_graded_product_equals_the_reference(n, k, kind, dtype):
    case, w = setup(n, k, kind, DTYPES[dtype])
    for name, values in THRESHOLDS.items():
        thresholds = torch.tensor(values)
        for m in (1, 3):
            x = make_rows(m, k, DTYPES[dtype], seed=m)
            for activation in ("group64", "none"):
                got = portable.graded_linear(x, w.graded, None, thresholds, activation=activation)
                int8 = activation == "group64"
                want = reference.decode_bitplane_ref(x, case.weight, case.matrices, thresholds, int8=int8)
                if not want.any():
                    assert not got.any(), name
                else:
                    assert relative_rms(got, want) <= OUTPUT_RMS[dtype], (name, m, activation)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("n,k", SHAPES)
def test_integer_sums_are_exact(n, k, kind):
    """With unit scales, no rotation and one input tile at a time the output *is* half the integer sum."""
    case = make_case(n, k, kind)
    x, thresholds = make_rows(3, k), torch.tensor(THRESHOLDS["graded"])
    sums = reference.tile_sums_ref(x, case.weight, thresholds)
    eye = torch.eye(64, dtype=torch.float64)[None]
    for t in range(k // 64):
        part = layout.slice_weight(case.weight, (0, n), (64 * t, 64 * t + 64))
        part = layout.PackedWeight(
            part.plane0, part.plane1, part.extension, part.tile_bits,
            torch.ones_like(part.tile_scale), torch.zeros_like(part.output_transform),
        )  # fmt: skip
        rows = x[:, 64 * t : 64 * t + 64]
        _, scale = reference.activation_int8_ref(rows)
        got = portable.graded_linear(rows, portable.prepare(part, eye), None, thresholds, activation="group64")
        assert torch.equal(got, sums[:, t].float() * (scale / 2))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", MAPS)
def test_static_product_equals_the_reference(kind, int8):
    case, w = setup(192, 320, kind)
    x, bias = make_rows(17, 320), torch.randn(192)
    got = portable.static_linear(x, w.static, bias, activation="group64" if int8 else "none")
    want = reference.linear_ref(x, case.weight, case.matrices, bias, int8=int8)
    assert relative_rms(got, want) <= FLOAT32_RMS


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("level", LEVELS[1:])
def test_level_weights_equal_the_reference(kind, level):
    case = make_case(192, 320, kind)
    codes = layout.aligned_codes(case.weight)
    got = portable.level_weight(codes, case.weight.tile_bits, case.weight.tile_scale, level)
    assert relative_rms(got, reference.level_weight_ref(case.weight, level)) <= 2.0**-23  # one rounding, of the scale


@pytest.mark.parametrize("activation", ["group64", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_batch(dtype, activation):
    _, w = setup(576, 1536, "mixed48", DTYPES[dtype])
    thresholds, bias = torch.tensor(THRESHOLDS["graded"]), torch.randn(576, dtype=DTYPES[dtype])
    rows = torch.cat([make_rows(4, 1536, DTYPES[dtype], seed=s) for s in (1, 2)])
    options = dict(graded_rows=8, activation=activation)
    alone = torch.cat([tile_linear(rows[i : i + 1], w, bias, thresholds, **options) for i in range(8)])
    for m in ROWS:
        if m <= 8:
            assert torch.equal(tile_linear(rows[:m], w, bias, thresholds, **options), alone[:m])
            assert torch.equal(tile_linear(rows[8 - m :], w, bias, thresholds, **options), alone[8 - m :])


def test_dispatch_is_by_rows_only():
    _, w = setup(64, 128, "mixed48")
    never = torch.full((4,), NEVER)  # graded reads nothing under these: which path ran is plain to see
    for m in ROWS:
        x = make_rows(m, 128)
        for limit in (0, 3, 8):
            graded = not tile_linear(x, w, None, never, graded_rows=limit, activation="group64").any()
            assert graded == (m <= limit)
    x = make_rows(6, 128).view(2, 3, 128)
    assert tile_linear(x, w, None, never, graded_rows=0, activation="none").shape == (2, 3, 64)


def test_levels_rise_strictly_above_a_threshold():
    x = torch.tensor([[0.5, -0.5, 0.50001, 0.0, 3.0, float("inf"), -2.0]])
    levels = reference.levels_ref(x, torch.tensor([0.0, 0.5, 0.5, 2.0]))
    assert levels.tolist() == [[2, 2, 6, 0, 8, 8, 6]]


def test_activation_codes():
    x = torch.zeros(2, 128)
    x[0, :3] = torch.tensor([127.0, 0.5, -63.5])
    q, scale = reference.activation_int8_ref(x)
    assert scale.tolist() == [[1.0, 1.0], [1.0, 1.0]] and q[0, :3].tolist() == [127, 0, -64] and not q[1].any()


def test_not_a_number_is_not_hidden():
    _, w = setup(64, 128, "mixed48")
    x = make_rows(2, 128)
    x[0, 70] = float("nan")
    y = tile_linear(x, w, None, torch.tensor(THRESHOLDS["graded"]), graded_rows=8, activation="group64")
    assert y[0].isnan().all() and not y[1].isnan().any()


def test_dequantize_at_a_level_is_the_product_with_the_identity():
    case = make_case(128, 192, "mixed2468")
    for level in LEVELS[1:]:
        want = layout.restore_outputs(reference.level_weight_ref(case.weight, level).T.contiguous(), case.matrices).T
        got = portable.dequantize(case.weight, TRANSFORMS, torch.float32, level)
        assert relative_rms(got, want) <= FLOAT32_RMS

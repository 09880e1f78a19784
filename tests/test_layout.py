from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import MAPS, SHAPES, TRANSFORMS, make_case, make_rows
from vllm_tilequant.kernels import decode_weight, dispatch, layout, portable
from vllm_tilequant.schema import LEVELS, Transform, rotation_v1


def same(a, b):
    return all(torch.equal(t, getattr(b, f)) for f, t in vars(a).items() if t is not None)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("n,k", SHAPES)
def test_unpack_is_the_inverse_of_pack(n, k, kind):
    case = make_case(n, k, kind)
    assert torch.equal(layout.unpack(case.weight), case.codes)
    rows = int(layout.extension_rows_per_tile(case.weight.tile_bits).sum())
    assert tuple(case.weight.extension.shape) == (rows, 256)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", [decode_weight, portable], ids=["decode", "portable"])
@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("n,k", [*SHAPES, (512, 64), (1088, 128)])  # at the decode form's blocks of 512 outputs, and beyond
def test_served_forms_give_the_packed_weight_back(n, k, kind, form, device):
    one = make_case(n, k, kind, seed=1).weight
    joined = layout.concat_outputs([make_case(64, k, "mixed2468", seed=2).weight, one, make_case(128, k, "all8").weight])
    for stored in (one, joined):
        stored = layout.to_device(stored, device)
        for transforms in (TRANSFORMS, TRANSFORMS.flip(0)):
            assert same(dispatch.packed(form.prepare(stored, transforms), transforms), stored)


def test_of_equal_transforms_the_first_is_named():
    stored = make_case(192, 64, "mixed48").weight
    again = torch.cat((TRANSFORMS, TRANSFORMS[:1]))
    last = replace(stored, output_transform=torch.full((3,), 3, dtype=torch.uint8))
    for form in (decode_weight, portable):
        assert dispatch.packed(form.prepare(last, again), again).output_transform.tolist() == [0, 0, 0]
    unrotated = replace(stored, output_transform=torch.ones(3, dtype=torch.uint8))
    for form in (decode_weight, portable):  # no identity among them
        assert same(dispatch.packed(form.prepare(unrotated, TRANSFORMS[1:].flip(0)), TRANSFORMS[1:].flip(0)), unrotated)


def test_bit_positions_are_the_documented_ones():
    """One code at a time: output 16w + 4t + j of channel k sits in bits 8t + 2j of word [k, w] of its plane."""
    bits = torch.tensor([[8]], dtype=torch.uint8)
    for n, k in ((0, 0), (5, 3), (16, 0), (63, 63), (31, 17)):
        codes = torch.zeros(64, 64, dtype=torch.uint8)
        codes[n, k] = 0b11_10_01_11
        w = layout.pack(codes, bits, torch.ones(1, 1), torch.zeros(1, dtype=torch.uint8))
        word, t, j = n // 16, n % 16 // 4, n % 4
        shift = 8 * t + 2 * j
        for plane, want in (
            (w.plane0, 3),
            (w.plane1, 2),
            (w.extension[0].view(64, 4), 1),
            (w.extension[1].view(64, 4), 3),
        ):
            expected = torch.zeros(64, 4, dtype=torch.int64)
            expected[k, word] = want << shift
            assert torch.equal(plane.long() & 0xFFFFFFFF, expected)


def test_extension_order_is_input_tile_then_output_tile_then_plane():
    bits = torch.tensor([[8, 4, 6], [2, 8, 8]], dtype=torch.uint8)  # [2 output tiles, 3 input tiles]
    assert layout.extension_starts(bits).tolist() == [[0, 2, 4], [2, 2, 5]]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_slices_and_joins_equal_those_of_the_codes(data):
    n, k = 64 * data.draw(st.integers(1, 5)), 64 * data.draw(st.integers(1, 5))
    case = make_case(n, k, data.draw(st.sampled_from(MAPS)), seed=data.draw(st.integers(0, 1000)))
    n0, k0 = data.draw(st.integers(0, n // 64 - 1)), data.draw(st.integers(0, k // 64 - 1))
    n1, k1 = data.draw(st.integers(n0 + 1, n // 64)), data.draw(st.integers(k0 + 1, k // 64))
    part = layout.slice_weight(case.weight, (64 * n0, 64 * n1), (64 * k0, 64 * k1))
    assert torch.equal(layout.unpack(part), case.codes[64 * n0 : 64 * n1, 64 * k0 : 64 * k1])
    assert torch.equal(part.tile_scale, case.weight.tile_scale[n0:n1, k0:k1])
    cut = data.draw(st.integers(0, n // 64))
    pieces = [layout.slice_weight(case.weight, (a, b), (0, k)) for a, b in ((0, 64 * cut), (64 * cut, n)) if a < b]
    assert same(layout.concat_outputs(pieces), case.weight)


@pytest.mark.parametrize("bad", [(0, 65, 0, 64), (32, 64, 0, 64), (0, 64, 0, 128), (64, 64, 0, 64)])
def test_a_slice_off_the_tiles_or_outside_is_refused(bad):
    w = make_case(64, 64).weight
    with pytest.raises(ValueError, match="slice"):
        layout.slice_weight(w, bad[:2], bad[2:])


def test_pack_refuses_what_the_format_does_not_know():
    ones, idx = torch.ones(1, 1), torch.zeros(1, dtype=torch.uint8)
    codes, bits = torch.full((64, 64), 15, dtype=torch.uint8), torch.full((1, 1), 4, dtype=torch.uint8)
    layout.pack(codes, bits, ones, idx)
    with pytest.raises(ValueError, match="16 at .* does not fit its 4-bit tile"):
        layout.pack(codes + 1, bits, ones, idx)
    with pytest.raises(ValueError, match=r"holds \[5\]"):
        layout.pack(codes, bits + 1, ones, idx)
    with pytest.raises(TypeError, match="tile_scale is torch.float64"):
        layout.pack(codes, bits, ones.double(), idx)
    with pytest.raises(ValueError, match="multiples of 64"):
        layout.pack(codes[:, :32], bits, ones, idx)
    with pytest.raises(ValueError, match="output_transform"):
        layout.pack(codes, bits, ones, idx.expand(2))


def test_loaded_bits_are_counted_channel_by_channel():
    bits = torch.tensor([[4, 8], [8, 2], [4, 4]], dtype=torch.uint8)
    levels = torch.tensor(LEVELS, dtype=torch.uint8)[torch.randint(5, (3, 128), generator=torch.Generator().manual_seed(0))]
    want = [sum(min(int(levels[m, k]), int(bits[j, k // 64])) * 64 for j in range(3) for k in range(128)) for m in range(3)]
    assert layout.loaded_code_bits(levels, bits).tolist() == want
    assert layout.tile_code_bits(bits) == (4 + 8 + 8 + 4 + 4 + 4) * 4096


def test_rotations_are_orthogonal_and_pinned():
    """The stream of generator 1 is part of the format: these vectors must never change."""
    permutation, left, right = rotation_v1(1)
    assert permutation[:8] == [5, 42, 2, 36, 25, 48, 22, 10]
    assert left[:8] == [-1, -1, 1, -1, -1, 1, -1, 1] and right[:8] == [1, -1, 1, 1, 1, -1, -1, 1]
    for seed in (0, 1, 2**63):
        u = layout.transform_matrix(Transform(kind="randomized_hadamard", seed=seed))
        assert torch.allclose(u @ u.T, torch.eye(64, dtype=torch.float64), atol=1e-14)
        assert sorted(rotation_v1(seed)[0]) == list(range(64))
    u = torch.stack([layout.transform_matrix(Transform(kind="randomized_hadamard", seed=s)) for s in (3, 4)])
    w, x = torch.randn(128, 64, dtype=torch.float64), torch.randn(5, 64, dtype=torch.float64)
    assert torch.allclose(layout.restore_outputs(x @ layout.rotate_outputs(w, u).T, u), x @ w.T, atol=1e-12)


def test_rotated_inputs_are_the_matrix_product_in_one_order_of_float32_sums():
    transform = Transform(kind="randomized_hadamard", seed=5)
    table, matrix = layout.rotation_table(transform), layout.transform_matrix(transform)
    x = make_rows(3, 192, torch.bfloat16)
    got = layout.rotate_inputs(x, table)
    want = (x.double().view(3, -1, 64) @ matrix).view(3, 192)
    assert got.dtype == torch.float32 and torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    permutation, left, right = rotation_v1(5)
    for tile in range(3):  # the butterflies once more, number by number
        v = np.zeros(64, dtype=np.float32)
        for i, value in enumerate(x[1, 64 * tile : 64 * tile + 64].float().numpy()):
            v[permutation[i]] = value * np.float32(left[i])
        for step in (1, 2, 4, 8, 16, 32):
            for i in range(64):
                if not i & step:
                    v[i], v[i + step] = v[i] + v[i + step], v[i] - v[i + step]
        assert np.array_equal(got[1, 64 * tile : 64 * tile + 64].numpy(), v * np.array(right, dtype=np.float32) / 8)


def test_a_weight_for_rotated_inputs_gives_the_source_product_back():
    table = layout.rotation_table(Transform(kind="randomized_hadamard", seed=5))
    w, x = torch.randn(64, 128, dtype=torch.float64), torch.randn(4, 128)
    rotated = layout.rotate_weight_inputs(w, table)
    assert torch.allclose(layout.rotate_inputs(x, table).double() @ rotated.T, x.double() @ w.T, atol=1e-5)
    assert torch.allclose(layout.restore_weight_inputs(rotated, table), w, atol=1e-12)
    assert layout.rotation_table(Transform(kind="identity")) is None


def test_weights_whose_inputs_are_rotated_differently_are_not_joined():
    case = make_case(64, 64)
    turned = replace(case.weight, input_rotation=layout.rotation_table(Transform(kind="randomized_hadamard", seed=5)))
    assert layout.concat_outputs([turned, turned]).input_rotation is turned.input_rotation
    assert layout.slice_weight(turned, (0, 64), (0, 64)).input_rotation is turned.input_rotation
    with pytest.raises(ValueError, match="input_rotation"):
        layout.concat_outputs([turned, case.weight])

"""The kernel for batches: its weight on a CPU, and on a GPU its outputs, whatever its CTAs share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from prefill_checks import check, draw_smoothing, served

from cases import MAPS, SHAPES, make_case, make_rows
from vllm_tilequant.kernels import layout, prefill_batch, prefill_int8, reference
from vllm_tilequant.kernels.layout import align_codes
from vllm_tilequant.kernels.tuning import PrefillConfig


@pytest.mark.parametrize("kind", MAPS)
def test_one_scale_of_an_output_loses_half_a_step(kind):
    for shape in SHAPES:
        case = make_case(*shape, kind)
        for smoothing in (None, draw_smoothing(shape[1])):
            codes, scale = reference.requantize_block_ref(case.weight, smoothing)
            step = case.weight.tile_scale * torch.exp2(case.weight.tile_bits.float() - 8)
            exact = align_codes(case.codes, case.weight.tile_bits).double() - 128
            exact *= step.double().repeat_interleave(64, 0).repeat_interleave(64, 1)
            exact = exact if smoothing is None else exact * smoothing
            unit = scale.double()[:, None]
            # Four roundings to half precision move a code by less than 4 * 128 / 2048 beside its own; not all of them at once.
            assert bool(((codes.double() * unit - exact).abs() <= 0.69 * unit).all())
            largest = codes.abs().amax(1)
            # Seven bits of a factor cost an output less than 1/64 of its codes; one of 64 outputs has a factor of 1.
            assert bool((largest >= 125).all() and (largest.view(-1, 64).amax(1) == 127).all())


def test_weights_of_zeros_stay_zeros_in_batches():
    """Their codes are 128 throughout, and no factor may be infinite."""
    case = make_case(128, 128, "mixed48")
    zeros = torch.where(case.weight.tile_bits == 4, 8, 128).repeat_interleave(64, 0).repeat_interleave(64, 1)
    packed = layout.pack(
        zeros.to(case.codes.dtype), case.weight.tile_bits, case.weight.tile_scale, case.weight.output_transform
    )
    codes, scale = reference.requantize_block_ref(packed, draw_smoothing(128))
    assert not codes.any() and bool((scale.isfinite() & (scale > 0)).all())


def test_factors_of_batches_lie_as_their_kernel_reads_them():
    case = make_case(1088, 192, "mixed2468")  # a block of outputs that is not full
    packed, w, p = served(case, "cpu", True)
    _, scale = reference.requantize_block_ref(packed, p.smoothing)
    unit = packed.tile_scale * torch.exp2(packed.tile_bits.float() - 8)
    unit = unit.repeat_interleave(64, 0).repeat_interleave(64, 1) * p.smoothing
    largest = ((layout.aligned_codes(packed).T.float() - 128).abs() * unit).amax(1)
    of_tile, of_input, of_output, unit = reference.block_ratios(largest, packed.tile_scale, packed.tile_bits, p.smoothing)
    assert torch.equal(p.unit, scale) and torch.equal(unit, scale)
    stretch = p.stretch.view(torch.int16).view(torch.float16).view(-1, 2)
    assert torch.equal(stretch[:, 0], of_output) and bool((of_output >= 1).all() and (of_output <= 56).all())
    assert torch.equal(stretch[:, 1].double(), -1152 * of_output.double())  # exact: what 128 of a code's 1152 is multiplied by
    low, high = p.ratio & 0xFFFF, p.ratio >> 16 & 0xFFFF
    assert torch.equal(low, high) and p.ratio.shape == w.factor.shape
    halves = low.to(torch.int16).view(torch.float16)  # [blocks, K/64, 8]
    for nt in range(17):
        assert torch.allclose(halves[nt // 8, :, nt % 8].float(), of_tile[nt].float(), rtol=2e-3)
    assert not halves[2, :, 1:].any()
    for kt in range(3):
        for place in range(64):
            lane, half, eight, odd = place // 16, place // 8 % 2, place // 2 % 4, place % 2
            assert p.of_input[kt, place] == of_input[64 * kt + 32 * half + 8 * eight + 2 * lane + odd]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of so many multiprocessors, all of whose clusters fit."""

    def of(most):
        monkeypatch.setattr(prefill_batch, "multiprocessors", lambda device: SimpleNamespace(count=most))
        monkeypatch.setattr(prefill_batch, "clusters_at_once", lambda device, dtype, tokens, width, parts: most // parts)
        forget()

    def forget():
        prefill_batch._shared.cache_clear()
        prefill_batch._many.cache_clear()

    yield of
    forget()


def test_where_ways_end():
    """Rows that the kernel for batches does not take are short no further than it is worth."""
    config = PrefillConfig(1, 16, 512)
    for dtype, k, rotated, wanted in (
        (torch.bfloat16, 64, False, {16: "short", 17: "batch", 512: "batch", 513: "long"}),
        (torch.float16, 16384, False, {129: "batch"}),
        (torch.float32, 64, False, {17: "short", 128: "short", 129: "long"}),
        (torch.bfloat16, 16448, False, {128: "short", 129: "long"}),
        (torch.bfloat16, 64, True, {128: "short", 129: "long"}),
    ):
        for rows, how in wanted.items():
            x = torch.empty(rows, k, dtype=dtype, device="meta")
            assert prefill_int8.way(x, config, "token_smooth", "cuda", rotated) == how, (dtype, k, rotated, rows)
            assert prefill_int8.way(x, config, "group64", "cuda", rotated) == "short"


@pytest.mark.parametrize("most", [1, 16, 132])
@pytest.mark.parametrize("n", [64, 4096, 28672, 262208])
@pytest.mark.parametrize("k", [64, 320, 4096])
def test_there_is_room_for_what_ctas_finish(gpu, most, n, k):
    """Also for a whole vocabulary on a slice of a GPU."""
    gpu(most)
    width, steps, ctas, parts, *_, groups = prefill_batch._cut_of(None, torch.float16, n // 64, k // 64, 128)
    k_steps, ranges = k // 64 * width // 4, -(-n // (64 * width))
    assert k // 64 * width % 4 == 0 and steps == ranges * k_steps and 1 <= ctas <= steps
    if parts:
        assert ctas == ranges * parts * groups <= most and parts * groups <= min(prefill_batch._MOST_PARTS, k_steps)
        return
    assert width == 4  # steps of two tiles are for clusters alone
    first = [cta * steps // ctas for cta in range(ctas + 1)]
    touched = max((b - 1) // k_steps - a // k_steps + 1 for a, b in zip(first, first[1:], strict=False))
    assert touched < prefill_batch._MOST_RANGES  # beside their number
    assert ctas <= most or ranges > (prefill_batch._MOST_RANGES - 3) * most


#: CTAs of a cluster -> how many run on an H200 whose CTAs take a multiprocessor each.
AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


@pytest.mark.parametrize(
    ("n", "k", "rows", "wanted"),
    [
        (28672, 4096, 128, (4, 1, 1)), (4096, 4096, 64, (2, 3, 1)), (4096, 4096, 128, (2, 3, 1)), (6144, 4096, 128, (2, 2, 1)),
        (4096, 14336, 16, (4, 2, 4)), (4096, 14336, 128, (2, 2, 2)), (35840, 5120, 128, (4, 0, 1)),
    ],
)  # fmt: skip
def test_clusters_are_taken_that_run_at_once(gpu, monkeypatch, n, k, rows, wanted):
    """On an H200 30 clusters of 4 CTAs fit beside each other, not 33, but 66 of 2."""
    gpu(132)
    monkeypatch.setattr(prefill_batch, "clusters_at_once", lambda device, dtype, tokens, width, parts: AT_ONCE[parts])
    assert prefill_batch._shared(None, torch.bfloat16, n // 64, k // 64, 132, rows) == wanted


@pytest.mark.parametrize(
    ("n", "k", "wanted"),
    [
        (28672, 4096, {256: (1, 0), 512: (2, 198)}),
        (4096, 14336, {256: (3, 0), 512: (2, 0), 1024: (1, 0)}),
        (6144, 4096, {256: (2, 0), 512: (1, 0)}),
        (4096, 4096, {256: (3, 0), 512: (2, 0), 1024: (1, 0)}),
    ],
)
def test_blocks_of_rows_are_cut_as_was_fastest(gpu, monkeypatch, n, k, wanted):
    """CTAs of a cluster, and clusters whose CTAs share nothing."""
    gpu(132)
    monkeypatch.setattr(prefill_batch, "clusters_at_once", lambda device, dtype, tokens, width, parts: AT_ONCE[parts])
    for rows, of in wanted.items():
        cut = prefill_batch._cut_of(None, torch.bfloat16, n // 64, k // 64, rows)
        assert (cut.parts, cut.whole, cut.blocks) == (*of, rows // 256), rows


@pytest.mark.parametrize("most", [1, 16, 132])
@pytest.mark.parametrize("n", [64, 4096, 28672, 262208])
@pytest.mark.parametrize("k", [64, 320, 384, 4096, 16384])
@pytest.mark.parametrize("rows", [129, 256, 257, 768, 4000])
def test_every_range_of_every_block_of_rows_is_somebody_s(gpu, most, n, k, rows):
    gpu(most)
    width, steps, grid, parts, blocks, whole, _ = prefill_batch._cut_of(None, torch.float16, n // 64, k // 64, rows)
    if k // 64 % 2:
        assert not blocks and not whole  # a step has two input tiles: several launches of 128 rows
        return
    ranges = -(-n // (64 * width))
    assert width == 2 and blocks == -(-rows // 256) and steps == ranges * k // 128 and 1 <= parts <= min(8, k // 128)
    assert whole % blocks == 0 and grid % parts == 0 and whole * parts + (grid // parts - whole) == ranges * blocks
    # What the kernel makes of a cluster's number, of those that have the first block of rows.
    found = []
    for cluster in range(0, grid // parts, blocks):
        if cluster < whole:
            found += [cluster // blocks * parts + rank for rank in range(parts)]
        else:
            found.append(whole // blocks * parts + (cluster - whole) // blocks)
    assert found == list(range(ranges))


def test_rows_are_quantised_beside_a_cta_of_the_product():
    """The next launch waits where this one computes: 1 KiB of a multiprocessor's memory is taken by every CTA."""
    for tokens in prefill_batch.TOKENS:
        for width, stream in prefill_batch._KINDS:
            assert prefill_batch.batch_bytes(tokens, width, stream) + 1024 + 128 + 1024 <= 228 * 1024, (tokens, width, stream)
    assert prefill_batch.batch_bytes(prefill_batch._MANY, prefill_batch._MANY_WIDTH, False) + 1024 + 128 + 1024 <= 228 * 1024
    for m in (1, 16, 17, 64, 65, 128):
        for k in (64, 320, 4096, 14336, 16384):
            threads, pieces, ctas = prefill_batch._rows_cut(m, k)
            assert pieces * ctas * threads * 8 >= k and ctas <= 8
            if m > 64 or k <= 4096:
                assert ctas == 1 and (threads == 128 or pieces * threads * 4 < k)  # few multiprocessors have all of them
            else:
                assert threads == 128


def test_what_ctas_add_up_in_is_cleared_when_weights_are_loaded(monkeypatch):
    """A sleeping engine forgets what no layer owns; a captured graph knows the addresses."""
    monkeypatch.setattr(prefill_batch, "_sums", {})
    monkeypatch.setattr(prefill_batch, "_arrivals", {})
    monkeypatch.setattr(prefill_int8, "_workspaces", {})
    monkeypatch.setattr(prefill_int8.prefill_cuda, "unsupported_reason", lambda capability: None)
    device = torch.device("cpu")
    prefill_int8.reserve(device, 1088, 64)
    held = prefill_batch.batch_sums(device, 1088)
    assert held[0].numel() >= 1088 * 128 and not held[0].any() and not held[1].any()
    for t in held:
        t.fill_(1)
    prefill_int8.reserve(device, 576, 64)
    assert all(a is b and not a.any() for a, b in zip(held, prefill_batch.batch_sums(device, 576), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [1, 2, 5, 131, 10**4])
def test_every_cut_of_the_kernel_for_batches(ctas, monkeypatch):
    """CTAs with many ranges of outputs, and ranges of many CTAs; what they add up in is left as it was found."""
    monkeypatch.setattr(prefill_batch, "multiprocessors", lambda device: SimpleNamespace(count=ctas))
    monkeypatch.setattr(prefill_batch, "_shared", lambda *of: (4, 0, 1))
    for shape, kind in (((1088, 1536), "mixed2468"), ((192, 320), "mixed48"), ((320, 8320), "all8"), ((3200, 64), "all4")):
        for m in (1, 10, 20, 40, 100, 200):
            for dtype in (torch.bfloat16, torch.float16):
                config = PrefillConfig(1, 0, 256)
                check(make_case(*shape, kind), m, dtype, "cuda", path="cuda", config=config, smooth=True, bias=m != 20)
    assert not any(t.any() for held in (prefill_batch._sums, prefill_batch._arrivals) for t in held.values())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_clusters_that_share_ranges(width, parts, monkeypatch):
    monkeypatch.setattr(prefill_batch, "_shared", lambda *of: (width, parts, 1))
    for shape, kind in (((1088, 2048), "mixed2468"), ((192, 3328), "mixed48"), ((320, 8192), "all8")):
        for m in (1, 10, 20, 40, 100, 200):
            config = PrefillConfig(1, 0, 256)
            check(make_case(*shape, kind), m, torch.bfloat16, "cuda", path="cuda", config=config, smooth=True, bias=m != 20)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("parts", "groups"), [(1, 2), (2, 2), (2, 4), (1, 5)])
def test_clusters_that_share_a_range_with_others(width, parts, groups, monkeypatch):
    """Their sums meet in memory, which is left as it was found."""
    monkeypatch.setattr(prefill_batch, "_shared", lambda *of: (width, parts, groups))
    for shape, kind in (((1088, 2048), "mixed2468"), ((192, 3328), "mixed48"), ((320, 8192), "all8")):
        for m in (1, 10, 20, 40, 100):
            if (groups - 1) * prefill_batch.batch_tokens(m) > 128:
                continue
            config = PrefillConfig(1, 0, 256)
            check(make_case(*shape, kind), m, torch.bfloat16, "cuda", path="cuda", config=config, smooth=True, bias=m != 20)
    assert not any(t.any() for t in prefill_batch._sums.values())


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "turns"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (8, 0)])
def test_blocks_of_many_rows(parts, turns, monkeypatch):
    """Whatever of them and of the outputs CTAs share; none is full, or all are."""

    def cut(device, dtype, n_tiles, k_tiles, most, blocks):
        ranges = -(-n_tiles // 2)
        whole = turns * blocks if ranges >= parts else 0
        return prefill_batch.Cut(
            2, ranges * k_tiles // 2, parts * (whole + ranges * blocks - whole * parts), parts, blocks, whole
        )

    monkeypatch.setattr(prefill_batch, "_many", cut)
    for shape, kind in (((1088, 2048), "mixed2468"), ((192, 3328), "mixed48"), ((320, 8192), "all8")):
        for m in (129, 256, 300, 512, 700):
            for dtype in (torch.bfloat16, torch.float16) if m == 300 else (torch.bfloat16,):
                config = PrefillConfig(1, 0, 1024)
                check(make_case(*shape, kind), m, dtype, "cuda", path="cuda", config=config, smooth=True, bias=m != 300)


@pytest.mark.gpu
def test_a_row_has_its_bits_in_any_number_of_blocks():
    case = make_case(576, 2048)
    _, w, p = served(case, "cuda", True)
    x = make_rows(700, 2048, torch.bfloat16).cuda()
    config = PrefillConfig(1, 0, 1024)
    whole = prefill_int8.prefill_linear(x, w, p, path="cuda", config=config)
    for m in (1, 16, 100, 128, 129, 256, 257, 513):
        assert torch.equal(prefill_int8.prefill_linear(x[:m], w, p, path="cuda", config=config), whole[:m]), m


@pytest.mark.gpu
def test_rows_of_a_batch_may_lie_anywhere():
    case = make_case(192, 320)
    _, w, p = served(case, "cuda", True)
    config = PrefillConfig(1, 0, 128)
    x = make_rows(20, 320, torch.bfloat16).cuda()
    wanted = prefill_int8.prefill_linear(x, w, p, path="cuda", config=config)
    wide = torch.zeros(20, 321, dtype=x.dtype, device="cuda")
    wide[:, 1:] = x
    out = torch.full((20, 193), float("nan"), dtype=x.dtype, device="cuda")
    for to in (None, out[:, :192], out[:, 1:]):
        assert torch.equal(prefill_int8.prefill_linear(wide[:, 1:], w, p, path="cuda", config=config, out=to), wanted)

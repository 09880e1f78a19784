"""The truth in float64: one `<op>_ref` for everything a kernel computes. Slow, plain, and the only judge in the tests.

Formulas: the level reconstruction and the midpoint are section 3 of the GRINQH paper (with the exact centre
(2^d - 1) / 2 of the dropped bits); tile scales and the output rotation are AlignQuant's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tilequant.kernels.layout import PackedWeight, aligned_codes, expand_tiles, restore_outputs, unpack
from vllm_tilequant.schema import LEVELS, TILE

#: Least magnitude that a scale of the long prefill stands for, so that no reciprocal overflows.
SMALLEST = 2.0**-100


def activation_int8_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 activations with one scale per row and 64 inputs.

    x: [M, K] any float -> q [M, K] int8, scale [M, K/64] float32
    scale = max|x| / 127 in float32, q = x / scale rounded half to even; an all-zero group has scale 1 and codes 0.
    """
    v = x.float().view(x.shape[0], -1, TILE)
    # Divided by a tensor: by a number, torch on CUDA multiplies with the reciprocal, which may be off by one unit.
    scale = v.abs().amax(2) / torch.full((), 127.0, device=x.device)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = (v / scale[..., None]).round().clamp(-127, 127)
    return q.to(torch.int8).view(x.shape), scale


def activation_token_ref(x: Tensor, smoothing: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """INT8 activations with one scale per row, for the long prefill.

    x: [M, K] any float; smoothing: [K] float32, by which inputs are divided -> q [M, K] int8, scale [M] float32
    In float32: v = x * (1 / smoothing), scale = max(max|v|, 2^-100) / 127; q is the exact product of v and 127 / that maximum,
    rounded half to even.
    """
    v = x.float() if smoothing is None else x.float() * (torch.ones_like(smoothing) / smoothing)
    size = v.abs().amax(1).clamp_min(SMALLEST)
    whole = torch.full((), 127.0, device=x.device)
    q = (v.double() * (whole / size).double()[:, None]).round()
    return q.to(torch.int8), size / whole


def requantize_ref(w: PackedWeight, matrices: Tensor, smoothing: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weight of the long prefill: in the model's basis, times the smoothing, INT8 with one scale per output.

    matrices: [N/64, 64, 64], U of every output tile -> q [N, K] int8, scale [N] float32
    The sums of a rotated tile's codes are whole; what multiplies them is float32, in the order written here.
    """
    n, k = w.out_features, w.in_features
    codes = aligned_codes(w).T.double() - 128
    sums = ((8 * matrices.double()).round() @ codes.reshape(-1, TILE, k)).reshape(n, k)
    unit = expand_tiles(w.tile_scale * torch.exp2(w.tile_bits.float() - 8) / 8)
    unit = unit if smoothing is None else unit * smoothing
    scale = (sums.abs().float() * unit).amax(1).clamp_min(SMALLEST) / torch.full((), 127.0, device=unit.device)
    scaled = (sums * coarse(torch.ones_like(scale) / scale).double()[:, None]).float()
    return (scaled.double() * unit.double()).round().to(torch.int8), scale


def requantize_block_ref(w: PackedWeight, smoothing: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weight of batches and short prompts: rotated, times the smoothing, INT8 with one scale per rotated output.

    Returns q [N, K] int8, scale [N] float32. `block_ratios` says what codes are multiplied by, in half precision: first by what
    an output takes, which is rounded to half precision, then by what tile and input do, exactly, rounded half to even.
    """
    codes = aligned_codes(w).T.double() - 128
    unit = expand_tiles(w.tile_scale * torch.exp2(w.tile_bits.float() - 8))
    unit = unit if smoothing is None else unit * smoothing
    largest = (codes.abs().float() * unit).amax(1)
    of_tile, of_input, of_output, scale = block_ratios(largest, w.tile_scale, w.tile_bits, smoothing)
    by = of_tile.repeat_interleave(TILE, 1) * of_input  # [N/64, K], rounded to half precision
    stretched = (codes * of_output.double()[:, None]).half()  # 15 bits before
    return (stretched.double() * by.double().repeat_interleave(TILE, 0)).round().to(torch.int8), scale


def block_ratios(
    largest: Tensor, tile_scale: Tensor, tile_bits: Tensor, smoothing: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What makes one scale of an output in all tiles, in three factors of codes: [N/64, K/64], [K] and [N] float16; and the
    scale, [N] float32.

    largest: [N] float32, the largest size of a rotated output times the smoothing. That of 64 outputs becomes 127: a tile's
    factor is its step of 8-bit codes times the largest smoothing of its inputs, over 1/127 of it, and at most 4000; an input's
    is its smoothing over that largest one. An output's is what brings its own largest magnitude to 127 as well, but at most 56
    and cut to seven bits: then 1152 times it, which the kernel subtracts as it multiplies, is exact in half precision.
    """
    whole, most_ratio = (torch.full((), v, dtype=torch.float32, device=largest.device) for v in (127.0, 4000.0))
    smooth = (
        torch.ones(tile_bits.shape[1] * TILE, dtype=torch.float32, device=largest.device) if smoothing is None else smoothing
    )
    smooth = smooth.view(-1, TILE)
    most = smooth.amax(1)
    step = tile_scale * torch.exp2(tile_bits.float() - 8) * most
    of_output = largest.view(-1, TILE)
    of_block = of_output.amax(1)
    scale = torch.maximum(of_block / whole, step.amax(1) / most_ratio).clamp_min(SMALLEST)
    stretch = (of_block[:, None] / of_output.clamp_min(SMALLEST)).clamp(1, 56)
    stretch = (stretch.view(torch.int32) & ~0x1FFFF).view(torch.float32)  # 6 bits behind the first
    unit = (scale[:, None] / stretch).view(-1)
    return (step / scale[:, None]).half(), (smooth / most[:, None]).half().view(-1), stretch.half().view(-1), unit


def coarse(f: Tensor) -> Tensor:
    """Float32 of 22 significant bits, cut off: times 1.5 * 2^23 it is a float, which spares the expansion a subtraction."""
    return (f.view(torch.int32) & ~3).view(torch.float32)


def prefill_int8_ref(
    x: Tensor, w: PackedWeight, matrices: Tensor, bias: Tensor | None = None, *, smoothing: Tensor | None = None
) -> Tensor:
    """The long prefill: rows by `activation_token_ref`, weight by `requantize_ref`, one product over all of K. [M, N]."""
    q, scale = activation_token_ref(x, smoothing)
    codes, unit = requantize_ref(w, matrices, smoothing)
    y = q.double() @ codes.double().T * scale.double()[:, None] * unit.double()
    return y if bias is None else y + bias.double()


def prefill_block_ref(
    x: Tensor, w: PackedWeight, matrices: Tensor, bias: Tensor | None = None, *, smoothing: Tensor | None = None
) -> Tensor:
    """Batches and short prompts: rows by `activation_token_ref`, weight by `requantize_block_ref`, rotated back. [M, N]."""
    q, scale = activation_token_ref(x, smoothing)
    codes, unit = requantize_block_ref(w, smoothing)
    y = q.double() @ codes.double().T * scale.double()[:, None] * unit.double()
    return _finish(y, matrices, bias)


def levels_ref(x: Tensor, thresholds: Tensor) -> Tensor:
    """Bits at which every channel is read: [M, K] uint8 out of 0, 2, 4, 6, 8.

    x: [M, K] any float; thresholds: [4] float32, ascending. The level rises where |x|, in float32 and before quantisation, is
    greater than the threshold.
    """
    return (2 * (x.float().abs()[..., None] > thresholds).sum(-1)).to(torch.uint8)


def level_weight_ref(w: PackedWeight, level: int) -> Tensor:
    """The weight as read when every channel is at `level` bits, in the rotated basis: [N, K] float64. Zero at level 0."""
    if level == 0:
        return torch.zeros(w.out_features, w.in_features, dtype=torch.float64, device=w.plane0.device)
    bits = expand_tiles(w.tile_bits).double()
    drop = bits - bits.clamp_max(level)
    u = unpack(w).double()
    step = torch.exp2(drop)
    centred = step * (u / step).floor() + (step - 1) / 2 - torch.exp2(bits - 1)
    return centred * expand_tiles(w.tile_scale).double()


def linear_ref(x: Tensor, w: PackedWeight, matrices: Tensor, bias: Tensor | None = None, *, int8: bool) -> Tensor:
    """Static product at stored precision. x: [M, K]; matrices: [N/64, 64, 64] -> [M, N] float64.

    int8: activations through `activation_int8_ref` (the papers' arithmetic) or as they are.
    """
    y = _activation(x, int8) @ level_weight_ref(w, LEVELS[-1]).T
    return _finish(y, matrices, bias)


def decode_bitplane_ref(
    x: Tensor,
    w: PackedWeight,
    matrices: Tensor,
    thresholds: Tensor,
    bias: Tensor | None = None,
    *,
    int8: bool = True,
) -> Tensor:
    """Graded product: every row reads every channel at its own level. x: [M, K] -> [M, N] float64."""
    levels = levels_ref(x, thresholds)
    a = _activation(x, int8)
    y = torch.zeros(x.shape[0], w.out_features, dtype=torch.float64, device=x.device)
    for level in LEVELS[1:]:
        y += torch.where(levels == level, a, 0.0) @ level_weight_ref(w, level).T
    return _finish(y, matrices, bias)


def tile_sums_ref(x: Tensor, w: PackedWeight, thresholds: Tensor) -> Tensor:
    """The integers inside the graded product: [M, K/64, N] int64, doubled so that midpoints are whole.

    sum_i q_i (2 * 2^d floor(u/2^d) + 2^d - 1 - 2^B) over the 64 channels i of an input tile with level > 0.
    """
    q, _ = activation_int8_ref(x)
    level = levels_ref(x, thresholds).long()[:, :, None]  # [M, K, 1]
    bits = expand_tiles(w.tile_bits).T.long()[None]  # [1, K, N]
    u = (aligned_codes(w).long()[None]) >> (8 - bits)
    d = bits - torch.minimum(bits, level)
    value = 2 * ((u >> d) << d) + (1 << d) - 1 - (1 << bits)
    terms = torch.where(level > 0, q.long()[:, :, None] * value, 0)
    return terms.view(x.shape[0], -1, TILE, w.out_features).sum(2)


def _activation(x: Tensor, int8: bool) -> Tensor:
    if not int8:
        return x.double()
    q, scale = activation_int8_ref(x)
    return (q.view(x.shape[0], -1, TILE).double() * scale.double()[..., None]).view(x.shape)


def _finish(y: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
    y = restore_outputs(y, matrices.double())
    return y if bias is None else y + bias.double()

"""The portable graded GEMV: three Triton launches (rows, products, reduction) with the integers of the CUDA path.

Four active channels at a time: their words are byte-transposed so that a byte is one channel, and `word & (3 << 2j)` is
output j of four channels scaled by 4^j, ready for dp4a; the power of four is divided out once per tile. Every row reads its
own channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tilequant.kernels.activation_int8 import PreparedRows, prepare_rows
from vllm_tilequant.kernels.decode_weight import BLOCK_TILES, IDENTITY, DecodeWeight
from vllm_tilequant.schema import TILE

#: Input tiles of one program. Fixed: the order of additions must not depend on the number of rows.
TILES_PER_SPLIT = 4


def launch(
    x: Tensor,
    w: DecodeWeight,
    bias: Tensor | None,
    thresholds: Tensor,
    out: Tensor,
    *,
    sums: Tensor | None = None,
    rows: PreparedRows | None = None,
) -> None:
    """Write x W^T + bias to `out`, on arguments that the caller checked. rows: of `prepare_rows`, shared by layers of one x."""
    rows = prepare_rows(x, thresholds) if rows is None else rows
    m, n_tiles, k_tiles = x.shape[0], w.out_features // TILE, w.in_features // TILE
    blocks, splits = -(-n_tiles // BLOCK_TILES), -(-k_tiles // TILES_PER_SPLIT)
    partial = torch.empty(splits, m, blocks * BLOCK_TILES * TILE, dtype=torch.float32, device=x.device)
    _products[(blocks, splits, m)](
        w.codes, w.meta, w.factor, rows.scale, rows.counts, rows.channels.view(torch.int32), rows.values.view(torch.int32),
        rows.centre, partial, partial if sums is None else sums, n_tiles, k_tiles,
        PER_SPLIT=TILES_PER_SPLIT, SUMS=sums is not None, ASM=x.device.type == "cuda", num_warps=1,
    )  # fmt: skip
    _finish[(n_tiles, m)](
        partial, w.transform, w.table, out if bias is None else bias, out, out.stride(0), partial.stride(0), partial.stride(1),
        SPLITS=splits, BIAS=bias is not None, NONE=IDENTITY, num_warps=4,
    )  # fmt: skip


@triton.jit
def _bytes_of(w0, w1, w2, w3, t, ASM: tl.constexpr):
    """Byte t of four words, side by side. w0..w3: [1, W] int32, t: [4, 1] -> [4, W] int32."""
    if ASM:
        pair = tl.where(t < 2, 0x5140, 0x7362)
        low = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [w0, w1, pair], tl.int32, True, 1)
        high = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [w2, w3, pair], tl.int32, True, 1)
        both = tl.where(t % 2 == 0, 0x5410, 0x7632)
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, both], tl.int32, True, 1)
    else:
        return (
            ((w0 >> 8 * t) & 255) | (((w1 >> 8 * t) & 255) << 8) | (((w2 >> 8 * t) & 255) << 16) | (((w3 >> 8 * t) & 255) << 24)
        )


@triton.jit
def _dp4a(codes, x, acc, ASM: tl.constexpr):
    """acc + sum of four products of an unsigned byte of `codes` and a signed byte of x."""
    if ASM:
        return tl.inline_asm_elementwise("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, acc], tl.int32, True, 1)
    else:
        for i in tl.static_range(4):
            acc += ((codes >> (8 * i)) & 255) * ((x << (24 - 8 * i)) >> 24)
        return acc


@triton.jit
def _products(
    code_ptr, meta_ptr, factor_ptr, scale_ptr, count_ptr, channel_ptr, value_ptr, centre_ptr, out_ptr, sum_ptr,
    n_tiles, k_tiles, PER_SPLIT: tl.constexpr, SUMS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One block of 512 outputs, PER_SPLIT input tiles, one row."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.program_id(2)
    words = tl.arange(0, 32)
    tile = words // 4  # of the block
    inside = block * 8 + tile < n_tiles
    t = tl.arange(0, 4)[:, None]
    j = tl.arange(0, 4)[None, :, None]
    field = tl.where(j == 3, -1061109568, 3 << (2 * j))  # 0xC0C0C0C0 has the sign bit
    field = tl.where(j == 3, field, field * 0x01010101)
    step = tl.where(j == 0, 1.0, tl.where(j == 1, 0.25, tl.where(j == 2, 0.0625, 0.015625)))
    total = tl.zeros([4, 4, 32], tl.float32)
    kt = split * PER_SPLIT
    end = tl.minimum(kt + PER_SPLIT, k_tiles)
    while kt < end:  # not range: the interpreter takes no tensor bounds
        at = block.to(tl.int64) * k_tiles + kt
        row = m.to(tl.int64) * k_tiles + kt
        first = tl.load(meta_ptr + at * 2).to(tl.int64) & 0xFFFFFFFF
        masks = tl.load(meta_ptr + at * 2 + 1)
        acc = tl.zeros([4, 4, 32], tl.int32)
        for p in tl.static_range(4):
            acc *= 4
            if p < 2:
                has = inside
                base = at * 4096 + p * 2048 + words
                stride = 32
            else:
                mask = (masks >> (8 * (p - 2))) & 255
                has = inside & (((mask >> tile) & 1) == 1)
                rank = tl.zeros([32], tl.int32)
                count = 0
                before = 0
                for i in tl.static_range(8):
                    bit = (mask >> i) & 1
                    rank += tl.where(tile > i, bit, 0)
                    count += bit
                    if p == 3:
                        before += (masks >> i) & 1
                base = (first + before * 64) * 4 + rank * 4 + words % 4
                stride = count * 4
            groups = tl.load(count_ptr + row * 4 + p)
            g = groups * 0
            while g < groups:
                channels = tl.load(channel_ptr + (row * 4 + p) * 16 + g)
                x = tl.load(value_ptr + (row * 4 + p) * 16 + g)
                w0 = tl.load(code_ptr + base + (channels & 255) * stride, mask=has, other=0)
                w1 = tl.load(code_ptr + base + ((channels >> 8) & 255) * stride, mask=has, other=0)
                w2 = tl.load(code_ptr + base + ((channels >> 16) & 255) * stride, mask=has, other=0)
                w3 = tl.load(code_ptr + base + ((channels >> 24) & 255) * stride, mask=has, other=0)
                four = _bytes_of(w0[None, :], w1[None, :], w2[None, :], w3[None, :], t, ASM)  # [4, 32]
                acc = _dp4a(four[:, None, :] & field, tl.zeros([4, 4, 32], tl.int32) + x, acc, ASM)  # [4 t, 4 j, 32]
                g += 1
        bits_class = (masks >> (16 + 2 * tile)) & 3
        centre = tl.load(centre_ptr + row * 4 + bits_class)[None, None, :]
        whole = acc.to(tl.float32) * (step * 2.0) + centre  # exact
        scale = tl.load(factor_ptr + at * 8 + tile) * tl.load(scale_ptr + row)
        total += whole * scale[None, None, :]
        if SUMS:
            out = block * 512 + words[None, None, :] * 16 + 4 * t[:, :, None] + j
            unit = 1 << (6 - 2 * bits_class)
            tl.store(
                sum_ptr + row * n_tiles * 64 + out,
                whole.to(tl.int32) // unit[None, None, :],
                mask=tl.broadcast_to(inside[None, None, :], [4, 4, 32]),
            )
        kt += 1
    out = block * 512 + words[None, None, :] * 16 + 4 * t[:, :, None] + j
    at_out = (split.to(tl.int64) * tl.num_programs(2) + m) * (tl.num_programs(0) * 512) + out
    tl.store(out_ptr + at_out, total)


@triton.jit
def _finish(
    partial_ptr, transform_ptr, table_ptr, bias_ptr, y_ptr, y_stride, split_stride, row_stride,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """Add the splits in ascending order, rotate the tile's 64 outputs back, add the bias, round once."""
    nt = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, 64)
    total = tl.load(partial_ptr + m * row_stride + nt * 64 + k)
    for s in range(1, SPLITS):
        total += tl.load(partial_ptr + s * split_stride.to(tl.int64) + m * row_stride + nt * 64 + k)
    transform = tl.load(transform_ptr + nt).to(tl.int32)
    if transform != NONE:
        code = tl.load(table_ptr + transform * 64 + k).to(tl.int32)
        parity = (code & 63)[:, None] & k[None, :]
        parity ^= parity >> 4
        parity ^= parity >> 2
        parity ^= parity >> 1
        signed = tl.where(code >= 128, -total, total)[None, :]
        total = tl.sum(tl.where(parity & 1 == 1, -signed, signed), 1) * tl.where((code & 64) != 0, -0.125, 0.125)  # [64]
    if BIAS:
        total += tl.load(bias_ptr + nt * 64 + k).to(tl.float32)
    tl.store(y_ptr + m * y_stride + nt * 64 + k, total.to(y_ptr.dtype.element_ty))

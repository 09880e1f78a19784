"""Triton kernels of the prefill: INT8 rows, and the portable forms of what `prefill_*.cu` does faster on Hopper.

Rows quantised per 64 inputs are stored in the order in which the tensor core's operand wants them: place 16c + 2d + i of an
input tile holds input 8d + 2c + i, c below 4, d below 8, i below 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.reference import SMALLEST
from vllm_tilequant.kernels.rotation import read_table, turn
from vllm_tilequant.kernels.tuning import multiprocessors
from vllm_tilequant.schema import TILE

#: `quantize_groups` pads its rows to a multiple of this, so that a block of rows is one piece; what is padded is not written.
ROW_PAD = 128
#: Inputs up to which a block of `quantize_rows` holds a whole row in registers, 16 of them to a thread.
WHOLE_ROW = 16384
#: Threads of a multiprocessor that so many registers leave room for.
_RESIDENT_THREADS = 1024
#: Input tiles of one program of `quantize_groups`, and of `largest`.
GROUPS, _LARGEST_TILES = 8, 16
_SMALLEST = tl.constexpr(SMALLEST)


def quantize_groups(x: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`activation_int8_ref`, reordered: x [M, K], rows contiguous -> q [K/64, M padded, 64] int8, scale [K/64, M padded].

    table: [64] uint8 of `layout.rotation_table`, for inputs that are rotated first; None for none
    """
    m, k = x.shape
    padded = -(-m // ROW_PAD) * ROW_PAD
    q = torch.empty(k // TILE, padded, TILE, dtype=torch.int8, device=x.device)
    scale = torch.empty(k // TILE, padded, dtype=torch.float32, device=x.device)
    grid, overlap = (m, -(-k // (TILE * GROUPS))), _overlaps(x.device)
    _quantize_groups[grid](
        x, x if table is None else table, q, scale, x.stride(0), padded, k // TILE,
        G=GROUPS, ROTATE=table is not None, OVERLAP=overlap, num_warps=4, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return q, scale


def _overlaps(device: torch.device) -> bool:
    """Whether a GPU can start a launch before the one in front has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def quantize_rows(x: Tensor, unsmoothing: Tensor | None, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`activation_token_ref`: x [M, K], rows contiguous; unsmoothing [K], 1 / smoothing -> q [M, K] int8, scale [M, 1].

    table: as in `quantize_groups`. Rotated inputs have no smoothing.
    """
    assert unsmoothing is None or table is None
    m, k = x.shape
    q = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    smooth, on_gpu = unsmoothing is not None, x.device.type == "cuda"
    if table is None and k <= WHOLE_ROW:
        width = max(1024, triton.next_power_of_2(k))
        at_once = multiprocessors(x.device).count * _RESIDENT_THREADS * 16 // width if on_gpu else 4
        _quantize_whole_rows[(min(m, at_once),)](
            x, unsmoothing if smooth else x, q, scale, m, x.stride(0), k,
            WIDTH=width, SMOOTH=smooth, FUSED=on_gpu, num_warps=width // 512,
        )  # fmt: skip
    else:
        _quantize_rows[(m,)](
            x, unsmoothing if smooth else x, x if table is None else table, q, scale, x.stride(0), k,
            CHUNK=4096, SMOOTH=smooth, ROTATE=table is not None, FUSED=on_gpu, num_warps=8,
        )  # fmt: skip
    return q, scale


def expand(w: DecodeWeight, rotation: Tensor, index: Tensor, inverse: Tensor, smoothing: Tensor | None, out: Tensor) -> None:
    """Write `requantize_ref`'s codes to out [N, K]. rotation: [., 64, 64] int8, 8U; index: [N/64] uint8; inverse: [N, 1]."""
    n_tiles, k_tiles = w.out_features // TILE, w.in_features // TILE
    _expand[(n_tiles, k_tiles)](
        w.codes, w.meta, w.factor, rotation, index, inverse, inverse if smoothing is None else smoothing, out, k_tiles,
        SMOOTH=smoothing is not None, FUSED=out.device.type == "cuda", num_warps=4,
    )  # fmt: skip


def largest(w: DecodeWeight, rotation: Tensor, index: Tensor, smoothing: Tensor | None) -> tuple[Tensor, Tensor]:
    """What weights of an output, times `smoothing`, reach at most; what those of a rotated output do. [N] float32 each.

    rotation, index: as in `expand`. The same bits as plain torch gives, from one read of the weight.
    """
    n_tiles, k_tiles, device = w.out_features // TILE, w.in_features // TILE, w.device
    parts = -(-k_tiles // _LARGEST_TILES)
    outputs = torch.empty(parts, w.out_features, dtype=torch.float32, device=device)
    rotated = torch.empty_like(outputs)
    _largest_of[(n_tiles, parts)](
        w.codes, w.meta, w.factor, rotation, index, outputs if smoothing is None else smoothing, outputs, rotated, k_tiles,
        TILES=_LARGEST_TILES, SMOOTH=smoothing is not None, num_warps=4,
    )  # fmt: skip
    return outputs.amax(0), rotated.amax(0)


def gemm(q: Tensor, scale: Tensor, codes: Tensor, unit: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = (q codes^T) * scale * unit + bias. q: [M, K] int8; scale: [M, 1]; codes: [N, K] int8; unit: [N]; out: [M, N]."""
    m, k = q.shape
    n = codes.shape[0]
    block_m, block_n, block_k = (128, 128, 128) if q.device.type == "cuda" else (32, 64, 64)
    grid = (-(-m // block_m) * -(-n // block_n),)
    _gemm[grid](
        q, scale, codes, unit, out if bias is None else bias, out, m, n, k, out.stride(0),
        BM=block_m, BN=block_n, BK=block_k, GROUP=8, BIAS=bias is not None, num_warps=8, num_stages=3,
    )  # fmt: skip


def short(q: Tensor, scale: Tensor, w: DecodeWeight, rotation: Tensor, index: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = `linear_ref(int8=True)` from the two results of `quantize_groups`; the weight is expanded inside."""
    m, n_tiles, k_tiles = out.shape[0], w.out_features // TILE, w.in_features // TILE
    block = 32  # at any number of rows, so that a row is summed in one order
    _short[(-(-m // block), n_tiles)](
        q, scale, w.codes, w.meta, w.factor, rotation, index, out if bias is None else bias, out, m, k_tiles, q.shape[1],
        out.stride(0), BM=block, BIAS=bias is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _input_at(place):
    """The input at a place of an input tile's row."""
    return place // 2 % 8 * 8 + place // 16 * 2 + place % 2


@triton.jit
def _round(x):
    """Nearest whole number, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _round_product(x, y, FUSED: tl.constexpr):
    """x y, unrounded, to the nearest whole number. The interpreter's fma rounds twice, so it takes float64."""
    if FUSED:
        return tl.fma(x, y, 12582912.0) - 12582912.0
    else:
        return ((x.to(tl.float64) * y.to(tl.float64) + 6755399441055744.0) - 6755399441055744.0).to(tl.float32)


@triton.jit
def _place_of(i):
    """The place of an input of an input tile: `_input_at` the other way."""
    return i // 2 % 4 * 16 + i // 8 * 2 + i % 2


@triton.jit
def _quantize_groups(
    x_ptr, table_ptr, q_ptr, scale_ptr, x_stride, padded, k_tiles,
    G: tl.constexpr, ROTATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:  # it may start before the launch in front has ended, and the product behind it may read its weight meanwhile
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    kt = tl.program_id(1) * G + tl.arange(0, G)
    at = tl.arange(0, 64)
    inside = (kt < k_tiles)[:, None]
    if ROTATE:  # rotated at their own places, so that the reordering is left to the store
        source, left, right = read_table(table_ptr)
        v = tl.load(x_ptr + m * x_stride + kt[:, None] * 64 + source[None, :], mask=inside, other=0.0)
        x = turn(v.to(tl.float32), left, right, G)
        to = _place_of(at)
    else:
        x = tl.load(x_ptr + m * x_stride + kt[:, None] * 64 + _input_at(at)[None, :], mask=inside, other=0.0).to(tl.float32)
        to = at
    scale = tl.math.div_rn(tl.max(tl.abs(x), 1), tl.full([G], 127.0, tl.float32))  # x: [G, 64]
    scale = tl.where(scale == 0.0, 1.0, scale) + tl.sum(x * 0.0, 1)  # NaN where any input is NaN or infinite
    q = _round(tl.math.div_rn(x, tl.broadcast_to(scale[:, None], [G, 64])))
    q = tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8)
    row = kt.to(tl.int64) * padded + m
    tl.store(q_ptr + row[:, None] * 64 + to[None, :], q, mask=inside)
    tl.store(scale_ptr + row, scale, mask=kt < k_tiles)


@triton.jit
def _read_chunk(
    x_ptr, unsmoothing_ptr, k0, k, source, left, right, CHUNK: tl.constexpr, SMOOTH: tl.constexpr, ROTATE: tl.constexpr
):  # fmt: skip
    """Inputs k0 .. k0 + CHUNK of the row at x_ptr, smoothed or rotated: [CHUNK] float32."""
    if ROTATE:
        first = k0 + tl.arange(0, CHUNK // 64)[:, None] * 64  # of every group of 64
        inside = tl.broadcast_to(first < k, [CHUNK // 64, 64])
        v = tl.load(x_ptr + first + source[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.reshape(turn(v, left, right, CHUNK // 64), [CHUNK])
    else:
        c = k0 + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + c, mask=c < k, other=0.0).to(tl.float32)
        if SMOOTH:
            x = x * tl.load(unsmoothing_ptr + c, mask=c < k, other=0.0)
    return x


@triton.jit
def _largest(x):
    """The bits of the largest magnitude: they compare as whole numbers, those of NaN above all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def _size(largest):
    size = largest.to(tl.float32, bitcast=True)
    return tl.where(size < _SMALLEST, _SMALLEST, size)


@triton.jit
def _row_codes(x, size, WIDTH: tl.constexpr, FUSED: tl.constexpr):
    unit = tl.math.div_rn(tl.full([], 127.0, tl.float32), size)
    return _round_product(x, tl.zeros([WIDTH], tl.float32) + unit, FUSED).to(tl.int8)


@triton.jit(do_not_specialize=["m"])
def _quantize_whole_rows(
    x_ptr, unsmoothing_ptr, q_ptr, scale_ptr, m, x_stride, k, WIDTH: tl.constexpr, SMOOTH: tl.constexpr, FUSED: tl.constexpr
):  # fmt: skip
    """Rows of at most WIDTH inputs, read once. A block takes every n-th of them, so that it reads the smoothing once."""
    c = tl.arange(0, WIDTH)
    inside = c < k
    if SMOOTH:
        by = tl.load(unsmoothing_ptr + c, mask=inside, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    while row < m:
        x = tl.load(x_ptr + row * x_stride + c, mask=inside, other=0.0).to(tl.float32)
        if SMOOTH:
            x = x * by
        size = _size(_largest(x))
        tl.store(q_ptr + row * k + c, _row_codes(x, size, WIDTH, FUSED), mask=inside)
        tl.store(scale_ptr + row, tl.math.div_rn(size, tl.full([], 127.0, tl.float32)))
        row += tl.num_programs(0)


@triton.jit
def _quantize_rows(
    x_ptr, unsmoothing_ptr, table_ptr, q_ptr, scale_ptr, x_stride, k,
    CHUNK: tl.constexpr, SMOOTH: tl.constexpr, ROTATE: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """A row of any length, read twice."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    c = tl.arange(0, CHUNK)
    if ROTATE:
        source, left, right = read_table(table_ptr)
    else:
        source, left, right = c, c, c
    largest = 0
    k0 = 0
    while k0 < k:
        x = _read_chunk(x_ptr, unsmoothing_ptr, k0, k, source, left, right, CHUNK, SMOOTH, ROTATE)
        largest = tl.maximum(largest, _largest(x))
        k0 += CHUNK
    size = _size(largest)
    k0 = 0
    while k0 < k:
        x = _read_chunk(x_ptr, unsmoothing_ptr, k0, k, source, left, right, CHUNK, SMOOTH, ROTATE)
        tl.store(q_ptr + row * k + k0 + c, _row_codes(x, size, CHUNK, FUSED), mask=k0 + c < k)
        k0 += CHUNK
    tl.store(scale_ptr + row, tl.math.div_rn(size, tl.full([], 127.0, tl.float32)))


@triton.jit
def _codes(code_ptr, meta_ptr, at, tile, channels):
    """Signed 8-bit-aligned codes of one tile for 64 channels in the given order: [64 channels, 64 outputs] int8.

    The one reader of the decode form here; at: block * K/64 + input tile; tile: of the block.
    """
    first = tl.load(meta_ptr + at * 2).to(tl.int64) & 0xFFFFFFFF
    masks = tl.load(meta_ptr + at * 2 + 1)
    words = tl.arange(0, 4)
    one = tl.full([1], 1, tl.int32)
    has2, has3, count2, count3, rank2, rank3 = one * 0, one * 0, one * 0, one * 0, one * 0, one * 0
    for i in tl.static_range(8):
        bit2 = (masks >> i) & 1
        bit3 = (masks >> (8 + i)) & 1
        count2 += bit2
        count3 += bit3
        rank2 += tl.where(i < tile, bit2, 0)
        rank3 += tl.where(i < tile, bit3, 0)
        has2 += tl.where(i == tile, bit2, 0)
        has3 += tl.where(i == tile, bit3, 0)
    t = tl.arange(0, 4)[None, None, :, None]
    j = tl.arange(0, 4)[None, None, None, :]
    code = tl.zeros([64, 4, 4, 4], tl.int32)
    dense = at * 4096 + channels[:, None] * 32 + tile * 4 + words[None, :]  # [64, 4], in words
    second = (first + channels[:, None] * count2[:, None] + rank2[:, None]) * 4 + words[None, :]
    third = (first + 64 * count2[:, None] + channels[:, None] * count3[:, None] + rank3[:, None]) * 4 + words[None, :]
    for p in tl.static_range(4):
        if p == 0:
            w = tl.load(code_ptr + dense)
        elif p == 1:
            w = tl.load(code_ptr + dense + 2048)
        elif p == 2:
            w = tl.load(code_ptr + second, mask=tl.broadcast_to(has2[:, None] == 1, [64, 4]), other=0)
        else:
            w = tl.load(code_ptr + third, mask=tl.broadcast_to(has3[:, None] == 1, [64, 4]), other=0)
        code += ((w[:, :, None, None] >> (8 * t + 2 * j)) & 3) << (6 - 2 * p)
    return (tl.reshape(code, [64, 64]) - 128).to(tl.int8)


@triton.jit
def _rotation(rotation_ptr, index_ptr, nt):
    """8U of an output tile: [n, n'] int8."""
    n = tl.arange(0, 64)
    return tl.load(rotation_ptr + tl.load(index_ptr + nt).to(tl.int32) * 4096 + n[None, :] * 64 + n[:, None])


@triton.jit
def _units(factor_ptr, smoothing_ptr, at, tile, kt, SMOOTH: tl.constexpr):
    """What codes of a tile times 8U count in, by input, times the smoothing: [64] float32. at, tile: as in `_codes`."""
    unit = tl.zeros([64], tl.float32) + tl.load(factor_ptr + at * 8 + tile) * 0.25
    if SMOOTH:
        unit = unit * tl.load(smoothing_ptr + kt * 64 + tl.arange(0, 64))
    return unit


@triton.jit
def _expand(
    code_ptr, meta_ptr, factor_ptr, rotation_ptr, index_ptr, inverse_ptr, smoothing_ptr, out_ptr, k_tiles,
    SMOOTH: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    nt = tl.program_id(0)
    kt = tl.program_id(1)
    at = (nt // 8).to(tl.int64) * k_tiles + kt
    n = tl.arange(0, 64)
    codes = _codes(code_ptr, meta_ptr, at, nt % 8, n)  # [64 k, 64 n]
    rotation = _rotation(rotation_ptr, index_ptr, nt)
    sums = tl.dot(codes, rotation, out_dtype=tl.int32).to(tl.float32)  # [64 k, 64 n'], exact
    unit = _units(factor_ptr, smoothing_ptr, at, nt % 8, kt, SMOOTH)
    q = _round_product(sums * tl.load(inverse_ptr + nt * 64 + n)[None, :], tl.broadcast_to(unit[:, None], [64, 64]), FUSED)
    tl.store(out_ptr + (nt * 64 + n)[None, :].to(tl.int64) * (k_tiles * 64) + (kt * 64 + n)[:, None], q.to(tl.int8))


@triton.jit
def _largest_of(
    code_ptr, meta_ptr, factor_ptr, rotation_ptr, index_ptr, smoothing_ptr, outputs_ptr, rotated_ptr, k_tiles,
    TILES: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    nt = tl.program_id(0)
    part = tl.program_id(1)
    n = tl.arange(0, 64)
    rotation = _rotation(rotation_ptr, index_ptr, nt)
    of_output = tl.zeros([64], tl.float32)
    rotated = tl.zeros([64], tl.float32)
    kt = part * TILES
    while kt < tl.minimum(part * TILES + TILES, k_tiles):
        at = (nt // 8).to(tl.int64) * k_tiles + kt
        codes = _codes(code_ptr, meta_ptr, at, nt % 8, n)  # [64 k, 64 n]
        sums = tl.abs(tl.dot(codes, rotation, out_dtype=tl.int32)).to(tl.float32)  # [64 k, 64 n'], exact
        unit = _units(factor_ptr, smoothing_ptr, at, nt % 8, kt, SMOOTH)
        of_output = tl.maximum(of_output, tl.max(sums * unit[:, None], 0))
        rotated = tl.maximum(rotated, tl.max(tl.abs(codes.to(tl.int32)).to(tl.float32) * (8 * unit)[:, None], 0))
        kt += 1
    at = (part * tl.num_programs(0) + nt).to(tl.int64) * 64 + n
    tl.store(outputs_ptr + at, of_output)
    tl.store(rotated_ptr + at, rotated)


@triton.jit(do_not_specialize=["m"])
def _gemm(
    q_ptr, scale_ptr, code_ptr, unit_ptr, bias_ptr, out_ptr, m, n, k, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(m, BM)
    blocks_n = tl.cdiv(n, BN)
    first = pid // (GROUP * blocks_n) * GROUP
    size = tl.minimum(blocks_m - first, GROUP)
    within = pid % (GROUP * blocks_n)
    rows = (first + within % size) * BM + tl.arange(0, BM)
    outputs = within // size * BN + tl.arange(0, BN)
    inputs = tl.arange(0, BK)
    row = tl.where(rows < m, rows, 0).to(tl.int64)
    output = tl.where(outputs < n, outputs, 0).to(tl.int64)
    acc = tl.zeros([BM, BN], tl.int32)
    k0 = 0
    while k0 < k:
        inside = k0 + inputs < k
        a = tl.load(q_ptr + row[:, None] * k + (k0 + inputs)[None, :], mask=inside[None, :], other=0)  # [BM, BK] int8
        b = tl.load(code_ptr + output[None, :] * k + (k0 + inputs)[:, None], mask=inside[:, None], other=0)  # [BK, BN] int8
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        k0 += BK
    y = acc.to(tl.float32) * tl.load(scale_ptr + row)[:, None] * tl.load(unit_ptr + output)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + output).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=(rows < m)[:, None] & (outputs < n)[None, :],
    )


@triton.jit(do_not_specialize=["m"])
def _short(
    q_ptr, scale_ptr, code_ptr, meta_ptr, factor_ptr, rotation_ptr, index_ptr, bias_ptr, out_ptr, m, k_tiles, padded,
    out_stride, BM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    nt = tl.program_id(1)
    n = tl.arange(0, 64)
    inside = rows < m
    row = rows.to(tl.int64)
    channels = _input_at(n)
    acc = tl.zeros([BM, 64], tl.float32)
    kt = 0
    while kt < k_tiles:
        at = (nt // 8).to(tl.int64) * k_tiles + kt
        place = kt * padded.to(tl.int64) + row
        x = tl.load(q_ptr + place[:, None] * 64 + n[None, :], mask=inside[:, None], other=0)  # int8
        codes = _codes(code_ptr, meta_ptr, at, nt % 8, channels)  # [64, 64] int8
        sums = tl.dot(x, codes, out_dtype=tl.int32).to(tl.float32)  # exact
        scale = tl.load(scale_ptr + place, mask=inside, other=0.0)
        acc += sums * (scale * (2.0 * tl.load(factor_ptr + at * 8 + nt % 8)))[:, None]
        kt += 1
    rotation = _rotation(rotation_ptr, index_ptr, nt)
    y = tl.dot(acc, rotation.to(tl.float32) * 0.125, input_precision="ieee")
    if BIAS:
        y += tl.load(bias_ptr + nt * 64 + n).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + (nt * 64 + n)[None, :], y.to(out_ptr.dtype.element_ty), mask=inside[:, None])

"""What a graded product needs to know of its rows, made once and shared by every layer with the same input (Triton).

The CUDA path prepares its rows inside its one launch; the portable Triton path reads what is made here. Plane p of a channel
is wanted where its level is above 2p bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tilequant.kernels.capability import DTYPES, MAX_ROWS
from vllm_tilequant.schema import TILE

PLANES = 4
#: Classes of tiles in `PreparedRows.centre`: stored bits 2, 4, 6, 8.
CLASSES = 4


@dataclass(frozen=True)
class PreparedRows:
    """INT8 rows and, per input tile and plane, the compacted channels that want it in groups of four.

    q: [M, K] int8; scale: [M, K/64] float32, 1 for an all-zero group
    levels: [M, K] uint8, bits
    counts: [M, K/64, 4] int32, groups of every plane
    channels, values: [M, K/64, 4, 64] uint8 and int8: channel numbers in a tile, ascending, and their codes. Beyond the wanted
        ones the last channel (0 if there is none) is repeated with value 0, so that any four in a row form a group
    centre: [M, K/64, 4] float32, whole: sum over channels of q (2^(8-b) - 2^(8-B) - 256), b = min(level, B), for B = 2, 4, 6, 8
    """

    q: Tensor
    scale: Tensor
    levels: Tensor
    counts: Tensor
    channels: Tensor
    values: Tensor
    centre: Tensor


def prepare_rows(x: Tensor, thresholds: Tensor) -> PreparedRows:
    """One launch. x: [M, K] bf16, fp16 or float32, rows contiguous; thresholds: [4] float32, ascending, on |x| in float32."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, wanted one of {', '.join(map(str, DTYPES))}: convert the activations")
    if x.ndim != 2 or x.shape[1] % TILE or not 1 <= x.shape[0] <= MAX_ROWS or x.stride(1) != 1:
        raise ValueError(f"x is {list(x.shape)}, wanted [1..{MAX_ROWS}, a multiple of {TILE}] with contiguous rows")
    if thresholds.dtype != torch.float32 or thresholds.device != x.device or tuple(thresholds.shape) != (PLANES,):
        raise ValueError(
            f"thresholds are {thresholds.dtype} {list(thresholds.shape)} on {thresholds.device}, "
            f"wanted float32 [{PLANES}] on {x.device}"
        )
    m, k_tiles = x.shape[0], x.shape[1] // TILE

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    out = PreparedRows(
        q=empty(m, k_tiles * TILE, dtype=torch.int8),
        scale=empty(m, k_tiles, dtype=torch.float32),
        levels=empty(m, k_tiles * TILE, dtype=torch.uint8),
        counts=empty(m, k_tiles, PLANES, dtype=torch.int32),
        channels=empty(m, k_tiles, PLANES, TILE, dtype=torch.uint8),
        values=empty(m, k_tiles, PLANES, TILE, dtype=torch.int8),
        centre=empty(m, k_tiles, CLASSES, dtype=torch.float32),
    )
    _prepare[(k_tiles, m)](
        x, thresholds, out.q, out.scale, out.levels, out.counts, out.channels, out.values, out.centre,
        x.stride(0), k_tiles, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _prepare(
    x_ptr, threshold_ptr, q_ptr, scale_ptr, level_ptr, count_ptr, channel_ptr, value_ptr, centre_ptr, x_stride, k_tiles
):
    kt = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    at = m * k_tiles + kt
    c = tl.arange(0, 64)
    x = tl.load(x_ptr + m * x_stride + kt * 64 + c).to(tl.float32)  # [64]
    size = tl.abs(x)
    scale = tl.math.div_rn(tl.max(size, 0), 127.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    # adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even
    q = (tl.math.div_rn(x, tl.zeros([64], tl.float32) + scale) + 12582912.0) - 12582912.0
    q = tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int32)
    level = tl.zeros([64], tl.int32)
    for p in tl.static_range(4):
        level += (size > tl.load(threshold_ptr + p)).to(tl.int32)
    tl.store(q_ptr + at * 64 + c, q.to(tl.int8))
    tl.store(scale_ptr + at, scale)
    tl.store(level_ptr + at * 64 + c, (2 * level).to(tl.uint8))
    for p in tl.static_range(4):
        wanted = level > p
        n = tl.sum(wanted.to(tl.int32), 0)
        slot = tl.cumsum(wanted.to(tl.int32), 0) - 1
        last = tl.max(tl.where(wanted, c, 0), 0)
        row = (at * 4 + p) * 64
        tl.store(count_ptr + at * 4 + p, (n + 3) // 4)
        tl.store(channel_ptr + row + slot, c.to(tl.uint8), mask=wanted)
        tl.store(value_ptr + row + slot, q.to(tl.int8), mask=wanted)
        tl.store(channel_ptr + row + c, (tl.zeros([64], tl.int32) + last).to(tl.uint8), mask=c >= n)
        tl.store(value_ptr + row + c, tl.zeros([64], tl.int8), mask=c >= n)
    for b in tl.static_range(4):
        kept = tl.minimum(2 * level, 2 * b + 2)
        middle = (256 >> kept) - (256 >> (2 * b + 2)) - 256
        tl.store(centre_ptr + at * 4 + b, tl.sum(tl.where(level > 0, q * middle, 0), 0).to(tl.float32))

"""x' = x V for every 64 inputs: what a rotated group's activations pass before levels and INT8 (Triton).

The order of sums is part of the format: this gives the bits of `layout.rotate_inputs`, the reference and portable form. Graded
rows are rotated in a launch of their own; the row quantisers of the prefill rotate what they read (`prefill_triton.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tilequant.kernels.capability import DTYPES
from vllm_tilequant.schema import TILE

#: Groups of 64 inputs that one program turns.
_GROUPS = 4


def rotate_rows(x: Tensor, table: Tensor) -> Tensor:
    """One launch. x: [M, K] bf16, fp16 or float32; table: [64] uint8 of `layout.rotation_table` -> [M, K] float32"""
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, wanted one of {', '.join(map(str, DTYPES))}: convert the activations")
    if x.ndim != 2 or x.shape[1] % TILE or not x.is_contiguous():
        raise ValueError(f"x is {list(x.shape)} with strides {x.stride()}, wanted [M, a multiple of {TILE}], contiguous")
    if table.dtype != torch.uint8 or tuple(table.shape) != (TILE,) or table.device != x.device:
        raise ValueError(f"table is {table.dtype} {list(table.shape)} on {table.device}, wanted uint8 [{TILE}] on {x.device}")
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    groups = x.numel() // TILE
    if groups:
        _rotate[(triton.cdiv(groups, _GROUPS),)](x, table, out, groups, GROUPS=_GROUPS, num_warps=1)
    return out


@triton.jit
def _butterfly(v, GROUPS: tl.constexpr, DISTANCE: tl.constexpr):
    """(a, b) -> (a + b, a - b) over one distance. v: [GROUPS, 64]"""
    pairs = tl.reshape(v, [GROUPS, 32 // DISTANCE, 2, DISTANCE])
    a, b = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2]), [GROUPS, 64])


@triton.jit
def read_table(table_ptr):
    """Of every place of a rotated group: the input that goes there, whether it is negated first, and whether the result is."""
    j = tl.arange(0, 64)
    code = tl.load(table_ptr + j).to(tl.int32)
    # the permutation's inverse, found by comparing all with all once
    source = tl.sum(tl.where((code & 63)[None, :] == j[:, None], j[None, :], 0), 1)
    left = tl.load(table_ptr + source).to(tl.int32) >> 6 & 1
    return source, left == 1, code >> 7 == 1


@triton.jit
def turn(v, left, right, GROUPS: tl.constexpr):
    """The format's order of sums. v: [GROUPS, 64] float32, inputs at their places; left, right: [64] of `read_table`"""
    v = tl.where(left[None, :], -v, v)
    v = _butterfly(v, GROUPS, 1)
    v = _butterfly(v, GROUPS, 2)
    v = _butterfly(v, GROUPS, 4)
    v = _butterfly(v, GROUPS, 8)
    v = _butterfly(v, GROUPS, 16)
    v = _butterfly(v, GROUPS, 32)
    return tl.where(right[None, :], -v, v) * 0.125


@triton.jit(do_not_specialize=["groups"])
def _rotate(x_ptr, table_ptr, out_ptr, groups, GROUPS: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    source, left, right = read_table(table_ptr)
    inside = (g < groups)[:, None]
    v = tl.load(x_ptr + g[:, None] * 64 + source[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + g[:, None] * 64 + tl.arange(0, 64)[None, :], turn(v, left, right, GROUPS), mask=inside)

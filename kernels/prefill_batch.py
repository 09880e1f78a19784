"""Launches of `prefill_batch.cu`, which Hopper runs between the short kernel and the expansion: batches and short prompts."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_tilequant.kernels.capability import DTYPES
from vllm_tilequant.kernels.cuda_runtime import Module, current_stream, empty_rows
from vllm_tilequant.kernels.decode_weight import BLOCK_TILES, DecodeWeight, planes_map
from vllm_tilequant.kernels.prefill_cuda import (
    ALIGNMENT,
    BLOCK_BYTES,
    MOST_INPUTS,
    SHORT_TILES,
    TOKENS,
    WeightArgs,
    module,
    pointer,
    weight_args,
)
from vllm_tilequant.kernels.tuning import multiprocessors
from vllm_tilequant.schema import TILE

#: Tiles of outputs that a step may have; threads of a CTA.
_WIDTHS, _THREADS = (4, 2), 640
#: Room for a number and ranges of outputs that a CTA of the kernel for batches finishes.
_MOST_RANGES = 64
#: Share of multiprocessors from which on it is better to leave the others idle than to share ranges of outputs.
_WHOLE = 0.8
#: Steps of a CTA below which two tiles of outputs are better than four.
_FEW_STEPS = 16
#: Threads of CTAs that quantise the rows of a batch, of up to so many inputs and of more.
_BATCH_ROWS_THREADS, _SMALL_ROW = (128, 256), 6144


class BatchArgs(ctypes.Structure):
    """`struct Args` of prefill_batch.cu, whose alignment pads it."""

    _fields_ = [
        ("planes", ctypes.c_ubyte * 128),
        ("w", WeightArgs),
        *((name, ctypes.c_void_p) for name in (
            "ratio", "unit", "smoothing", "x", "scale", "transform", "table", "bias", "y", "sums", "arrivals",
        )),
        ("y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "rows_padded", "steps", "bias_type")),
        ("padding", ctypes.c_ubyte * 48),
    ]  # fmt: skip


class BatchRows(ctypes.Structure):
    """`struct Args` of prefill_batch_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "unsmoothing", "q", "scale")),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("k", "rows_padded", "ctas")),
    ]


def takes_batch(x: Tensor) -> bool:
    """Whether `batch` serves rows of this dtype and length. Rotated ones it never does."""
    return x.dtype in DTYPES[:2] and x.shape[1] <= MOST_INPUTS


def kernels(dtype: torch.dtype) -> list[tuple[str, Callable[..., Module], tuple[object, ...]]]:
    """As `prefill_cuda.kernels`; none where `takes_batch` says no."""
    if dtype not in DTYPES[:2]:
        return []
    wanted: list[tuple[str, Callable[..., Module], tuple[object, ...]]]
    wanted = [("batch", _batch_module, (dtype, tokens, width)) for tokens in TOKENS for width in _WIDTHS]
    return wanted + [("batch_rows", _batch_rows_module, (dtype, threads)) for threads in _BATCH_ROWS_THREADS]


def batch_tokens(rows: int) -> int:
    """Rows of the kernel for batches that up to 128 rows take."""
    return next(t for t in TOKENS if rows <= t)


def batch_width(n: int, k: int, most: int) -> int:
    """Tiles of outputs of a step. Two halve what CTAs exchange, but each reads twice the rows, and lines of 32 bytes: good for
    few steps, where nothing is whole (`_WHOLE`), and for an even number of input tiles. most: CTAs"""
    ranges, k_tiles = -(-n // (4 * TILE)), k // TILE
    return 2 if ranges < _WHOLE * most and ranges * k_tiles < _FEW_STEPS * most and k_tiles % 2 == 0 else 4


def batch_bytes(tokens: int, width: int) -> int:
    """Of shared memory of a CTA; mirrors the layout at the top of prefill_batch.cu."""
    rows, multipliers = tokens * SHORT_TILES // width, 2 if width * tokens == 512 else 1
    row_stages, buffers = 6 if tokens < 128 else 3 if width == 2 else 4, 4 if rows < 128 else 3
    rings = 6 * BLOCK_BYTES * SHORT_TILES // BLOCK_TILES + row_stages * (rows * 64 + 512)
    sent = 4 * multipliers * 64 * min(tokens, 64)
    kept = buffers * SHORT_TILES * 4096 + sent + 64 * (SHORT_TILES + 1) * 16 + (6 + row_stages + buffers) * 16
    return -(-rings // 1024) * 1024 + kept + 4 * _MOST_RANGES


_sums: dict[torch.device, tuple[Tensor, Tensor]] = {}


def batch_sums(device: torch.device, n: int) -> tuple[Tensor, Tensor]:
    """Where CTAs of the kernel for batches add up N outputs of up to 128 rows, and count each other: zeros between launches, of
    the process, shared by all layers. Made at load, so that a memory profile counts it. Not for two streams at once."""
    ranges = -(-n // (min(_WIDTHS) * TILE))
    held = _sums.get(device)
    if held is None or held[1].numel() < ranges:
        _sums.pop(device, None)
        held = None  # before the larger one is allocated
        sums = torch.zeros(ranges * min(_WIDTHS) * TILE * TOKENS[-1], dtype=torch.int32, device=device)
        held = _sums[device] = sums, torch.zeros(ranges, dtype=torch.int32, device=device)
    return held


def clear_sums(device: torch.device, n: int) -> None:
    """`batch_sums` as they have to be, whatever was in them: at load, and so when weights are reloaded after a sleep that kept
    nothing (vLLM's level 2), which also forgets what no layer owns."""
    for held in batch_sums(device, n):
        held.zero_()


def quantize_batch(x: Tensor, unsmoothing: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows as the kernel for batches reads them, by `activation_token_ref`: q [K/64 x rows padded, 64] int8, scale [M, 1]."""
    aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0
    x = x if aligned else x.clone(memory_format=torch.contiguous_format)
    m, k = x.shape
    padded = -(-m // TOKENS[-1]) * TOKENS[-1]
    q, scale = empty_rows(k // TILE * padded, TILE, torch.int8, x.device), empty_rows(m, 1, torch.float32, x.device)
    threads, ctas = _rows_cut(k)
    args = BatchRows(x.data_ptr(), pointer(unsmoothing), q.data_ptr(), scale.data_ptr(), x.stride(0), k, padded, ctas)
    _launch_rows(args, m, threads, x.device, x.dtype)
    return q, scale


def batch(
    q: Tensor, scale: Tensor, w: DecodeWeight, block: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, out: Tensor
) -> None:
    """y of rows by `quantize_batch`. block: `ratio`, `unit`, `of_input` of `PrefillWeight`; out: [M, N], aligned to pairs"""
    weight, (width, steps, grid) = weight_args(w), _cut(w)
    sums, arrivals = batch_sums(w.device, w.out_features)
    planes = (ctypes.c_ubyte * 128).from_buffer_copy(planes_map(w, width))
    for first in range(0, out.shape[0], TOKENS[-1]):
        y = out[first : first + TOKENS[-1]]
        args = BatchArgs(
            planes, weight, *(t.data_ptr() for t in block), q.data_ptr() + first * TILE, scale.data_ptr() + first * 4,
            w.transform.data_ptr(), w.table.data_ptr(), pointer(bias), y.data_ptr(), sums.data_ptr(), arrivals.data_ptr(),
            y.stride(0), y.shape[0], q.shape[0] // weight.k_tiles, steps, 0 if bias is None else DTYPES.index(bias.dtype),
        )  # fmt: skip
        _launch(args, grid, width, w.device, out.dtype)


class Batch:
    """`quantize_batch` and `batch` of up to 128 rows for one weight where it lies: all but rows, outputs and what launches
    share is looked up once. Holds no tensor."""

    def __init__(
        self, dtype: torch.dtype, unsmoothing: Tensor | None, w: DecodeWeight, block: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self.device, self.dtype, self.n, self.k = w.device, dtype, w.out_features, w.in_features
        self.width, steps, self.grid = _cut(w)
        self.threads, ctas = _rows_cut(self.k)
        planes = (ctypes.c_ubyte * 128).from_buffer_copy(planes_map(w, self.width))
        self.args = BatchArgs(
            planes, weight_args(w), *(t.data_ptr() for t in block), transform=w.transform.data_ptr(), table=w.table.data_ptr(),
            y_stride=self.n, rows_padded=TOKENS[-1], steps=steps,
        )  # fmt: skip
        self.rows = BatchRows(unsmoothing=pointer(unsmoothing), stride=self.k, k=self.k, rows_padded=TOKENS[-1], ctas=ctas)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [M, K] contiguous, on a border of `ALIGNMENT`"""
        m = x.shape[0]
        q = empty_rows(self.k // TILE * TOKENS[-1], TILE, torch.int8, self.device)
        scale, y = empty_rows(m, 1, torch.float32, self.device), empty_rows(m, self.n, self.dtype, self.device)
        sums, arrivals = batch_sums(self.device, self.n)
        rows, args = BatchRows.from_buffer_copy(self.rows), BatchArgs.from_buffer_copy(self.args)  # of this thread
        rows.x, rows.q, rows.scale = x.data_ptr(), q.data_ptr(), scale.data_ptr()
        args.x, args.scale, args.y, args.rows = q.data_ptr(), scale.data_ptr(), y.data_ptr(), m
        args.sums, args.arrivals = sums.data_ptr(), arrivals.data_ptr()
        if bias is not None:
            args.bias, args.bias_type = bias.data_ptr(), DTYPES.index(bias.dtype)
        _launch_rows(rows, m, self.threads, self.device, self.dtype)
        _launch(args, self.grid, self.width, self.device, self.dtype)
        return y


def _cut(w: DecodeWeight) -> tuple[int, int, int]:
    """Tiles of outputs of a step, steps, CTAs."""
    most = multiprocessors(w.device).count
    width = batch_width(w.out_features, w.in_features, most)
    ranges = -(-w.out_features // TILE // width)
    steps = ranges * (w.in_features // TILE) * width // SHORT_TILES
    # A range of outputs to a CTA, if that keeps enough of them busy: nothing is exchanged then. More than run at once only
    # where there would be no room for the ranges that one finishes: those that it has whole, and parts of two.
    ctas = ranges if _WHOLE * most <= ranges <= most else min(most, steps)
    return width, steps, max(ctas, -(-ranges // (_MOST_RANGES - 3)))


def _launch_rows(args: BatchRows, m: int, threads: int, device: torch.device, dtype: torch.dtype) -> None:
    _batch_rows_module(device, dtype, threads).kernel("batch_rows").launch(
        args,
        grid=m * args.ctas,
        threads=threads,
        cluster=args.ctas,
        shared_bytes=0,
        stream=current_stream(device),
        overlap=True,
    )


def _launch(args: BatchArgs, grid: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    tokens = batch_tokens(args.rows)
    _batch_module(device, dtype, tokens, width).kernel("batch").launch(
        args, grid=grid, threads=_THREADS, cluster=1, shared_bytes=batch_bytes(tokens, width), stream=current_stream(device),
        overlap=True,
    )  # fmt: skip


def _rows_cut(k: int) -> tuple[int, int]:
    """Threads of a CTA that quantises rows of K inputs, and how many share a row."""
    threads = _BATCH_ROWS_THREADS[k > _SMALL_ROW]
    return threads, -(-k // (threads * threads // 8))


@functools.cache
def _batch_module(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Module:
    found = module("prefill_batch.cu", device, [f"XTYPE={DTYPES.index(dtype)}", f"TOKENS={tokens}", f"WIDTH={width}"])
    found.kernel("batch").prefer_shared()
    return found


@functools.cache
def _batch_rows_module(device: torch.device, dtype: torch.dtype, threads: int) -> Module:
    return module("prefill_batch_rows.cu", device, [f"XTYPE={DTYPES.index(dtype)}", f"THREADS={threads}"])

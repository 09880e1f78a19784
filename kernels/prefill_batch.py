"""Launches of `prefill_batch.cu`, which Hopper runs between the short kernel and the expansion: batches and short prompts."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_tilequant.kernels.capability import DTYPES
from vllm_tilequant.kernels.cuda_runtime import Module, current_stream, empty_rows, zeros_kept
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

#: Tiles of outputs that a step may have; with whether steps are cut wherever a range of outputs ends; threads of a CTA.
_WIDTHS, _KINDS, _THREADS = (4, 2), ((4, False), (2, False), (4, True)), 640
#: Rows of a block beyond `TOKENS`, of which a launch may have several, and tiles of outputs of its steps.
_MANY, _MANY_WIDTH = 256, 2
#: Room for a number and ranges of outputs that a CTA of the kernel for batches finishes.
_MOST_RANGES = 64
#: Most CTAs that share a range of outputs: a cluster.
_MOST_PARTS = 8
#: In steps of `_MANY` rows: start and end of a CTA, and what sharing sums in a cluster costs besides.
_MANY_END, _MANY_SHARED_END = 7, 3
#: In steps: what sharing sums through memory costs, and in clusters for every tile of outputs of a step (up to so many rows: no
#: more for a wide one than for a narrow one); steps of each width.
_STREAM_END, _SHARED_END, _FEW_SUMS, _WIDTH_COSTS = 20, 2, 32, {4: 1.0, 2: 1.04}
#: The same, for each number of rows: what clusters of up to two CTAs cost besides that share a range through memory.
_GROUPS_END = {16: 4, 32: 4, 64: 5, 128: 4}
#: CTAs that quantise the rows of a batch. Up to so many long rows: their threads; eights of inputs that one has, `MOST_INPUTS`
#: in a cluster at most; how many of these CTAs there are: as many as wait on a GPU beside the kernel for batches.
_FEW_ROWS, _ROWS_THREADS, _ROWS_PIECES, _ROWS_CTAS = 64, 128, (1, 2), 128
#: Beyond, and for all rows that the smallest of these takes: threads of a CTA that has a whole row, and eights of inputs.
_ROW_THREADS, _ROW_PIECES = (128, 256, 512), 4


class Cut(NamedTuple):
    """width: tiles of outputs of a step; steps; grid: CTAs; parts: of them that share a range, a cluster, 0 where steps are cut
    anywhere; blocks: of `_MANY` rows, 0 where a launch takes up to 128 rows; whole: of their clusters the first, whose CTAs
    have a range each; groups: clusters that share a range"""

    width: int
    steps: int
    grid: int
    parts: int
    blocks: int = 0
    whole: int = 0
    groups: int = 1


#: What `PrefillWeight.of_batches` is called in `struct Args`.
_BLOCK = ("ratio", "stretch", "unit", "smoothing")


class BatchArgs(ctypes.Structure):
    """`struct Args` of prefill_batch.cu, whose alignment pads it."""

    _fields_ = [
        ("planes", ctypes.c_ubyte * 128),
        ("w", WeightArgs),
        *((name, ctypes.c_void_p) for name in (
            *_BLOCK, "x", "scale", "transform", "table", "bias", "y", "sums", "arrivals",
        )),
        ("y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "rows_padded", "steps", "bias_type", "parts", "blocks", "whole", "groups")),
        ("padding", ctypes.c_ubyte * 24),
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
    wanted = [("batch", _batch_module, (dtype, tokens, *kind)) for tokens in TOKENS for kind in _KINDS]
    wanted += [("batch", _batch_module, (dtype, _MANY, _MANY_WIDTH, False))]
    rows = [(_ROWS_THREADS, pieces) for pieces in _ROWS_PIECES] + [(threads, _ROW_PIECES) for threads in _ROW_THREADS]
    return wanted + [("batch_rows", _batch_rows_module, (dtype, *of)) for of in rows]


def batch_tokens(rows: int) -> int:
    """Rows of the kernel for batches that up to 128 rows take."""
    return next(t for t in TOKENS if rows <= t)


def batch_bytes(tokens: int, width: int, stream: bool) -> int:
    """Of shared memory of a CTA; mirrors the layout at the top of prefill_batch.cu."""
    rows, multipliers = tokens * SHORT_TILES // width, 2 if width * tokens == 512 else 1
    stages, row_stages = 6, 6 if tokens < 128 else 4
    buffers = 4 if tokens == 64 and (width == 2 or stream) else 6
    if tokens == TOKENS[-1]:
        buffers = 3 if width == 2 or stream else 5
    if tokens == _MANY:
        stages, row_stages, buffers = 4, 3, 3
    rings = stages * BLOCK_BYTES * SHORT_TILES // BLOCK_TILES + row_stages * rows * 64
    sent = 4 * multipliers * 64 * min(tokens, 64) if stream else 0
    kept = stages * SHORT_TILES // width * 128 + 64 * (SHORT_TILES + 1) * 16 + width * 592
    barriers = (stages + row_stages + buffers + 1) * 16
    return -(-rings // 1024) * 1024 + buffers * SHORT_TILES * 4096 + sent + kept + barriers + 4 * _MOST_RANGES + 4 * tokens


_sums: dict[torch.device, Tensor] = {}
_arrivals: dict[torch.device, Tensor] = {}


def batch_sums(device: torch.device, n: int) -> tuple[Tensor, Tensor]:
    """Where CTAs of the kernel for batches add up N outputs of up to 128 rows, and count each other: zeros between launches, of
    the process, shared by all layers. Not for two streams at once."""
    ranges = -(-n // (4 * TILE))
    return zeros_kept(_sums, device, ranges * 4 * TILE * TOKENS[-1]), zeros_kept(_arrivals, device, ranges)


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
    padded = _padded(m)
    q, scale = empty_rows(k // TILE * padded, TILE, torch.int8, x.device), empty_rows(m, 1, torch.float32, x.device)
    args = BatchRows(x.data_ptr(), pointer(unsmoothing), q.data_ptr(), scale.data_ptr(), x.stride(0), k, padded)
    _launch_rows(args, m, x.device, x.dtype)
    return q, scale


def batch(q: Tensor, scale: Tensor, w: DecodeWeight, block: tuple[Tensor, ...], bias: Tensor | None, out: Tensor) -> None:
    """y of rows by `quantize_batch`. block: `PrefillWeight.of_batches`; out: [M, N], aligned to pairs"""
    weight, cut = weight_args(w), _cut(w, out.dtype, out.shape[0])
    sums, arrivals = batch_sums(w.device, w.out_features)
    planes = (ctypes.c_ubyte * 128).from_buffer_copy(planes_map(w, cut.width))
    args = BatchArgs(
        planes, weight, *(t.data_ptr() for t in block), q.data_ptr(), scale.data_ptr(), w.transform.data_ptr(),
        w.table.data_ptr(), pointer(bias), out.data_ptr(), sums.data_ptr(), arrivals.data_ptr(), out.stride(0), 0,
        q.shape[0] // weight.k_tiles, cut.steps, 0 if bias is None else DTYPES.index(bias.dtype),
    )  # fmt: skip
    _launch(args, out.shape[0], cut, w.device, out.dtype)


class Batch:
    """`quantize_batch` and `batch` for one weight where it lies: all but rows, outputs and what launches share is looked up
    once. Holds no tensor."""

    def __init__(self, dtype: torch.dtype, unsmoothing: Tensor | None, w: DecodeWeight, block: tuple[Tensor, ...]) -> None:
        self.device, self.dtype, self.n, self.k = w.device, dtype, w.out_features, w.in_features
        self.cuts = {tokens: _cut(w, dtype, tokens) for tokens in (*TOKENS, _MANY)}
        widths = {c.width for c in self.cuts.values()}
        self.planes = {width: (ctypes.c_ubyte * 128).from_buffer_copy(planes_map(w, width)) for width in widths}
        self.args = BatchArgs(
            w=weight_args(w), **{name: t.data_ptr() for name, t in zip(_BLOCK, block, strict=True)},
            transform=w.transform.data_ptr(), table=w.table.data_ptr(), y_stride=self.n,
        )  # fmt: skip
        self.tiles = w.out_features // TILE, w.in_features // TILE
        self.rows = BatchRows(unsmoothing=pointer(unsmoothing), stride=self.k, k=self.k)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [M, K] contiguous, on a border of `ALIGNMENT`"""
        m = x.shape[0]
        padded = _padded(m)
        cut = self.cuts[batch_tokens(m)] if m <= TOKENS[-1] else _cut_of(self.device, self.dtype, *self.tiles, m)
        q = empty_rows(self.k // TILE * padded, TILE, torch.int8, self.device)
        scale, y = empty_rows(m, 1, torch.float32, self.device), empty_rows(m, self.n, self.dtype, self.device)
        sums, arrivals = batch_sums(self.device, self.n)
        rows, args = BatchRows.from_buffer_copy(self.rows), BatchArgs.from_buffer_copy(self.args)  # of this thread
        rows.x, rows.q, rows.scale, rows.rows_padded = x.data_ptr(), q.data_ptr(), scale.data_ptr(), padded
        args.x, args.scale, args.y, args.rows_padded = q.data_ptr(), scale.data_ptr(), y.data_ptr(), padded
        args.sums, args.arrivals = sums.data_ptr(), arrivals.data_ptr()
        args.planes, args.steps = self.planes[cut.width], cut.steps
        if bias is not None:
            args.bias, args.bias_type = bias.data_ptr(), DTYPES.index(bias.dtype)
        _launch_rows(rows, m, self.device, self.dtype)
        _launch(args, m, cut, self.device, self.dtype)
        return y


def _padded(m: int) -> int:
    """Rows that their quantiser lays out for m: whole blocks."""
    block = TOKENS[-1] if m <= TOKENS[-1] else _MANY
    return -(-m // block) * block


def _cut(w: DecodeWeight, dtype: torch.dtype, rows: int) -> Cut:
    return _cut_of(w.device, dtype, w.out_features // TILE, w.in_features // TILE, rows)


def _cut_of(device: torch.device, dtype: torch.dtype, n_tiles: int, k_tiles: int, rows: int) -> Cut:
    most = multiprocessors(device).count
    if rows > TOKENS[-1] and k_tiles * _MANY_WIDTH % SHORT_TILES == 0:
        return _many(device, dtype, n_tiles, k_tiles, most, -(-rows // _MANY))
    width, parts, groups = _shared(device, dtype, n_tiles, k_tiles, most, batch_tokens(min(rows, TOKENS[-1])))
    ranges = -(-n_tiles // width)
    steps = ranges * k_tiles * width // SHORT_TILES
    if parts:
        return Cut(width, steps, ranges * parts * groups, parts, groups=groups)
    # More than run at once only where there would be no room for the ranges that one finishes: those that it has whole, and
    # parts of two.
    return Cut(width, steps, max(min(most, steps), -(-ranges // (_MOST_RANGES - 3))), 0)


@functools.cache
def _shared(
    device: torch.device, dtype: torch.dtype, n_tiles: int, k_tiles: int, most: int, tokens: int
) -> tuple[int, int, int]:
    """Tiles of outputs of a step, CTAs of a cluster, 0 where steps are cut anywhere, and clusters that share a range: what is
    fastest by a rule of thumb that counts steps of a CTA. Clusters that do not all run at once cost as much again, and those
    that share a range would wait for each other."""
    found = [(n_tiles / 4 * k_tiles / most + _STREAM_END, 4, 0, 1)]
    for width in _WIDTHS:
        ranges, steps = -(-n_tiles // width), k_tiles * width // SHORT_TILES
        if k_tiles * width % SHORT_TILES:
            continue
        end = _SHARED_END * (2 if tokens <= _FEW_SUMS else width)
        for parts in range(1, min(_MOST_PARTS, steps, most // ranges) + 1):
            cost, pair = -(-steps // parts) * _WIDTH_COSTS[width], 2 - parts % 2
            if clusters_at_once(device, dtype, TOKENS[-1], width, parts) >= ranges:
                found.append((cost + (end if parts > 1 else 0), width, parts, 1))
            groups = parts // pair
            has_room = groups > 1 and (groups - 1) * tokens <= TOKENS[-1]  # in `batch_sums`
            if has_room and clusters_at_once(device, dtype, TOKENS[-1], width, pair) >= ranges * groups:
                found.append((cost + end + _GROUPS_END[tokens], width, pair, groups))
    return min(found)[1:]


@functools.cache
def _many(device: torch.device, dtype: torch.dtype, n_tiles: int, k_tiles: int, most: int, blocks: int) -> Cut:
    """The cut of so many blocks of `_MANY` rows, by the same rule for clusters that follow each other. Where they do so several
    times, the last alone share ranges, so that all multiprocessors are through at about the same time."""
    ranges, steps = -(-n_tiles // _MANY_WIDTH), k_tiles * _MANY_WIDTH // SHORT_TILES
    found = []
    for parts in range(1, min(_MOST_PARTS, steps) + 1):
        at_once = clusters_at_once(device, dtype, _MANY, _MANY_WIDTH, parts)
        end = _MANY_END + (_MANY_SHARED_END if parts > 1 else 0)
        for turns in range(ranges * blocks // (at_once * parts) + 1 if at_once else 0):  # of clusters that share nothing
            whole = 0 if parts == 1 else turns * at_once // blocks * blocks
            left = ranges * blocks - whole * parts
            cost = turns * (steps + _MANY_END) * (whole > 0) + -(-left // at_once) * (-(-steps // parts) + end)
            found.append((cost, parts, whole))
    _, parts, whole = min(found)
    return Cut(_MANY_WIDTH, ranges * steps, parts * (whole + ranges * blocks - whole * parts), parts, blocks, whole)


def clusters_at_once(device: torch.device, dtype: torch.dtype, tokens: int, width: int, parts: int) -> int:
    """Of so many CTAs, each of which fills a multiprocessor."""
    kernel = _batch_module(device, dtype, tokens, width, False).kernel("batch")
    return kernel.clusters_at_once(threads=_THREADS, cluster=parts, shared_bytes=batch_bytes(tokens, width, False))


def _launch_rows(args: BatchRows, m: int, device: torch.device, dtype: torch.dtype) -> None:
    threads, pieces, args.ctas = _rows_cut(m, args.k)
    _batch_rows_module(device, dtype, threads, pieces).kernel("batch_rows").launch(
        args,
        grid=m * args.ctas,
        threads=threads,
        cluster=args.ctas,
        shared_bytes=0,
        stream=current_stream(device),
        overlap=True,
    )


def _launch(args: BatchArgs, rows: int, cut: Cut, device: torch.device, dtype: torch.dtype) -> None:
    """Of all rows; moves `args` on where there are more than one launch takes."""
    args.parts, args.blocks, args.whole, args.groups = max(1, cut.parts), max(1, cut.blocks), cut.whole, cut.groups
    while rows > 0:
        args.rows = rows if cut.blocks else min(rows, TOKENS[-1])
        tokens, stream = _MANY if cut.blocks else batch_tokens(args.rows), cut.parts == 0
        _batch_module(device, dtype, tokens, cut.width, stream).kernel("batch").launch(
            args, grid=cut.grid, threads=_THREADS, cluster=args.parts, shared_bytes=batch_bytes(tokens, cut.width, stream),
            stream=current_stream(device), overlap=True,
        )  # fmt: skip
        rows -= args.rows
        args.x += TOKENS[-1] * TILE
        args.scale += TOKENS[-1] * 4
        args.y += TOKENS[-1] * args.y_stride * 2


def _rows_cut(m: int, k: int) -> tuple[int, int, int]:
    """Threads of a CTA that quantises rows, eights of inputs that one has, and how many CTAs share a row: of few long rows as
    many as there shall be, and those that leave a thread no more than it has registers for."""
    if m > _FEW_ROWS or k <= 8 * _ROW_PIECES * _ROW_THREADS[0]:
        return next(t for t in _ROW_THREADS if 8 * _ROW_PIECES * t >= k), _ROW_PIECES, 1
    eights, ctas = -(-k // (8 * _ROWS_THREADS)), 1
    while ctas < min(8, eights) and (2 * ctas * m <= _ROWS_CTAS or eights > 2 * ctas):
        ctas *= 2
    wanted = -(-eights // ctas)
    return _ROWS_THREADS, next(p for p in _ROWS_PIECES if p >= wanted), ctas


@functools.cache
def _batch_module(device: torch.device, dtype: torch.dtype, tokens: int, width: int, stream: bool) -> Module:
    defines = [f"XTYPE={DTYPES.index(dtype)}", f"TOKENS={tokens}", f"WIDTH={width}", f"STREAM={int(stream)}"]
    found = module("prefill_batch.cu", device, defines)
    found.kernel("batch").prefer_shared()
    return found


@functools.cache
def _batch_rows_module(device: torch.device, dtype: torch.dtype, threads: int, pieces: int) -> Module:
    defines = [f"XTYPE={DTYPES.index(dtype)}", f"THREADS={threads}", f"PIECES={pieces}"]
    return module("prefill_batch_rows.cu", device, defines)

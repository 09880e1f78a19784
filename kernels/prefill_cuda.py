"""Launches of `prefill_expand.cu` and `prefill_short.cu`, which Hopper runs instead of their Triton forms."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from vllm_tilequant.kernels.capability import DTYPES
from vllm_tilequant.kernels.cuda_runtime import Module, compile_cubin, nvrtc, tensor_map
from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.tuning import PrefillConfig, multiprocessors
from vllm_tilequant.schema import TILE

#: Rows of one CTA of the short kernel, each a compilation of its own.
TOKENS = (16, 32, 64, 128)
#: Threads of a CTA; tiles of 64 outputs of a block of the decode form, its bytes at one input tile.
THREADS, BLOCK_TILES, _BLOCK_BYTES = 256, 8, 4 * 8192
#: Tiles of a CTA of the short kernel.
SHORT_TILES = 4
#: Most memory for sums that CTAs of the short kernel hand each other in one launch.
PARTS_BYTES = 2**26
_FOLDER = Path(__file__).parent
_HEADERS = tuple(_FOLDER / name for name in ("prefill_ptx.cu", "prefill_planes.cu"))


class _Weight(ctypes.Structure):
    """`struct Weight` of prefill_planes.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "meta", "factor")),
        *((name, ctypes.c_int) for name in ("n_tiles", "k_tiles")),
    ]


class ExpandArgs(ctypes.Structure):
    """`struct Args` of prefill_expand.cu."""

    _fields_ = [
        ("w", _Weight),
        *((name, ctypes.c_void_p) for name in ("rotation", "rotation_index", "smoothing", "inverse", "out")),
        ("steps_per_cta", ctypes.c_int),
    ]


class ShortArgs(ctypes.Structure):
    """`struct Args` of prefill_short.cu, whose alignment pads it."""

    _fields_ = [
        ("planes", ctypes.c_ubyte * 128),
        ("w", _Weight),
        *((name, ctypes.c_void_p) for name in ("x", "scale", "transform", "table", "bias", "y", "parts")),
        ("y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "rows_padded", "splits", "bias_type")),
        ("padding", ctypes.c_ubyte * 64),
    ]


def unsupported_reason(capability: tuple[int, int] | None) -> str | None:
    """Why these kernels cannot run on a GPU; None where they can. They are compiled for compute capability 9.0."""
    if capability != (9, 0):
        return f"compute capability {capability}, wanted 9.0; the Triton path serves"
    return None if nvrtc() else f"no NVRTC library for CUDA {torch.version.cuda}; the Triton path serves"


def tokens_for(rows: int) -> int:
    """Rows of a CTA. Beyond what fits one, blocks of 64 are faster than of 128: two CTAs to a multiprocessor."""
    return next((t for t in TOKENS if rows <= t), 64)


def short_threads(tokens: int) -> int:
    """Of a CTA of the short kernel: with few rows a ninth warp reads."""
    return 288 if tokens < 64 else 256


def shared_bytes(tokens: int) -> int:
    """Of the short kernel; mirrors the layout at the top of prefill_short.cu."""
    stages = 6 if tokens == 128 else 4
    stage = -(-(_BLOCK_BYTES * SHORT_TILES // BLOCK_TILES + tokens * 68) // 512) * 512
    return max(stages * stage, tokens * SHORT_TILES * 256) + 64 * SHORT_TILES * 16 + stages * 16 + SHORT_TILES * (64 * 5 + 4)


def compile_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Compile and load now what a call would at its first time: a captured graph must not meet the compiler."""
    _expand_module(device).kernel("expand")
    for tokens in TOKENS:
        _short_module(device, dtype, tokens).kernel("short_rows")


def expand_args(
    w: DecodeWeight, rotation: Tensor, index: Tensor, inverse: Tensor, smoothing: Tensor | None, out: Tensor, ctas: int
) -> tuple[ExpandArgs, int]:
    """Arguments and grid. As `prefill_triton.expand`; ctas: that can run at once, among which the work is divided evenly."""
    weight = _weight(w)
    steps = -(-weight.n_tiles // BLOCK_TILES) * weight.k_tiles
    per_cta = -(-steps // ctas)
    args = ExpandArgs(
        weight, rotation.data_ptr(), index.data_ptr(), None if smoothing is None else smoothing.data_ptr(),
        inverse.data_ptr(), out.data_ptr(), per_cta,
    )  # fmt: skip
    return args, -(-steps // per_cta)


def expand(w: DecodeWeight, rotation: Tensor, index: Tensor, inverse: Tensor, smoothing: Tensor | None, out: Tensor) -> None:
    args, grid = expand_args(w, rotation, index, inverse, smoothing, out, 2 * multiprocessors(w.device).count)
    _expand_module(w.device).kernel("expand").launch(
        args, grid=grid, threads=THREADS, cluster=1, shared_bytes=3 * (_BLOCK_BYTES + 32 + 256) + 8 * args.steps_per_cta,
        stream=_stream(w.device), overlap=True,
    )  # fmt: skip


def short_args(
    q: Tensor, scale: Tensor, w: DecodeWeight, bias: Tensor | None, out: Tensor, splits: int, planes: bytes
) -> tuple[ShortArgs, int, int, Tensor]:
    """Arguments, grid, rows of a CTA, and the memory for sums that CTAs of a cluster hand over. As `prefill_triton.short`.

    planes: `planes_map(w)`
    """
    weight, rows = _weight(w), out.shape[0]
    tokens = tokens_for(rows)
    grid = splits * -(-rows // tokens) * -(-weight.n_tiles // SHORT_TILES)
    parts = torch.empty(grid * tokens * SHORT_TILES * TILE if splits > 1 else 0, dtype=torch.float32, device=q.device)
    args = ShortArgs(
        (ctypes.c_ubyte * 128).from_buffer_copy(planes), weight, q.data_ptr(), scale.data_ptr(), w.transform.data_ptr(),
        w.table.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), parts.data_ptr(), out.stride(0), rows,
        scale.stride(0), splits, 0 if bias is None else DTYPES.index(bias.dtype),
    )  # fmt: skip
    return args, grid, tokens, parts


def planes_map(w: DecodeWeight) -> bytes:
    """Tensor map of planes 0 and 1, in boxes of both planes of the tiles of a CTA at one input tile."""
    weight = _weight(w)
    rows = -(-weight.n_tiles // BLOCK_TILES) * weight.k_tiles * 2 * TILE
    return tensor_map(w.codes.data_ptr(), rows, BLOCK_TILES * 16, 2 * TILE, SHORT_TILES * 16)


def short(q: Tensor, scale: Tensor, w: DecodeWeight, bias: Tensor | None, out: Tensor, config: PrefillConfig) -> None:
    # Many rows take several launches, so that what is handed over stays below `PARTS_BYTES`.
    rows, n = out.shape
    most = TOKENS[-1] * max(1, PARTS_BYTES // (config.splits * n * TOKENS[-1] * 4)) if config.splits > 1 else rows
    planes = planes_map(w)
    for first in range(0, rows, most):
        args, grid, tokens, _ = short_args(
            q[:, first:], scale[:, first:], w, bias, out[first : first + most], config.splits, planes
        )
        _short_module(w.device, out.dtype, tokens).kernel("short_rows").launch(
            args, grid=grid, threads=short_threads(tokens), cluster=config.splits, shared_bytes=shared_bytes(tokens),
            stream=_stream(w.device), overlap=True,
        )  # fmt: skip


def _weight(w: DecodeWeight) -> _Weight:
    return _Weight(w.codes.data_ptr(), w.meta.data_ptr(), w.factor.data_ptr(), w.out_features // TILE, w.in_features // TILE)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@functools.cache
def _expand_module(device: torch.device) -> Module:
    return _module("prefill_expand.cu", device, [])


@functools.cache
def _short_module(device: torch.device, dtype: torch.dtype, tokens: int) -> Module:
    module = _module("prefill_short.cu", device, [f"XTYPE={DTYPES.index(dtype)}", f"TOKENS={tokens}"])
    module.kernel("short_rows").prefer_shared()
    return module


def _module(source: str, device: torch.device, defines: list[str]) -> Module:
    return Module(compile_cubin(_FOLDER / source, headers=_HEADERS, architecture="sm_90a", defines=defines), device)

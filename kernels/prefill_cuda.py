"""Launches of `prefill_expand.cu` and `prefill_short.cu`, which Hopper runs instead of their Triton forms."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vllm_tilequant.kernels.capability import DTYPES
from vllm_tilequant.kernels.cuda_runtime import Module, compile_cubin, current_stream, empty_rows, nvrtc, zeros_kept
from vllm_tilequant.kernels.decode_weight import BLOCK_TILES, DecodeWeight, planes_map
from vllm_tilequant.kernels.tuning import PrefillConfig, multiprocessors
from vllm_tilequant.schema import TILE

#: Rows of one CTA of the short kernel, each a compilation of its own.
TOKENS = (16, 32, 64, 128)
#: Threads of a CTA; bytes of a block of the decode form at one input tile.
THREADS, BLOCK_BYTES = 256, 4 * 8192
#: Tiles of a CTA of the short kernel, and of a step of the one for batches.
SHORT_TILES = 4
#: Most memory for sums that CTAs of the short kernel hand each other in one launch.
PARTS_BYTES = 2**26
#: Of the expansion: CTAs that a multiprocessor holds, bytes of shared memory of one, further ones for every step, most steps.
_EXPAND_RESIDENT, _EXPAND_BYTES = 2, 2 * (BLOCK_BYTES + 256) + BLOCK_TILES * (4096 + 512) + 2 * 8 * 8 * 4 + 16
_STEP_BYTES, MOST_STEPS = 16 + BLOCK_TILES * 16, 64
#: How rows and steps meet in the expansion's launch (`FORM` of prefill_expand.cu), each a compilation of its own: of the first,
#: the longest row, and most steps of a CTA; of the others, inputs that a CTA looks at at once, in whole rows, and how often at
#: least each does where rows go to whoever asks first.
FEW, SOME, MANY = FORMS = tuple(range(3))
_FEW_INPUTS, _FEW_STEPS, _LOOK_INPUTS, _MANY_LOOKS = 4096, 4, 16384, 7
#: Inputs of rows that a CTA quantises in less than the time of a step.
_INPUTS_OF_STEP = 32768
#: Which compilation expands without rows, any of them being right.
_NO_ROWS = torch.bfloat16
#: Inputs of a row that the expansion's launch can quantise, and to how many bytes its rows must be aligned.
MOST_INPUTS, ALIGNMENT = 16384, 16
_FOLDER = Path(__file__).parent
_HEADERS = (
    _FOLDER / "ptx.cu",
    *(_FOLDER / f"prefill_{part}.cu" for part in ("ptx", "planes", "rows", "batch_ptx", "batch_codes", "batch_finish")),
)


class WeightArgs(ctypes.Structure):
    """`struct Weight` of prefill_planes.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "meta", "factor")),
        *((name, ctypes.c_int) for name in ("n_tiles", "k_tiles")),
    ]


class _Rows(ctypes.Structure):
    """`struct Rows` of prefill_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "unsmoothing", "q", "scale")),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("count", "first_cta", "per_cta")),
        ("asked", ctypes.c_void_p),
    ]


class ExpandArgs(ctypes.Structure):
    """`struct Args` of prefill_expand.cu."""

    _fields_ = [
        ("w", WeightArgs),
        *((name, ctypes.c_void_p) for name in ("rotation", "rotation_index", "smoothing", "inverse", "out")),
        *((name, ctypes.c_int) for name in ("ctas", "most_steps")),
        ("rows", _Rows),
    ]


class ShortArgs(ctypes.Structure):
    """`struct Args` of prefill_short.cu, whose alignment pads it."""

    _fields_ = [
        ("planes", ctypes.c_ubyte * 128),
        ("w", WeightArgs),
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
    stage = -(-(BLOCK_BYTES * SHORT_TILES // BLOCK_TILES + tokens * 68) // 512) * 512
    return max(stages * stage, tokens * SHORT_TILES * 256) + 64 * SHORT_TILES * 16 + stages * 16 + SHORT_TILES * (64 * 5 + 4)


def kernels(dtype: torch.dtype) -> list[tuple[str, Callable[..., Module], tuple[object, ...]]]:
    """Names, modules and their arguments of what calls over rows of a dtype launch."""
    wanted: list[tuple[str, Callable[..., Module], tuple[object, ...]]] = [
        ("expand", _expand_module, of) for of in {(_NO_ROWS, SOME), *((dtype, form) for form in FORMS if dtype in DTYPES[:2])}
    ]
    wanted += [("short_rows", _short_module, (dtype, tokens)) for tokens in TOKENS]
    return wanted


def takes_rows(x: Tensor) -> bool:
    """Whether `quantize_and_expand` serves these rows. Rotated ones it never does."""
    aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0
    return x.dtype in DTYPES[:2] and x.shape[1] <= MOST_INPUTS and aligned


def expand(w: DecodeWeight, rotation: Tensor, index: Tensor, inverse: Tensor, smoothing: Tensor | None, out: Tensor) -> None:
    args, grid = expand_args(w, rotation, index, inverse, smoothing, out, _ctas(w.device))
    _launch_expand(args, grid, w.device, _NO_ROWS, SOME)


def quantize_and_expand(
    x: Tensor, unsmoothing: Tensor | None, w: DecodeWeight, rotation: Tensor, index: Tensor, inverse: Tensor,
    smoothing: Tensor | None, out: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`prefill_triton.quantize_rows` and `expand` in one launch, for rows that `takes_rows` names."""
    return Expansion(x.dtype, unsmoothing, w, rotation, index, inverse, smoothing)(x, out)


class Expansion:
    """`quantize_and_expand` for one weight, where it lies: everything but rows and `out` is looked up once."""

    def __init__(
        self, dtype: torch.dtype, unsmoothing: Tensor | None, w: DecodeWeight, rotation: Tensor, index: Tensor,
        inverse: Tensor, smoothing: Tensor | None,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.n_tiles, self.resident = w.device, dtype, w.out_features // TILE, _ctas(w.device)
        self.args, self.ctas = expand_args(w, rotation, index, inverse, smoothing, None, self.resident)
        self.args.rows.unsmoothing, self.args.rows.asked = pointer(unsmoothing), rows_asked(w.device).data_ptr()
        self.most_steps = self.args.most_steps

    def __call__(self, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        m, k = x.shape
        q, scale = empty_rows(m, k, torch.int8, self.device), empty_rows(m, 1, torch.float32, self.device)
        args = ExpandArgs.from_buffer_copy(self.args)  # another thread may be here too
        args.out = out.data_ptr()
        rows = args.rows
        form, grid, rows.first_cta, rows.per_cta = _rows_cut(m, k, self.n_tiles, self.most_steps, self.ctas, self.resident)
        rows.x, rows.q, rows.scale = x.data_ptr(), q.data_ptr(), scale.data_ptr()
        rows.stride, rows.count = x.stride(0), m
        _launch_expand(args, grid, self.device, self.dtype, form)
        return q, scale


def expand_args(
    w: DecodeWeight, rotation: Tensor, index: Tensor, inverse: Tensor, smoothing: Tensor | None, out: Tensor | None, ctas: int
) -> tuple[ExpandArgs, int]:
    """Arguments and grid. As `prefill_triton.expand`; ctas: that run at once."""
    weight = weight_args(w)
    steps = -(-weight.n_tiles // BLOCK_TILES) * weight.k_tiles
    grid = min(steps, ctas * -(-steps // (ctas * MOST_STEPS)))
    args = ExpandArgs(
        weight, rotation.data_ptr(), index.data_ptr(), pointer(smoothing), inverse.data_ptr(), pointer(out),
        grid, -(-steps // grid),
    )  # fmt: skip
    return args, grid


@functools.lru_cache(maxsize=1 << 12)
def _rows_cut(m: int, k: int, n_tiles: int, most_steps: int, ctas: int, resident: int) -> tuple[int, int, int, int]:
    """Of rows [m, k] beside the steps of `ctas` CTAs: the form of the launch, how many CTAs there are then, the first that
    quantises rows, and how many rows one of these takes. CTAs with a step less than others do it alone where they have the
    time."""
    grid, padded = max(ctas, min(m, resident)), max(2048, 1 << (k - 1).bit_length())
    if -(-m // (_LOOK_INPUTS // padded)) >= _MANY_LOOKS * grid:
        return MANY, grid, 0, 0
    full = -(-n_tiles // BLOCK_TILES) * (k // TILE) - (most_steps - 1) * ctas
    first = full if m * k <= _INPUTS_OF_STEP * (grid - full) else 0
    return FEW if k <= _FEW_INPUTS and most_steps <= _FEW_STEPS else SOME, grid, first, -(-m // (grid - first))


_asked: dict[torch.device, Tensor] = {}


def rows_asked(device: torch.device) -> Tensor:
    """Where CTAs of a launch with many rows count those that somebody asked for: 0 between launches, of the process, shared by
    all layers, as the workspace is. Not for two streams at once."""
    return zeros_kept(_asked, device, 1)


def _ctas(device: torch.device) -> int:
    return _EXPAND_RESIDENT * multiprocessors(device).count


def _launch_expand(args: ExpandArgs, grid: int, device: torch.device, dtype: torch.dtype, form: int) -> None:
    _expand_module(device, dtype, form).kernel("expand").launch(
        args, grid=grid, threads=THREADS, cluster=1, shared_bytes=_EXPAND_BYTES + _STEP_BYTES * args.most_steps,
        stream=current_stream(device), overlap=True,
    )  # fmt: skip


def short_args(
    q: Tensor, scale: Tensor, w: DecodeWeight, bias: Tensor | None, out: Tensor, splits: int, planes: bytes
) -> tuple[ShortArgs, int, int, Tensor]:
    """Arguments, grid, rows of a CTA, and the memory for sums that CTAs of a cluster hand over. As `prefill_triton.short`.

    planes: `planes_map` of the weight, in boxes of `SHORT_TILES`
    """
    weight, rows = weight_args(w), out.shape[0]
    tokens = tokens_for(rows)
    grid = splits * -(-rows // tokens) * -(-weight.n_tiles // SHORT_TILES)
    parts = torch.empty(grid * tokens * SHORT_TILES * TILE if splits > 1 else 0, dtype=torch.float32, device=q.device)
    args = ShortArgs(
        (ctypes.c_ubyte * 128).from_buffer_copy(planes), weight, q.data_ptr(), scale.data_ptr(), w.transform.data_ptr(),
        w.table.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), parts.data_ptr(), out.stride(0), rows,
        scale.stride(0), splits, 0 if bias is None else DTYPES.index(bias.dtype),
    )  # fmt: skip
    return args, grid, tokens, parts


def short(q: Tensor, scale: Tensor, w: DecodeWeight, bias: Tensor | None, out: Tensor, config: PrefillConfig) -> None:
    # Many rows take several launches, so that what is handed over stays below `PARTS_BYTES`.
    rows, n = out.shape
    most = TOKENS[-1] * max(1, PARTS_BYTES // (config.splits * n * TOKENS[-1] * 4)) if config.splits > 1 else rows
    planes = planes_map(w, SHORT_TILES)
    for first in range(0, rows, most):
        part = (q, scale, out) if rows <= most else (q[:, first:], scale[:, first:], out[first : first + most])
        args, grid, tokens, _ = short_args(*part[:2], w, bias, part[2], config.splits, planes)
        _short_module(w.device, out.dtype, tokens).kernel("short_rows").launch(
            args, grid=grid, threads=short_threads(tokens), cluster=config.splits, shared_bytes=shared_bytes(tokens),
            stream=current_stream(w.device), overlap=True,
        )  # fmt: skip


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def weight_args(w: DecodeWeight) -> WeightArgs:
    return WeightArgs(w.codes.data_ptr(), w.meta.data_ptr(), w.factor.data_ptr(), w.out_features // TILE, w.in_features // TILE)


@functools.cache
def _expand_module(device: torch.device, dtype: torch.dtype, form: int) -> Module:
    """dtype: of rows that are quantised in the same launch; form: one of `FORMS`."""
    return module("prefill_expand.cu", device, [f"XTYPE={DTYPES.index(dtype)}", f"FORM={form}"])


@functools.cache
def _short_module(device: torch.device, dtype: torch.dtype, tokens: int) -> Module:
    found = module("prefill_short.cu", device, [f"XTYPE={DTYPES.index(dtype)}", f"TOKENS={tokens}"])
    found.kernel("short_rows").prefer_shared()
    return found


def module(source: str, device: torch.device, defines: list[str]) -> Module:
    return Module(compile_cubin(_FOLDER / source, headers=_HEADERS, architecture="sm_90a", defines=defines), device)

"""Graded bit-planar GEMV: y = x W^T for 1 to 8 rows, each channel of each row read at its own number of bits.

Two kernels with the same integers inside a tile: `decode_bitplane.cu` (one launch, compute capability 9.0 on) and the
portable Triton path in `decode_triton.py` (8.0 on, and the interpreter). `device_path` picks; a path that is asked for by name
raises when it cannot run.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vllm_tilequant.kernels.capability import (
    DTYPES,
    MAX_ROWS,
    PATHS,
    DecodeSpec,
    choose_path,
    device_capability,
    unsupported_reason,
)
from vllm_tilequant.kernels.checked import checked_weight
from vllm_tilequant.kernels.cuda_runtime import Module, compile_cubin, current_stream, zeros_kept
from vllm_tilequant.kernels.decode_weight import BLOCK_TILES, CARRIED, DecodeWeight, carried_from, planes_map, prepare
from vllm_tilequant.kernels.reference import decode_bitplane_ref
from vllm_tilequant.kernels.tuning import (
    DecodeConfig,
    StreamConfig,
    cuda_geometry,
    decode_config,
    default_config,
    dense_geometry,
    divisor,
    gpu_key,
    multiprocessors,
    per_chain,
    stream_geometry,
    tuned,
)
from vllm_tilequant.schema import LEVELS, TILE

__all__ = ["DecodeWeight", "decode_linear", "decode_sums", "make_ready", "prepare"]

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cu")
_PARTS = ("ptx", "rows", "meet", "finish", "stream", "cluster", "inputs", "multiply", "dense")
_HEADERS = (_SOURCE.with_name("ptx.cu"), *(_SOURCE.with_name(f"decode_{part}.cu") for part in _PARTS))
_BIAS_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: Programmatic dependent launch: the kernel may be launched while its predecessor ends; it waits before it reads anything.
_OVERLAP = True


class _Args(ctypes.Structure):
    """`struct Args` of the CUDA source, in its order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "thresholds", "codes", "meta", "factor")),
        *((name, ctypes.c_void_p) for name in ("transform", "table", "bias", "y", "sums")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "y_stride")),
        *(
            (name, ctypes.c_int)
            for name in ("rows", "n_tiles", "k_tiles", "tiles_per_warp", "splits", "warps_k", "bias_type", "parts")
        ),
        *((name, ctypes.c_uint) for name in ("ring", "most_items")),
        ("prepared", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("items", "places", "chains", "of_parts", "of_tiles", "of_chains")),
        ("policy", ctypes.c_ulonglong),
        *((name, ctypes.c_void_p) for name in ("partial", "carried", "arrivals")),
        *((name, ctypes.c_uint) for name in ("of_run", "of_warps")),
    ]


class _DenseArgs(ctypes.Structure):
    """`struct DenseArgs` of the CUDA source, whose alignment pads it."""

    _fields_ = [("planes", ctypes.c_ubyte * 128), ("args", _Args), ("padding", ctypes.c_ubyte * 64)]


#: Policy of the L2 cache for a stream's weight, which the next launch does not find there anyway: evicted first.
_EVICTED_FIRST = 0x12F0000000000000

#: Of the stream that is checked at load.
_CHECKED_CTAS = 5

#: Threads of the kernel for three to eight rows: eight warps that multiply, one that reads.
_DENSE_THREADS = 288


def decode_linear(
    x: Tensor,
    w: DecodeWeight,
    bias: Tensor | None,
    thresholds: Tensor,
    *,
    path: str | None = None,
    config: DecodeConfig | StreamConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x W^T + bias, graded. No host synchronisation; safe under CUDA graphs once compiled.

    x: [M, K] bf16, fp16 or float32, M 1 to 8, rows contiguous; thresholds: [4] float32, ascending, on x's device
    bias: [N] bf16, fp16 or float32 -> [M, N] in x's dtype. path: "cuda", "triton" or None for the faster that can run.
    """
    check_inputs(x, w, bias, thresholds)
    out = _output(x, w, out)
    path = _path(x, w, path)
    if path == "cuda":
        _launch_cuda(x, w, bias, thresholds, out, config or decode_config(w.out_features, w.in_features, x.device), None)
    else:
        from vllm_tilequant.kernels.decode_triton import launch

        launch(x, w, bias, thresholds, out)
    return out


def decode_sums(
    x: Tensor,
    w: DecodeWeight,
    thresholds: Tensor,
    *,
    path: str | None = None,
    config: DecodeConfig | StreamConfig | None = None,
) -> Tensor:
    """The integers of `reference.tile_sums_ref` as the kernel has them: [M, K/64, N] int32. For tests."""
    check_inputs(x, w, None, thresholds)
    sums = torch.full((x.shape[0], w.in_features // TILE, w.out_features), 2**31 - 1, dtype=torch.int32, device=x.device)
    out = _output(x, w, None)
    if _path(x, w, path) == "cuda":
        _launch_cuda(x, w, None, thresholds, out, config or decode_config(w.out_features, w.in_features, x.device), sums)
    else:
        from vllm_tilequant.kernels.decode_triton import launch

        launch(x, w, None, thresholds, out, sums=sums)
    return sums


def make_ready(w: DecodeWeight, dtype: torch.dtype) -> None:
    """Compile now what calls over this weight with rows of `dtype` would at their first: a captured graph must not meet the
    compiler. Where sums meet is made and cleared too: a sleep that kept nothing (vLLM's level 2) forgets what no layer owns."""
    n, k = w.out_features, w.in_features
    if device_path(w.device) == "cuda":
        config = decode_config(n, k, w.device)
        _compile_cuda(w.device, dtype, config)
        cut = dense_geometry(MAX_ROWS, n // TILE, k // TILE, config, multiprocessors(w.device))
        if cut.room:
            sums_room(w.device, cut.room).zero_()
        return
    x = torch.zeros(1, k, dtype=dtype, device=w.device)
    thresholds = torch.zeros(len(LEVELS) - 1, dtype=torch.float32, device=w.device)
    for bias in (None, torch.zeros(n, dtype=dtype, device=w.device)):
        decode_linear(x, w, bias, thresholds)


@functools.cache
def device_path(device: torch.device) -> str | None:
    """The faster path that runs on a device: `cuda`, if it computes there what it should, else `triton`; None for neither."""
    capability = device_capability(device)
    chosen = choose_path(capability)
    if chosen != "cuda" or not (fault := self_check(device, "cuda")):
        return chosen
    logger.error(
        "graded product on %s: %s; the slower Triton path serves. Please report this with your GPU and driver", device, fault
    )
    return None if unsupported_reason(DecodeSpec(TILE, TILE, torch.bfloat16, capability), "triton") else "triton"


def self_check(device: torch.device, path: str) -> str | None:
    """Compute a small weight and compare with the reference: what is wrong, None if nothing."""
    with torch.device("cpu"):  # whatever the default device is while a server loads
        packed, transforms = checked_weight()
        n, k = packed.out_features, packed.in_features
        x = torch.randn(MAX_ROWS, k, dtype=torch.float32, generator=torch.Generator().manual_seed(1)).bfloat16()
        thresholds = torch.tensor([0.2, 0.6, 1.0, 1.6], dtype=torch.float32)  # vLLM's default dtype is the model's meanwhile
        wanted = decode_bitplane_ref(x, packed, transforms[packed.output_transform.long()], thresholds)
        w = prepare(packed, transforms, ctas=_CHECKED_CTAS)
    w = w.to(device)
    configs: list[DecodeConfig | StreamConfig | None] = [None]
    if path == "cuda":
        default = default_config(n, k, multiprocessors(device))
        configs = [replace(default, launch_from=9), replace(default, launch_from=3)]
        known = tuned(gpu_key(torch.cuda.get_device_properties(device).name)).values()
        if stream := next((c for c in known if isinstance(c, StreamConfig)), None):
            configs.append(replace(stream, ctas=_CHECKED_CTAS, chains=4))
        if any(map(_meets, known)):
            configs.append(replace(default, many=_CHECKED_CTAS))
    for config in configs:
        for rows in (1, 2, 3, MAX_ROWS):
            got = decode_linear(x[:rows].to(device), w, None, thresholds.to(device), path=path, config=config).cpu().double()
            if not float((got - wanted[:rows]).norm() / wanted[:rows].norm()) < 2.0**-8:
                return f"the kernel gives wrong results for {rows} rows with {config}"
    return None


def _compile_cuda(device: torch.device, dtype: torch.dtype, config: DecodeConfig | StreamConfig) -> None:
    stream = isinstance(config, StreamConfig)
    tiles = 8 if isinstance(config, StreamConfig) else config.tiles
    few = _module(device, dtype, config.stages, False, stream, False, False)
    names = [(few, f"decode_{tiles}_{rows}") for rows in (1, 2)]
    for launch in {m >= config.launch_from for m in range(2, MAX_ROWS + 1)}:
        many = _module(device, dtype, config.stages, False, stream, _meets(config), launch)
        names += [
            (many, f"{kind}_{rows}")
            for kind in (("decode_dense", "prepare") if launch else ("decode_dense",))
            for rows in (4, 8)
        ]
    for module, name in names:
        kernel = module.kernel(name)
        if stream or "dense" in name:
            kernel.prefer_shared()


def check_inputs(x: Tensor, w: DecodeWeight, bias: Tensor | None, thresholds: Tensor) -> None:
    """Every cheap check of a launch. Raises `TypeError` or `ValueError` that names what, got, wanted and the remedy."""
    n, k = w.out_features, w.in_features
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, wanted one of {', '.join(map(str, DTYPES))}: convert the activations")
    if x.ndim != 2 or x.shape[1] != k or not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x is {list(x.shape)}, wanted [1..{MAX_ROWS}, {k}]: larger batches take the prefill path")
    if x.stride(1) != 1 or (x.data_ptr() % 16) or (x.stride(0) * x.element_size()) % 16:
        raise ValueError(f"x has strides {list(x.stride())}, wanted contiguous rows on 16-byte borders: call .contiguous()")
    if thresholds.dtype != torch.float32:
        raise TypeError(f"thresholds are {thresholds.dtype}, wanted torch.float32: convert them at load")
    if tuple(thresholds.shape) != (len(LEVELS) - 1,) or not thresholds.is_contiguous():
        raise ValueError(
            f"thresholds are {list(thresholds.shape)}, wanted a contiguous [{len(LEVELS) - 1}]: pass one profile's row"
        )
    if bias is not None:
        if bias.dtype not in _BIAS_TYPES:
            raise TypeError(f"bias is {bias.dtype}, wanted one of {', '.join(map(str, _BIAS_TYPES))}: convert it at load")
        if tuple(bias.shape) != (n,) or not bias.is_contiguous():
            raise ValueError(f"bias is {list(bias.shape)}, wanted a contiguous [{n}]")
    for name, t in (("weight", w.codes), ("thresholds", thresholds), *((("bias", bias),) if bias is not None else ())):
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x is on {x.device}: move both to one device")


def _output(x: Tensor, w: DecodeWeight, out: Tensor | None) -> Tensor:
    shape = (x.shape[0], w.out_features)
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.dtype != x.dtype:
        raise TypeError(f"out is {out.dtype}, wanted {x.dtype} as x")
    if tuple(out.shape) != shape or out.stride(1) != 1 or out.device != x.device:
        raise ValueError(f"out is {list(out.shape)} on {out.device}, wanted {list(shape)} with contiguous rows on {x.device}")
    return out


def _path(x: Tensor, w: DecodeWeight, path: str | None) -> str:
    """The path a call takes; raises `NotImplementedError` when the wanted one (or every one) cannot run."""
    if path is not None and path not in PATHS:
        raise ValueError(f"path is {path!r}, wanted one of {PATHS} or None")
    if path == "triton" and x.device.type == "cpu":
        return path  # the interpreter; without it Triton itself says that it has no CPU
    return _device_path(x.device, w.out_features, w.in_features, x.dtype, path)


@functools.cache
def _device_path(device: torch.device, n: int, k: int, dtype: torch.dtype, path: str | None) -> str:
    capability = device_capability(device)
    reason = unsupported_reason(DecodeSpec(n, k, dtype, capability), path)
    chosen = path or device_path(device)
    if reason or chosen is None:
        raise NotImplementedError(f"graded product on {device}: {reason}: use `portable.graded_linear`")
    return chosen


def _meets(config: DecodeConfig | StreamConfig) -> bool:
    """Whether three rows and more have a module of their own."""
    return isinstance(config, DecodeConfig) and config.many > 0


_rooms: dict[torch.device, Tensor] = {}


def sums_room(device: torch.device, words: int) -> Tensor:
    """Where CTAs leave sums of three rows and more for each other: zeros between launches, of the process, for all weights.
    Not for two streams at once."""
    return zeros_kept(_rooms, device, words)


@functools.cache
def _module(
    device: torch.device, dtype: torch.dtype, stages: int, sums: bool, stream: bool, meet: bool, launch: bool
) -> Module:
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    flags = {"XTYPE": DTYPES.index(dtype), "STAGES": stages, "SUMS": int(sums), "STREAM": int(stream)}
    flags |= {"MEET": int(meet), "LAUNCH": int(launch)}
    defines = [f"{name}={value}" for name, value in flags.items()]
    return Module(compile_cubin(_SOURCE, headers=_HEADERS, architecture=architecture, defines=defines), device)


def _launch_cuda(
    x: Tensor,
    w: DecodeWeight,
    bias: Tensor | None,
    thresholds: Tensor,
    out: Tensor,
    config: DecodeConfig | StreamConfig,
    sums: Tensor | None,
) -> None:
    args = _Args(
        x=x.data_ptr(), thresholds=thresholds.data_ptr(), codes=w.codes.data_ptr(), meta=w.meta.data_ptr(),
        factor=w.factor.data_ptr(), transform=w.transform.data_ptr(), table=w.table.data_ptr(),
        bias=bias.data_ptr() if bias is not None else None, y=out.data_ptr(),
        sums=sums.data_ptr() if sums is not None else None, x_stride=x.stride(0), y_stride=out.stride(0), rows=x.shape[0],
        n_tiles=w.out_features // TILE, k_tiles=w.in_features // TILE,
        bias_type=_BIAS_TYPES[bias.dtype] if bias is not None else 0,
    )  # fmt: skip
    stream = isinstance(config, StreamConfig)
    many = args.rows > 2
    if isinstance(config, StreamConfig) and not many:
        many = not stream_geometry(args.rows, args.n_tiles, args.k_tiles, config, multiprocessors(x.device)).few
    launch = many and args.rows >= config.launch_from
    module = _module(x.device, x.dtype, config.stages, sums is not None, stream, many and _meets(config), launch)
    if isinstance(config, StreamConfig):
        _launch_stream(args, module, x, w, out, config)
        return
    args.splits, args.warps_k, args.parts = config.splits, config.warps_k, config.parts
    args.tiles_per_warp = per_chain(args.k_tiles, config)
    if args.rows > 2:
        _launch_dense(args, module, x, w, config)
        return
    cut = cuda_geometry(args.rows, args.n_tiles, args.k_tiles, config)
    if cut.shared_bytes > module.shared_limit:
        raise ValueError(
            f"{config} needs {cut} for [{w.out_features}, {w.in_features}], the GPU has {module.shared_limit} bytes"
        )
    module.kernel(cut.kernel).launch(
        args,
        grid=cut.grid,
        threads=cut.warps * 32,
        cluster=config.splits,
        shared_bytes=cut.shared_bytes,
        stream=current_stream(x.device),
        overlap=_OVERLAP,
    )


def _launch_dense(args: _Args, module: Module, x: Tensor, w: DecodeWeight, config: DecodeConfig | StreamConfig) -> None:
    """Three rows and more."""
    cut = dense_geometry(args.rows, args.n_tiles, args.k_tiles, config, multiprocessors(x.device))
    args.ring, args.most_items = cut.ring, cut.most_items
    args.of_run, args.of_warps = divisor(args.tiles_per_warp), divisor(args.warps_k)
    if cut.room:
        args.items, args.places = cut.items, cut.places
        blocks = -(-args.n_tiles // BLOCK_TILES)
        args.of_parts, args.of_tiles = divisor(cut.grid), divisor(cut.items // blocks)
        args.partial, args.arrivals = sums_room(x.device, cut.room).data_ptr(), w.arrivals.data_ptr()
    stream = current_stream(x.device)
    if args.rows >= config.launch_from:
        prepared = torch.empty(args.k_tiles * cut.prepared_bytes, dtype=torch.uint8, device=x.device)
        args.prepared = prepared.data_ptr()
        module.kernel(f"prepare_{cut.rows}").launch(
            args, grid=args.k_tiles, threads=32 * cut.rows, cluster=1, shared_bytes=0, stream=stream, overlap=_OVERLAP
        )
    module.kernel(f"decode_dense_{cut.rows}").launch(
        _DenseArgs((ctypes.c_ubyte * 128).from_buffer_copy(planes_map(w, BLOCK_TILES)), args),
        grid=cut.grid,
        threads=_DENSE_THREADS,
        cluster=cut.cluster,
        shared_bytes=cut.shared_bytes,
        stream=stream,
        overlap=_OVERLAP,
    )


def _launch_stream(args: _Args, module: Module, x: Tensor, w: DecodeWeight, out: Tensor, config: StreamConfig) -> None:
    if out.data_ptr() % 16 or (out.stride(0) * out.element_size()) % 16:
        raise ValueError(f"out has strides {list(out.stride())}, wanted rows on 16-byte borders: pass a contiguous tensor")
    cut = stream_geometry(args.rows, args.n_tiles, args.k_tiles, config, multiprocessors(x.device))
    args.tiles_per_warp, args.chains, args.items, args.places = cut.per_chain, config.chains, cut.items, cut.places
    args.of_parts, args.of_tiles, args.of_chains = (divisor(d) for d in (cut.grid, args.k_tiles, config.chains))
    args.policy = _EVICTED_FIRST
    if not cut.few:
        _launch_dense(args, module, x, w, config)
        return
    carried = carried_from(w.meta.shape[0])
    if w.arrivals.numel() < carried + CARRIED * cut.grid:
        raise ValueError(f"the weight has no room for the sums of {cut.grid} CTAs: prepare it with ctas={config.ctas}")
    args.parts = cut.parts
    args.carried = w.arrivals.data_ptr() + 4 * carried
    module.kernel(f"decode_8_{args.rows}").launch(
        args,
        grid=cut.grid // cut.parts,
        threads=32 * config.chains * cut.parts,
        cluster=1,
        shared_bytes=cut.shared_bytes,
        stream=current_stream(x.device),
        overlap=_OVERLAP,
    )

"""INT8 tensor-core products for more rows than the graded GEMV takes, on the same packed tiles.

Short (some rows): the weight is expanded inside the kernel and every 64 inputs have scales of their own, which is the papers'
arithmetic (`reference.linear_ref(int8=True)`). Long (prompts): the tiles are expanded once per call into a workspace of the
process, rotated back and requantised to one scale per output (`reference.requantize_ref`), and one product over all of K
follows, with one scale per row (`reference.prefill_int8_ref`). The number of rows decides; `kernels/README.md` says why.
Who has the memory may keep what `expanded` makes and hand it over: then every call is a long one without its expansion.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vllm_tilequant.kernels import decode_weight, prefill_batch, prefill_cuda
from vllm_tilequant.kernels.capability import DTYPES, device_capability
from vllm_tilequant.kernels.checked import checked_weight
from vllm_tilequant.kernels.decode_weight import IDENTITY, DecodeWeight
from vllm_tilequant.kernels.layout import (
    PackedWeight,
    aligned_codes,
    hadamard_matrix,
    to_device,
)
from vllm_tilequant.kernels.reference import (
    SMALLEST,
    activation_token_ref,
    block_ratios,
    coarse,
    linear_ref,
    prefill_block_ref,
    requantize_ref,
)
from vllm_tilequant.kernels.tuning import PrefillConfig, prefill_config
from vllm_tilequant.schema import PREFILL_ACTIVATIONS, TILE

logger = logging.getLogger(__name__)

PATHS = ("cuda", "triton")
#: Sources that are compiled at the same time.
_COMPILERS = 8
_WANTED = ", ".join(map(str, DTYPES))

#: A product of INT8 matrices with scales: (q [M, K] int8, codes [N, K] int8, row scales [M, 1] float32, output scales [N, 1]
#: float32, bias [N] or None, dtype of the result) -> [M, N].
Gemm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


@dataclass  # not frozen: made in every call, as `DecodeWeight`
class PrefillWeight:
    """What the prefill keeps beside the decode form of a weight: scales of outputs, nothing of the weight itself.

    scale, inverse: [N, 1] float32 of the requantised weight, and one over it (`reference.coarse`)
    rotation: [transforms + 1, 64, 64] int8, 8U by rows, the identity last; index: [N/64] uint8, its row per output tile
    ratio, stretch, unit, of_input: `reference.block_ratios` as the kernel for batches reads them: [blocks, K/64, 8] int32, a
        tile's half twice; [N] int32, an output's half and -1152 times it; [N] float32; [K/64, 64] float16 in its order
    smoothing, unsmoothing: [K] float32 and one over it: what inputs are divided by; None for ones
    """

    scale: Tensor
    inverse: Tensor
    rotation: Tensor
    index: Tensor
    ratio: Tensor
    stretch: Tensor
    unit: Tensor
    of_input: Tensor
    smoothing: Tensor | None = None
    unsmoothing: Tensor | None = None

    @property
    def of_batches(self) -> tuple[Tensor, ...]:
        """What `prefill_batch` takes."""
        return self.ratio, self.stretch, self.unit, self.of_input

    def tensors(self) -> list[Tensor]:
        """The fields that are there, in order: `PrefillWeight(*tensors)` makes it again."""
        return [t for f in fields(self) if (t := getattr(self, f.name)) is not None]


def prepare(w: PackedWeight, decode: DecodeWeight, *, smoothing: Tensor | None = None) -> PrefillWeight:
    """Scales of the requantised weight, once at load, on the device where it lies.

    decode: of the same weight; smoothing: [K] float32, finite and above zero. Raises `ValueError` otherwise.
    """
    k, device = w.in_features, w.plane0.device
    if smoothing is not None:
        if smoothing.dtype != torch.float32 or tuple(smoothing.shape) != (k,):
            raise ValueError(f"smoothing is {smoothing.dtype} {list(smoothing.shape)}, wanted float32 [{k}]")
        if not bool((smoothing.isfinite() & (smoothing > 0)).all()):
            raise ValueError("smoothing holds entries that are not finite and > 0")
        smoothing = None if bool((smoothing == 1).all()) else smoothing.to(device)
    rotation = _rotations(decode.table)
    index = decode.transform.where(decode.transform != IDENTITY, rotation.shape[0] - 1)
    if device.type == "cuda":
        from vllm_tilequant.kernels import prefill_triton

        largest, rotated = prefill_triton.largest(decode, rotation, index, smoothing)
    else:
        largest, rotated = _largest(w, rotation, index, smoothing)
    scale = largest.clamp_min(SMALLEST) / torch.full((), 127.0, dtype=torch.float32, device=device)
    ones = torch.ones((), dtype=torch.float32, device=device)
    extra = () if smoothing is None else (smoothing, ones / smoothing)
    block = _block(rotated, w, decode, smoothing)
    return PrefillWeight(scale[:, None], coarse(ones / scale)[:, None], rotation, index, *block, *extra)


def _largest(w: PackedWeight, rotation: Tensor, index: Tensor, smoothing: Tensor | None) -> tuple[Tensor, Tensor]:
    """`prefill_triton.largest` where there is no Triton."""
    k, n = w.in_features, w.out_features
    per_tile = rotation.float()[index.long()].mT.contiguous()  # [N/64, n, n']
    codes = aligned_codes(w).view(k, -1, TILE)
    unit = (w.tile_scale * torch.exp2(w.tile_bits.float() - 8) / 8).T.contiguous()  # [K/64, N/64]
    # float32 said everywhere: vLLM sets the default dtype to the model's while it loads.
    largest = torch.zeros(n, dtype=torch.float32)
    rotated = torch.zeros(n // TILE, TILE, dtype=torch.float32)
    step = max(TILE, 2**24 // n // TILE * TILE)  # some 64 MiB of float32 at a time
    for k0 in range(0, k, step):
        part = codes[k0 : k0 + step].transpose(0, 1).float() - 128  # [N/64, inputs, 64]
        sums = torch.bmm(part, per_tile)  # whole numbers up to 2^14: exact
        units = unit[k0 // TILE : (k0 + step) // TILE].repeat_interleave(TILE, 0)  # [inputs, N/64]
        units = units if smoothing is None else units * smoothing[k0 : k0 + step, None]
        largest = torch.maximum(largest, (sums.abs() * units.T[..., None]).amax(1).view(-1))
        rotated = torch.maximum(rotated, (part.abs() * (8 * units.T)[..., None]).amax(1))
    return largest, rotated.view(-1)


#: Inputs of an input tile in the order of the tensor core's operand.
_ORDER = [32 * h + 8 * i + 2 * c + e for c in range(4) for h in range(2) for i in range(4) for e in range(2)]


def _block(largest: Tensor, w: PackedWeight, decode: DecodeWeight, smoothing: Tensor | None) -> tuple[Tensor, ...]:
    of_tile, of_input, of_output, unit = block_ratios(largest, w.tile_scale, w.tile_bits, smoothing)
    blocks, k_tiles, width = decode.factor.shape
    padded = torch.nn.functional.pad(of_tile.T, (0, blocks * width - of_tile.shape[0]))
    ratio = padded.view(k_tiles, blocks, width).transpose(0, 1)[..., None].expand(-1, -1, -1, 2).contiguous().view(torch.int32)
    stretch = torch.stack((of_output, -1152 * of_output), -1).view(torch.int32)[:, 0]
    return ratio[..., 0], stretch, unit, of_input.view(-1, TILE)[:, _ORDER].contiguous()


def _rotations(table: Tensor) -> Tensor:
    """8U of every row of `DecodeWeight.table`, and of the identity: [T + 1, 64, 64] int8."""
    code = table.long()
    left = 1 - 2 * (code >> 6 & 1)
    right = 1 - 2 * (code >> 7 & 1)
    rows = (8 * hadamard_matrix()).round().long().to(table.device)[code & 63]
    eye = 8 * torch.eye(TILE, dtype=torch.long, device=table.device)
    return torch.cat((left[:, :, None] * rows * right[:, None, :], eye[None])).to(torch.int8)


_workspaces: dict[torch.device, Tensor] = {}
_views: dict[tuple[int, int], dict[torch.device, Tensor]] = {}


def reserve(device: torch.device, n: int, k: int) -> None:
    """Make the process's workspace on a device large enough for a weight [n, k]: one byte a weight, shared by all layers.

    Called at load, so that a server's memory profile counts it. Not for two streams that compute at once.
    """
    if prefill_cuda.unsupported_reason(device_capability(device)) is None:
        prefill_batch.clear_sums(device, n)
        prefill_cuda.rows_asked(device).zero_()
    held = _workspaces.get(device)
    if held is None or held.numel() < n * k:
        for kept in [_workspaces, *_views.values()]:
            kept.pop(device, None)
        del held  # before the larger one is allocated
        _workspaces[device] = torch.empty(n * k, dtype=torch.int8, device=device)


def workspace(device: torch.device, n: int, k: int) -> Tensor:
    """[n, k] int8, whatever the last call left in it."""
    views = _views.setdefault((n, k), {})
    if device not in views:
        reserve(device, n, k)
        views[device] = _workspaces[device][: n * k].view(n, k)
    return views[device]


def compile_kernels(device: torch.device, dtype: torch.dtype, k: int, smooth: bool, rotation: Tensor | None = None) -> None:
    """Compile now what calls with K inputs would at their first time: a captured graph must not meet the compiler.

    smooth, rotation: whether there is a smoothing, and what rotates the inputs, as in `prefill_linear`
    """
    from vllm_tilequant.kernels import prefill_triton

    if device_path(device) == "cuda":
        _load_kernels(device, dtype)
    unsmoothing = torch.ones(k, dtype=torch.float32, device=device) if smooth else None
    x = torch.zeros(1, k, dtype=dtype, device=device)
    prefill_triton.quantize_rows(x, unsmoothing, rotation)
    prefill_triton.quantize_groups(x, rotation)


@functools.cache  # every layer asks
def _load_kernels(device: torch.device, dtype: torch.dtype) -> None:
    wanted = prefill_cuda.kernels(dtype) + prefill_batch.kernels(dtype)
    with ThreadPoolExecutor(_COMPILERS) as pool:  # a first start compiles a dozen sources
        for done in [pool.submit(module, device, *of) for _, module, of in wanted]:
            done.result()
    for name, module, of in wanted:
        module(device, *of).kernel(name)


def warm(w: DecodeWeight, p: PrefillWeight, dtype: torch.dtype, codes: Tensor | None = None) -> None:
    """Where Triton serves, compile what calls over this weight would at their first time, by making them.

    codes: as in `prefill_linear`
    """
    if device_path(w.device) == "cuda":
        return
    config = prefill_config(w.out_features, w.in_features, w.device)
    for rows in (1, max(config.short_rows, config.batch_rows) + 1):
        x = torch.zeros(rows, w.in_features, dtype=dtype, device=w.device)
        for bias in (None, torch.zeros(w.out_features, dtype=dtype, device=w.device)):
            prefill_linear(x, w, p, bias, codes=codes)


@functools.cache
def device_path(device: torch.device) -> str:
    """The faster path that runs on a device: `cuda` on Hopper, if it computes there what it should, else `triton`."""
    if prefill_cuda.unsupported_reason(device_capability(device)) is not None:
        return "triton"
    if fault := self_check(device, "cuda"):
        logger.error(
            "prefill on %s: %s; the slower Triton path serves. Please report this with your GPU and driver", device, fault
        )
        return "triton"
    return "cuda"


def self_check(device: torch.device, path: str) -> str | None:
    """Compute a small weight both ways and compare with the references: what is wrong, None if nothing."""
    with torch.device("cpu"):  # whatever the default device is while a server loads
        packed, transforms = checked_weight()
        g = torch.Generator().manual_seed(1)
        counts = (9, 17, 33, 65)  # every kind of CTA of the short kernel
        drawn = [torch.randn(m, packed.in_features, dtype=torch.float32, generator=g) for m in counts]
        matrices = transforms[packed.output_transform.long()]
        w, config = decode_weight.prepare(packed, transforms), PrefillConfig(2, 128)
        wanted = [linear_ref(x, packed, matrices, int8=True) for x in drawn]
        codes, _ = requantize_ref(packed, matrices)
    w = w.to(device)
    p = prepare(to_device(packed, device), w)
    for x, y in zip(drawn, wanted, strict=True):
        got = prefill_linear(x.to(device), w, p, path=path, config=config).cpu().double()
        if not float((got - y).norm() / y.norm()) < 2.0**-19:
            return f"the short kernel gives wrong results at {x.shape[0]} rows"
    if path == "cuda" and (fault := _batch_fault(device)):
        return fault
    out = torch.empty(codes.shape, dtype=torch.int8, device=device)
    rows = drawn[-1].bfloat16()
    q, unit = quantize_and_expand(rows.to(device), w, p, None, out, path)
    if not torch.equal(out.cpu(), codes):
        return "the expansion gives wrong codes"
    wanted_q, wanted_unit = activation_token_ref(rows)
    if not (torch.equal(q.cpu(), wanted_q) and torch.equal(unit[:, 0].cpu(), wanted_unit)):
        return "rows of long prompts are quantised wrong"
    return None


def _batch_fault(device: torch.device) -> str | None:
    """As `self_check`, of the kernel for batches, whose blocks of many rows take two input tiles at a time."""
    for k_tiles, counts in ((3, (9, 17, 33, 65)), (4, (129, 300))):
        with torch.device("cpu"):
            packed, transforms = checked_weight(k_tiles)
            g = torch.Generator().manual_seed(1)
            drawn = [torch.randn(m, packed.in_features, dtype=torch.float32, generator=g).bfloat16() for m in counts]
            wanted = [prefill_block_ref(x, packed, transforms[packed.output_transform.long()]) for x in drawn]
            w = decode_weight.prepare(packed, transforms)
        w = w.to(device)
        p = prepare(to_device(packed, device), w)
        for x, y in zip(drawn, wanted, strict=True):
            got = prefill_linear(x.to(device), w, p, path="cuda", config=PrefillConfig(2, 0, 10**6)).cpu().double()
            if not float((got - y).norm() / y.norm()) < 2.0**-8:
                return f"the kernel for batches gives wrong results at {x.shape[0]} rows"
    return None


def way(x: Tensor, config: PrefillConfig, activation: str, path: str, rotated: bool = False) -> str:
    """How a call computes: `short` (scales of 64 inputs), `batch` (of rows, rotated outputs) or `long` (of rows, outputs).

    activation: one of `PREFILL_ACTIVATIONS`; `group64` is short at any number of rows.
    """
    if activation not in PREFILL_ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, wanted one of {PREFILL_ACTIVATIONS}")
    rows, batch = x.shape[0], path == "cuda" and not rotated and prefill_batch.takes_batch(x)
    if activation == "group64" or rows <= config.short_rows:
        return "short"
    if rows > (config.batch_rows if batch else min(config.batch_rows, prefill_cuda.TOKENS[-1])):
        return "long"
    return "batch" if batch else "short"


def prefill_linear(
    x: Tensor,
    w: DecodeWeight,
    p: PrefillWeight,
    bias: Tensor | None = None,
    *,
    rotation: Tensor | None = None,
    activation: str = "token_smooth",
    gemm: Gemm | None = None,
    path: str | None = None,
    config: PrefillConfig | None = None,
    codes: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x W^T + bias at stored precision. No host synchronisation; safe under CUDA graphs once compiled.

    x: [M, K] bf16, fp16 or float32, rows contiguous -> [M, N] in x's dtype; bias: [N] of one of these dtypes
    rotation: [64] uint8 of `layout.rotation_table`: every 64 inputs are rotated in float32 before they become INT8, in the same
    launch; None for inputs as they come (there is no smoothing beside it)
    activation: one of `PREFILL_ACTIVATIONS`; gemm: the long product's matrix product, ours in Triton if None (and where dtypes
    ask for it: a given one serves 16-bit results with a bias of the same dtype); path: `cuda`, `triton` or None for the faster
    that can run; codes: [N, K] int8 of `expanded`, where it is kept: the arithmetic of prompts for any number of rows;
    out: only for products that are ours.
    """
    check_inputs(x, w, bias)
    if rotation is not None and p.unsmoothing is not None:
        raise ValueError("inputs are to be rotated and smoothed: the format has one or the other")
    if codes is not None and activation != PREFILL_ACTIVATIONS[0]:
        raise ValueError(f"activation is {activation!r}, wanted {PREFILL_ACTIVATIONS[0]!r} with codes that are kept")
    n, k = w.out_features, w.in_features
    path = _path(x.device, path)
    config = config or prefill_config(n, k, x.device)
    from vllm_tilequant.kernels import prefill_triton as portable

    how = "long" if codes is not None else way(x, config, activation, path, rotation is not None)
    if how == "batch":
        y = _output(x, n, out)
        q, scale = prefill_batch.quantize_batch(x, p.unsmoothing)
        to = y if y.data_ptr() % 4 == 0 and y.stride(0) % 2 == 0 else _output(x, n, None)
        prefill_batch.batch(q, scale, w, p.of_batches, bias, to)
        return y if to is y else y.copy_(to)
    if how == "short":
        q, scale = portable.quantize_groups(x, rotation)
        y = _output(x, n, out)
        if path == "cuda":
            prefill_cuda.short(q, scale, w, bias, y, config)
        else:
            portable.short(q, scale, w, p.rotation, p.index, bias, y)
        return y
    if codes is None:
        codes = workspace(x.device, n, k)
        q, scale = quantize_and_expand(x, w, p, rotation, codes, path)
    else:
        q, scale = portable.quantize_rows(x, p.unsmoothing, rotation)
    if gemm is not None and out is None and x.dtype != torch.float32 and (bias is None or bias.dtype == x.dtype):
        return gemm(q, codes, scale, p.scale, bias, x.dtype)
    y = _output(x, n, out)
    portable.gemm(q, scale, codes, p.scale, bias, y)
    return y


class Call:
    """`prefill_linear` over one weight, where it lies, for rows that take neither the short kernel nor kept codes: nothing is
    checked again and little looked up. Holds no tensor, so that it may outlive the weight; whoever keeps it knows it by the
    addresses of all tensors in `w` and `p`.

    A prompt of some hundred tokens makes the GPU wait for the host, which is through with this in half of the time.
    """

    def __init__(self, w: DecodeWeight, p: PrefillWeight, dtype: torch.dtype, activation: str, gemm: Gemm | None) -> None:
        """Raises `NotImplementedError` where another way has to serve."""
        if device_path(w.device) != "cuda" or dtype not in DTYPES[:2] or w.in_features > prefill_cuda.MOST_INPUTS:
            raise NotImplementedError
        self.config, self.activation = prefill_config(w.out_features, w.in_features, w.device), activation
        self.shape, self.device, self.gemm = (w.out_features, w.in_features), w.device, gemm
        self.expand = prefill_cuda.Expansion(dtype, p.unsmoothing, w, p.rotation, p.index, p.inverse, p.smoothing)
        self.batch = prefill_batch.Batch(dtype, p.unsmoothing, w, p.of_batches)

    def __call__(self, x: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
        """None where `prefill_linear` has to. x: [M, K] contiguous, of this call's dtype and device; scale: of `p`"""
        if x.data_ptr() % prefill_cuda.ALIGNMENT or not (bias is None or bias.dtype == x.dtype):
            return None
        how = way(x, self.config, self.activation, "cuda")
        if how == "batch":
            return self.batch(x, bias)
        if how != "long" or self.gemm is None:
            return None
        codes = workspace(self.device, *self.shape)
        q, unit = self.expand(x, codes)
        return self.gemm(q, codes, unit, scale, bias, x.dtype)


def expanded(w: DecodeWeight, p: PrefillWeight) -> Tensor:
    """[N, K] int8: what a long product makes of the weight in every call, to be kept: 8 bits a weight."""
    out = torch.empty(w.out_features, w.in_features, dtype=torch.int8, device=w.device)
    _expand(w, p, out, device_path(w.device) if w.device.type == "cuda" else "triton")
    return out


def quantize_and_expand(
    x: Tensor, w: DecodeWeight, p: PrefillWeight, rotation: Tensor | None, out: Tensor, path: str
) -> tuple[Tensor, Tensor]:
    """What comes before a long product: rows by `activation_token_ref`, q [M, K] int8 and scale [M, 1]; to out, [N, K] int8,
    `requantize_ref`'s codes."""
    from vllm_tilequant.kernels import prefill_triton

    if path == "cuda" and rotation is None and prefill_cuda.takes_rows(x):
        return prefill_cuda.quantize_and_expand(x, p.unsmoothing, w, p.rotation, p.index, p.inverse, p.smoothing, out)
    rows = prefill_triton.quantize_rows(x, p.unsmoothing, rotation)
    _expand(w, p, out, path)
    return rows


def _expand(w: DecodeWeight, p: PrefillWeight, out: Tensor, path: str) -> None:
    """`requantize_ref`'s codes to out: [N, K] int8."""
    if path == "cuda":
        prefill_cuda.expand(w, p.rotation, p.index, p.inverse, p.smoothing, out)
    else:
        from vllm_tilequant.kernels import prefill_triton

        prefill_triton.expand(w, p.rotation, p.index, p.inverse, p.smoothing, out)


def check_inputs(x: Tensor, w: DecodeWeight, bias: Tensor | None) -> None:
    """Every cheap check of a launch. Raises `TypeError` or `ValueError` that names what, got, wanted and the remedy."""
    n, k = w.out_features, w.in_features
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}, wanted one of {_WANTED}: convert the activations")
    if x.ndim != 2 or x.shape[1] != k or x.shape[0] < 1:
        raise ValueError(f"x is {list(x.shape)}, wanted [1.., {k}]")
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {list(x.stride())}, wanted contiguous rows: call .contiguous()")
    if bias is not None and bias.dtype not in DTYPES:
        raise TypeError(f"bias is {bias.dtype}, wanted one of {_WANTED}: convert it at load")
    if bias is not None and (tuple(bias.shape) != (n,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)}, wanted a contiguous [{n}]")
    for name, t in (("weight", w.codes), ("bias", w.codes if bias is None else bias)):
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x is on {x.device}: move both to one device")


def _path(device: torch.device, path: str | None) -> str:
    if path is None:
        return device_path(device)
    if path not in PATHS:
        raise ValueError(f"path is {path!r}, wanted one of {PATHS} or None")
    if path == "cuda" and (reason := prefill_cuda.unsupported_reason(device_capability(device))):
        raise NotImplementedError(f"prefill on {device}: {reason}")
    return path


def _output(x: Tensor, n: int, out: Tensor | None) -> Tensor:
    shape = (x.shape[0], n)
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.dtype != x.dtype:
        raise TypeError(f"out is {out.dtype}, wanted {x.dtype} as x")
    if tuple(out.shape) != shape or out.stride(1) != 1 or out.device != x.device:
        raise ValueError(f"out is {list(out.shape)} on {out.device}, wanted {list(shape)} with contiguous rows on {x.device}")
    return out

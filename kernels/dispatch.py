"""Which product a call takes, and in which form a weight is kept for it: pure functions of rows, device and settings."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_tilequant.kernels import decode_bitplane, decode_weight, layout, portable, prefill_int8
from vllm_tilequant.kernels.capability import DecodeSpec, device_capability, unsupported_reason
from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.layout import PackedWeight
from vllm_tilequant.kernels.portable import PortableWeight
from vllm_tilequant.kernels.prefill_int8 import Gemm, PrefillWeight

#: Rows up to which the graded product is used. A captured graph or a batch above it runs at stored precision.
GRADED_ROWS = 8


@dataclass  # not frozen: made in every call, as `DecodeWeight`
class LinearWeight:
    """One linear as it is served.

    static: for the product at stored precision: only scales beside the decode form, since both products read the same tiles;
        where there is no kernel the dense weight [N, K] in the model's dtype
    graded: the form that the graded kernel reads, or the portable one where there is no kernel
    input_rotation: [64] uint8, what rotates the inputs of either product (both forms belong to rotated inputs), or None
    copy: [N, K] int8 of the product at stored precision (`prefill_int8.expanded`) where one is kept, or None
    """

    static: PrefillWeight | Tensor
    graded: DecodeWeight | PortableWeight
    input_rotation: Tensor | None = None
    copy: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.static.shape[0] if isinstance(self.static, Tensor) else self.static.scale.shape[0]


def portable_reason(n: int, k: int, dtype: torch.dtype, device: torch.device, activation: str) -> str | None:
    """Why the products of a weight [n, k] take plain torch; None where GPU kernels run them."""
    if activation != "group64":
        return f"activation {activation!r}: the kernels compute with INT8 activations"
    return unsupported_reason(DecodeSpec(n, k, dtype, device_capability(device)))


@functools.cache
def check_ahead(device: torch.device) -> Future[None] | None:
    """Compile and try a GPU's kernels from now on, in a thread: a server reads its weights meanwhile, and `prepare` waits.

    device: with its index. None where there is nothing to do.
    """
    if device.type != "cuda":
        return None

    def check() -> None:
        with torch.cuda.device(device):
            decode_bitplane.device_path(device)
            prefill_int8.device_path(device)

    pool = ThreadPoolExecutor(1, "tilequant-check")
    future = pool.submit(check)
    pool.shutdown(wait=False)
    return future


def prepare(
    w: PackedWeight,
    transforms: Tensor,
    dtype: torch.dtype,
    activation: str,
    *,
    smoothing: Tensor | None = None,
    int8_copy: bool = False,
) -> LinearWeight:
    """Arrange a packed weight for serving on the device where it lies, and compile what its kernels need.

    transforms: [n, 64, 64] float64, addressed by `w.output_transform`; dtype: the model's
    smoothing: [K] float32, by which long prompts divide their inputs before INT8; None for none
    int8_copy: keep what long products expand, 8 bits a weight, instead of a workspace; nothing where no kernel runs
    """
    device, n, k = w.plane0.device, w.out_features, w.in_features
    if portable_reason(n, k, dtype, device, activation) is not None:
        dense = portable.dequantize(replace(w, input_rotation=None), transforms, dtype)
        return LinearWeight(dense, portable.prepare(w, transforms), w.input_rotation)
    if (checked := check_ahead(device)) is not None:
        checked.result()
    # Now: a captured graph must not meet the compiler. Rotated activations of the graded product are float32.
    graded = decode_bitplane.prepare(w, transforms)
    decode_bitplane.make_ready(graded, dtype if w.input_rotation is None else torch.float32)
    if w.input_rotation is not None:
        rotate(torch.zeros(1, k, dtype=dtype, device=device), w.input_rotation)  # the kernel has one form for every shape
    prefill_int8.compile_kernels(device, dtype, k, smoothing is not None, w.input_rotation)
    if not int8_copy:
        prefill_int8.reserve(device, n, k)
    static = prefill_int8.prepare(w, graded, smoothing=smoothing)
    copy = prefill_int8.expanded(graded, static) if int8_copy else None
    prefill_int8.warm(graded, static, dtype, copy)
    return LinearWeight(static, graded, w.input_rotation, copy)


def packed(graded: DecodeWeight | PortableWeight, transforms: Tensor) -> PackedWeight:
    """What `prepare` got, of either form, without its `input_rotation`: bit for bit, on the device where it lies."""
    return (decode_weight if isinstance(graded, DecodeWeight) else portable).packed(graded, transforms)  # type: ignore[arg-type]


def rotate(rows: Tensor, table: Tensor) -> Tensor:
    """x V for every 64 inputs, in one launch on a GPU. rows: [M, K]; table: [64] uint8 -> [M, K] float32"""
    if not rows.is_cuda:
        return layout.rotate_inputs(rows, table)
    from vllm_tilequant.kernels import rotation  # Triton: not everywhere

    return rotation.rotate_rows(rows.contiguous(), table)


def takes_graded(rows: int, graded_rows: int) -> bool:
    """Whether a call with `rows` tokens is graded; `graded_rows` 0 turns grading off everywhere (profile `off`)."""
    return 0 < rows <= graded_rows


def tile_linear(
    x: Tensor,
    w: LinearWeight,
    bias: Tensor | None,
    thresholds: Tensor,
    *,
    graded_rows: int,
    activation: str,
    prefill_activation: str = "token_smooth",
    gemm: Gemm | None = None,
) -> Tensor:
    """y = x W^T + bias over a tile-quantized weight. x: [..., K] float -> [..., N] in x's dtype.

    thresholds: [4] float32 of the active profile; graded_rows: the limit of the graded path, 0 for none;
    activation: `group64` (INT8 per row and 64 inputs) or `none`; prefill_activation and gemm as `prefill_linear` takes them.
    """
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    graded = takes_graded(rows.shape[0], graded_rows)
    if w.input_rotation is not None and (graded or isinstance(w.static, Tensor)):
        # Otherwise the prefill does, in the launch that quantises its rows.
        rows = rotate(rows, w.input_rotation)
        rows = rows if graded else rows.to(x.dtype)
    if graded and isinstance(w.graded, DecodeWeight):
        y = decode_bitplane.decode_linear(rows, w.graded, bias, thresholds)
    elif graded:
        assert isinstance(w.graded, PortableWeight)
        y = portable.graded_linear(rows, w.graded, bias, thresholds, activation=activation)
    elif isinstance(w.static, Tensor):
        y = portable.static_linear(rows, w.static, bias, activation=activation)
    elif rows.shape[0] == 0:
        y = rows.new_empty(0, w.out_features)
    else:
        assert isinstance(w.graded, DecodeWeight)
        y = prefill_int8.prefill_linear(
            rows, w.graded, w.static, bias, rotation=w.input_rotation, activation=prefill_activation, gemm=gemm, codes=w.copy
        )
    y = y if y.dtype == x.dtype else y.to(x.dtype)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])

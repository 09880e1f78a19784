"""Which product a call takes, and in which form a weight is kept for it: pure functions of rows, device and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_tilequant.kernels import decode_bitplane, layout, portable
from vllm_tilequant.kernels.capability import DecodeSpec, device_capability, unsupported_reason
from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.layout import PackedWeight
from vllm_tilequant.kernels.portable import PortableWeight
from vllm_tilequant.kernels.tuning import decode_config

#: Rows up to which the graded product is used. A captured graph or a batch above it runs at stored precision.
GRADED_ROWS = 8


@dataclass(frozen=True)
class LinearWeight:
    """One linear as it is served.

    dense: [N, K] in the model's dtype, at stored precision, for the static product
    graded: the form that the graded kernel reads, or the portable one where there is no kernel
    input_rotation: [64] uint8, what rotates the inputs before either product (both forms belong to rotated inputs), or None
    """

    dense: Tensor
    graded: DecodeWeight | PortableWeight
    input_rotation: Tensor | None = None


def portable_reason(n: int, k: int, dtype: torch.dtype, device: torch.device, activation: str) -> str | None:
    """Why the graded product of a weight [n, k] takes plain torch; None where a GPU kernel runs it."""
    if activation != "group64":
        return f"activation {activation!r}: the kernels compute with INT8 activations"
    return unsupported_reason(DecodeSpec(n, k, dtype, device_capability(device)))


def prepare(w: PackedWeight, transforms: Tensor, dtype: torch.dtype, activation: str) -> LinearWeight:
    """Arrange a packed weight for serving on the device where it lies, and compile what its kernel needs.

    transforms: [n, 64, 64] float64, addressed by `w.output_transform`; dtype: the model's
    """
    dense = portable.dequantize(replace(w, input_rotation=None), transforms, dtype)
    device = w.plane0.device
    if portable_reason(w.out_features, w.in_features, dtype, device, activation) is not None:
        return LinearWeight(dense, portable.prepare(w, transforms), w.input_rotation)
    # Now: a captured graph must not meet the compiler. Rotated activations are float32.
    read = dtype if w.input_rotation is None else torch.float32
    decode_bitplane.compile_kernels(device, read, decode_config(w.out_features, w.in_features, device))
    return LinearWeight(dense, decode_bitplane.prepare(w, transforms), w.input_rotation)


def takes_graded(rows: int, graded_rows: int) -> bool:
    """Whether a call with `rows` tokens is graded; `graded_rows` 0 turns grading off everywhere (profile `off`)."""
    return 0 < rows <= graded_rows


def tile_linear(
    x: Tensor, w: LinearWeight, bias: Tensor | None, thresholds: Tensor, *, graded_rows: int, activation: str
) -> Tensor:
    """y = x W^T + bias over a tile-quantized weight. x: [..., K] float -> [..., N] in x's dtype.

    thresholds: [4] float32 of the active profile; graded_rows: the limit of the graded path, 0 for none;
    activation: `group64` (INT8 per row and 64 inputs) or `none`.
    """
    rows = x.reshape(-1, x.shape[-1])
    graded = takes_graded(rows.shape[0], graded_rows)
    if w.input_rotation is not None:
        rows = layout.rotate_inputs(rows, w.input_rotation)
        rows = rows if graded else rows.to(x.dtype)
    if not graded:
        y = portable.static_linear(rows, w.dense, bias, activation=activation)
    elif isinstance(w.graded, DecodeWeight):
        y = decode_bitplane.decode_linear(rows, w.graded, bias, thresholds)
    else:
        y = portable.graded_linear(rows, w.graded, bias, thresholds, activation=activation)
    return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])

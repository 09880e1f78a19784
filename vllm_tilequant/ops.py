"""The custom op of the plugin: one opaque call per linear, which chooses its product by the rows it gets at run time.

vLLM traces a model once and drops all guards, so that a branch on the number of rows in `LinearMethod.apply` would be frozen at
whatever the trace saw. Inside an opaque op it stays a branch.
"""

# No `from __future__ import annotations` here: infer_schema reads the annotations as objects.

import functools
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch.library import Library, infer_schema, register_fake

from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.dispatch import LinearWeight
from vllm_tilequant.kernels.dispatch import tile_linear as dispatch
from vllm_tilequant.kernels.portable import PortableWeight
from vllm_tilequant.kernels.prefill_int8 import Call, Gemm, PrefillWeight

_NAMESPACE = "tilequant"


@functools.cache
def int8_gemm(device: torch.device) -> Gemm | None:
    """vLLM's CUTLASS product for the long prefill; None where it has none for INT8: before Ampere, from Blackwell on."""
    if device.type != "cuda" or find_spec("vllm") is None or not (8, 0) <= torch.cuda.get_device_capability(device) < (10, 0):
        return None
    from vllm import _custom_ops  # noqa: F401, defines what follows

    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        return None
    product = torch.ops._C.cutlass_scaled_mm.default  # `_custom_ops`' own function takes as long again to find that this serves

    def gemm(
        q: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        unit: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        out = torch.empty((q.shape[0], codes.shape[0]), dtype=dtype, device=q.device)
        product(out, q, codes.t(), scale, unit, bias)
        return out

    return gemm


_calls: dict[tuple[Any, ...], Call | None] = {}
_MOST_CALLS = 1 << 14


def _call(
    x: torch.Tensor, static: list[torch.Tensor], graded: list[torch.Tensor], out_features: int, activation: str
) -> Call | None:
    """What was made for these tensors; None where there is none for them."""
    key = (x.device, x.dtype, x.shape[1], out_features, activation, *map(_address, static), *map(_address, graded))
    if key not in _calls:
        if len(_calls) == _MOST_CALLS:
            _calls.clear()  # weights that are gone
        form = _decode_weight(graded, out_features, x.shape[1])
        _calls[key] = None
        if form.device == x.device:
            with suppress(NotImplementedError):
                _calls[key] = Call(form, PrefillWeight(*static), x.dtype, activation, int8_gemm(x.device))
    return _calls[key]


_address = torch.Tensor.data_ptr


def _decode_weight(tensors: list[torch.Tensor], out_features: int, in_features: int) -> DecodeWeight:
    codes, meta, factor, transform, table, arrivals = tensors
    return DecodeWeight(codes, meta, factor, transform, table, arrivals, out_features, in_features)


def _tile_linear(
    x: torch.Tensor,
    static: list[torch.Tensor],
    graded: list[torch.Tensor],
    kernel: bool,
    out_features: int,
    input_rotation: torch.Tensor | None,
    bias: torch.Tensor | None,
    thresholds: torch.Tensor,
    graded_rows: int,
    activation: str,
    prefill_activation: str,
    copy: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias, [..., K] -> [..., N].

    static, graded: with `kernel` the tensors of `PrefillWeight` and `DecodeWeight`, else the dense weight and those of
    `PortableWeight`, in order; copy: of `LinearWeight`.
    """
    x = x.contiguous()  # the products want rows without gaps; a caller may hand over a slice
    if kernel:
        if x.ndim == 2 and x.shape[0] > graded_rows and copy is None and input_rotation is None:
            call = _call(x, static, graded, out_features, prefill_activation)
            if call is not None and (y := call(x, static[0], bias)) is not None:
                return y
        w = LinearWeight(PrefillWeight(*static), _decode_weight(graded, out_features, x.shape[-1]), input_rotation, copy)
    else:
        w = LinearWeight(static[0], PortableWeight(*graded), input_rotation)
    return dispatch(
        x,
        w,
        bias,
        thresholds,
        graded_rows=graded_rows,
        activation=activation,
        prefill_activation=prefill_activation,
        gemm=int8_gemm(x.device),
    )


def _tile_linear_fake(
    x: torch.Tensor,
    static: list[torch.Tensor],
    graded: list[torch.Tensor],
    kernel: bool,
    out_features: int,
    input_rotation: torch.Tensor | None,
    bias: torch.Tensor | None,
    thresholds: torch.Tensor,
    graded_rows: int,
    activation: str,
    prefill_activation: str,
    copy: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


# A process may import this module twice (a reload, or under two names); an op may be defined only once.
if not hasattr(getattr(torch.ops, _NAMESPACE), "tile_linear"):
    _library = Library(_NAMESPACE, "FRAGMENT")  # must live as long as the op
    _library.define("tile_linear" + infer_schema(_tile_linear, mutates_args=()))
    _library.impl("tile_linear", _tile_linear, dispatch_key="CompositeExplicitAutograd")
    register_fake(f"{_NAMESPACE}::tile_linear", _tile_linear_fake, lib=_library)

tile_linear = torch.ops.tilequant.tile_linear

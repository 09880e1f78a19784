"""The custom op of the plugin: one opaque call per linear, which chooses its product by the rows it gets at run time.

vLLM traces a model once and drops all guards, so that a branch on the number of rows in `LinearMethod.apply` would be frozen at
whatever the trace saw. Inside an opaque op it stays a branch.
"""

# No `from __future__ import annotations` here: infer_schema reads the annotations as objects.

import torch
from torch.library import Library, infer_schema, register_fake

from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.dispatch import LinearWeight
from vllm_tilequant.kernels.dispatch import tile_linear as dispatch
from vllm_tilequant.kernels.portable import PortableWeight

_NAMESPACE = "tilequant"


def _tile_linear(
    x: torch.Tensor,
    dense: torch.Tensor,
    graded: list[torch.Tensor],
    kernel: bool,
    input_rotation: torch.Tensor | None,
    bias: torch.Tensor | None,
    thresholds: torch.Tensor,
    graded_rows: int,
    activation: str,
) -> torch.Tensor:
    """y = x W^T + bias, [..., K] -> [..., N]; graded: the tensors of `DecodeWeight` (kernel) or `PortableWeight`, in order."""
    form: DecodeWeight | PortableWeight
    if kernel:
        codes, meta, factor, transform, table = graded
        form = DecodeWeight(codes, meta, factor, transform, table, *dense.shape)
    else:
        form = PortableWeight(*graded)
    x = x.contiguous()  # the products want rows without gaps; a caller may hand over a slice
    weight = LinearWeight(dense, form, input_rotation)
    return dispatch(x, weight, bias, thresholds, graded_rows=graded_rows, activation=activation)


def _tile_linear_fake(
    x: torch.Tensor,
    dense: torch.Tensor,
    graded: list[torch.Tensor],
    kernel: bool,
    input_rotation: torch.Tensor | None,
    bias: torch.Tensor | None,
    thresholds: torch.Tensor,
    graded_rows: int,
    activation: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], dense.shape[0]))


# A process may import this module twice (a reload, or under two names); an op may be defined only once.
if not hasattr(getattr(torch.ops, _NAMESPACE), "tile_linear"):
    _library = Library(_NAMESPACE, "FRAGMENT")  # must live as long as the op
    _library.define("tile_linear" + infer_schema(_tile_linear, mutates_args=()))
    _library.impl("tile_linear", _tile_linear, dispatch_key="CompositeExplicitAutograd")
    register_fake(f"{_NAMESPACE}::tile_linear", _tile_linear_fake, lib=_library)

tile_linear = torch.ops.tilequant.tile_linear

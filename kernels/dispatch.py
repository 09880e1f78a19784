"""Which product a call takes: one pure function of the number of rows, shared by the plugin and the transformers model."""

from __future__ import annotations

from torch import Tensor

from vllm_tilequant.kernels.portable import PortableWeight, graded_linear, static_linear

#: Rows up to which the graded product is used. A captured graph or a batch above it runs at stored precision.
GRADED_ROWS = 8


def takes_graded(rows: int, graded_rows: int) -> bool:
    """Whether a call with `rows` tokens is graded; `graded_rows` 0 turns grading off everywhere (profile `off`)."""
    return 0 < rows <= graded_rows


def tile_linear(
    x: Tensor,
    w: PortableWeight,
    bias: Tensor | None,
    thresholds: Tensor,
    *,
    graded_rows: int,
    activation: str,
) -> Tensor:
    """y = x W^T + bias over a tile-quantized weight. x: [..., K] float -> [..., N] in x's dtype.

    thresholds: [4] float32 of the active profile; graded_rows: the limit of the graded path, 0 for none;
    activation: `group64` (INT8 per row and 64 inputs) or `none`.
    """
    rows = x.reshape(-1, x.shape[-1])
    if takes_graded(rows.shape[0], graded_rows):
        y = graded_linear(rows, w, bias, thresholds, activation=activation)
    else:
        y = static_linear(rows, w, bias, activation=activation)
    return y.view(*x.shape[:-1], y.shape[-1])

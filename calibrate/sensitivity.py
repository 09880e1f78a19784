"""Which tiles the loss feels: scores from loss gradients, computed with batched matrix products.

R_jk = sum over rows of 1/2 sum_o ( (g_j U_j)_o (D_jk x_k)_o )^2 (AlignQuant, its second-order risk of a tile), with D the
difference between the tile's 4-bit and 8-bit reconstructions, x the INT8 activations that inference sees, and g the gradient of
the summed token loss at the linear's output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tilequant.kernels.layout import rotate_outputs
from vllm_tilequant.kernels.portable import fake_quantize
from vllm_tilequant.schema import TILE

_CHUNK_ELEMENTS = 1 << 26  # of the intermediate [input tiles, rows, outputs]: 256 MiB in float32


def tile_scores(x: Tensor, gradient: Tensor, delta: Tensor) -> Tensor:
    """Scores of all tiles of one linear from some rows.

    x: [M, K] inputs; gradient: [M, N] loss gradients in the rotated basis; delta: [N, K] W4 - W8, rotated
    -> [N/64, K/64] float64
    """
    m, n = gradient.shape
    k_tiles = x.shape[1] // TILE
    xs = fake_quantize(x).view(m, k_tiles, TILE).transpose(0, 1)  # [K/64, M, 64]
    ds = delta.view(n, k_tiles, TILE).permute(1, 2, 0)  # [K/64, 64, N]
    step = max(1, _CHUNK_ELEMENTS // (m * n))
    scores = []
    for k in range(0, k_tiles, step):
        change = torch.bmm(xs[k : k + step], ds[k : k + step]).mul_(gradient)  # [step, M, N]
        scores.append(change.square_().sum(1).view(-1, n // TILE, TILE).sum(2))
    return 0.5 * torch.cat(scores).T.double()


def rotate_gradient(gradient: Tensor, matrix: Tensor) -> Tensor:
    """Loss gradients at the outputs in the rotated basis: g U per output tile. gradient: [M, N]; matrix: [64, 64]."""
    return rotate_outputs(gradient.T.contiguous(), matrix).T.contiguous()

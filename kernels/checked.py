"""A small weight with everything in it, on which kernels are tried where they are going to serve.

Kernels are compiled on the user's machine for the user's driver, and a wrong one would only be seen as bad text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tilequant.kernels.layout import PackedWeight, expand_tiles, pack, transform_stack
from vllm_tilequant.schema import TILE, Transform


def checked_weight(k_tiles: int = 3) -> tuple[PackedWeight, Tensor]:
    """[576, 64 k_tiles] with tiles of every width, rotated and not, more than one block of outputs; transforms [2, 64, 64]."""
    g = torch.Generator().manual_seed(0)
    bits = torch.tensor([2, 4, 6, 8], dtype=torch.uint8)[torch.randint(4, (9, k_tiles), generator=g)]
    codes = torch.randint(256, (9 * TILE, k_tiles * TILE), dtype=torch.uint8, generator=g) >> (8 - expand_tiles(bits))
    scale = torch.rand(bits.shape, dtype=torch.float32, generator=g) + 0.5
    packed = pack(codes, bits, scale, torch.arange(9, dtype=torch.uint8) % 2)
    return packed, transform_stack([Transform(kind="identity"), Transform(kind="randomized_hadamard", seed=1)])

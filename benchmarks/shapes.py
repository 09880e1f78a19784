"""What the kernel benchmarks measure: shapes, maps and level mixes, drawn with fixed seeds on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tilequant.kernels import layout
from vllm_tilequant.kernels.layout import PackedWeight
from vllm_tilequant.schema import TILE, WORDS_PER_TILE_PLANE, Transform, extension_planes

#: N x K. gate+up and down of an 8B model, gate+up of a 14B model.
LARGE = ((28672, 4096), (4096, 14336), (35840, 5120))
#: qkv and o of an 8B model, qkv of a 3B model.
SMALL = ((6144, 4096), (4096, 4096), (5120, 3072))
SHARE_OF_4_BIT_TILES = 0.6
#: Shares of channels at 0, 2, 4, 6, 8 bits under 8-bit tiles, per target of loaded bits; None: everything stored is read.
LEVEL_SHARES: dict[str, tuple[float, ...] | None] = {
    "4.0": (0.12, 0.06, 0.30, 0.42, 0.10),
    "3.0": (0.22, 0.13, 0.44, 0.19, 0.02),
    "2.2": (0.35, 0.20, 0.36, 0.08, 0.01),
    "full": None,
}
#: How far from its target what one row loads may be; thresholds are moved by so much at a time.
BITS_APART, MOVE = 0.12, 0.005
#: Bars of the ratio to Marlin 4-bit at one row: (large shapes, small shapes).
BARS = {"4.0": (0.80, 1.10), "3.0": (0.68, 1.0), "2.2": (0.58, 0.95), "full": (1.10, 1.30)}
#: The same at 28672 x 4096 for more rows.
BARS_ROWS = {(2, "4.0"): 1.0, (2, "3.0"): 0.9, (4, "4.0"): 1.0, (4, "3.0"): 0.9, (8, "4.0"): 1.1, (8, "3.0"): 1.1}

TRANSFORMS = layout.transform_stack([Transform(kind="randomized_hadamard", seed=1)])


@dataclass(frozen=True)
class Drawn:
    """A weight with an i.i.d. map, and thresholds that give standard normal activations i.i.d. levels."""

    weight: PackedWeight
    thresholds: Tensor


def draw_map(n: int, k: int, seed: int = 0) -> Tensor:
    """[N/64, K/64] uint8, each tile 4-bit with the benchmark's share."""
    g = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(n // TILE, k // TILE, generator=g) < SHARE_OF_4_BIT_TILES, 4, 8).to(torch.uint8)


def draw_weight(n: int, k: int, device: str, seed: int = 0) -> PackedWeight:
    """Random codes under an i.i.d. map; every tile rotated by the same transform."""
    g = torch.Generator(device).manual_seed(seed)
    bits = draw_map(n, k, seed).to(device)
    rows = int(sum(extension_planes(b) * int((bits == b).sum()) for b in (4, 8)))
    return PackedWeight(
        draw_words((k, n // 16), g),
        draw_words((k, n // 16), g),
        draw_words((rows, WORDS_PER_TILE_PLANE), g),
        bits,
        (torch.rand(bits.shape, device=device, generator=g) * 0.5 + 0.75) * torch.exp2(-bits.float()),
        torch.zeros(n // TILE, dtype=torch.uint8, device=device),
    )


def draw_words(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=generator.device, generator=generator)


def thresholds_for(name: str) -> Tensor:
    """[4] float32: quantiles of |N(0, 1)| that give the shares of `LEVEL_SHARES[name]`; below zero for `full`."""
    shares = LEVEL_SHARES[name]
    if shares is None:
        return torch.full((4,), -1.0)
    below, out = 0.0, []
    for share in shares[:-1]:
        below += share
        out.append(math.sqrt(2) * float(torch.erfinv(torch.tensor(below, dtype=torch.float64))))
    return torch.tensor(out)


def draw_rows(m: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> Tensor:
    """[M, K] standard normal."""
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def loaded_bits(x: Tensor, thresholds: Tensor, tile_bits: Tensor) -> float:
    """Code bits per weight that one call reads: the union of what its rows want, a word read once."""
    from vllm_tilequant.kernels.reference import levels_ref

    union = levels_ref(x, thresholds).amax(0, keepdim=True)
    return float(layout.loaded_code_bits(union, tile_bits)) / (tile_bits.numel() * TILE * TILE)


def thresholds_counted(name: str, row: Tensor, tile_bits: Tensor) -> Tensor:
    """`thresholds_for` where the row lies, all moved by one factor, the nearest to 1 with which its counted bits are within
    `BITS_APART` of the target. row: [1, K]; tile_bits: [N/64, K/64]"""
    drawn = thresholds_for(name).to(row.device)
    if LEVEL_SHARES[name] is None:
        return drawn
    above = loaded_bits(row, drawn, tile_bits) > float(name)
    moves = (drawn * (1 + (MOVE if above else -MOVE) * i) for i in range(int(0.5 / MOVE)))
    return next(t for t in moves if abs(loaded_bits(row, t, tile_bits) - float(name)) <= BITS_APART)

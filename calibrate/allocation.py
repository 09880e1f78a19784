"""The model-wide budget: how many tiles become 4-bit, and which."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_tilequant.calibrate.sensitivity import check_scores
from vllm_tilequant.schema import LEVELS, TILE

#: Bits of the tiles that the budget makes narrow; the others get the checkpoint's `max_bits`.
NARROW = 4
_TILE_BITS = 32 + 8  # beside its codes: a float32 scale and a byte of the map
_OUTPUT_TILE_BITS = 8  # the index of its transform


def narrow_tiles(
    shapes: dict[str, tuple[int, int]],
    w4_fraction: float,
    stored_bits: float | None,
    wide: int,
    profiles: int,
    smooths: bool = False,
) -> int:
    """How many tiles of the whole model become narrow.

    shapes: module -> (N/64, K/64). Without `stored_bits`, round(f * tiles); with it, the fewest that keep everything stored
    (codes, scales, maps, transforms, thresholds of all profiles, with `smooths` a smoothing for each) within so many bits per
    weight. Raises `ValueError` when even narrow tiles everywhere need more.
    """
    tiles = sum(n * k for n, k in shapes.values())
    if stored_bits is None:
        return round(w4_fraction * tiles)
    beside = sum(n * k * _TILE_BITS + n * _OUTPUT_TILE_BITS + profiles * (len(LEVELS) - 1) * 32 for n, k in shapes.values())
    beside += sum(k * TILE * 8 for _, k in shapes.values()) if smooths else 0
    per_bit = TILE * TILE
    missing = beside + tiles * wide * per_bit - stored_bits * tiles * per_bit
    if missing <= 0:
        return 0
    needed = math.ceil(missing / ((wide - NARROW) * per_bit) - 1e-9) if wide > NARROW else tiles + 1
    if needed > tiles:
        least = NARROW + beside / (tiles * per_bit)
        raise ValueError(f"stored_bits {stored_bits} cannot be met: with 4 bits everywhere this model stores {least:.4f}")
    return needed


def allocate(scores: dict[str, Tensor], narrow: int, wide: int = 8) -> dict[str, Tensor]:
    """Give 4 bits to the `narrow` lowest-scored tiles of the whole model, `wide` bits to the rest.

    scores: module -> [N/64, K/64], finite and >= 0; -> module -> [N/64, K/64] uint8. Ties go by (module, j, k), so that the
    map is reproducible to the byte. Raises `ValueError` naming modules with non-finite, negative or all-zero scores.
    """
    check_scores(scores)
    flat = torch.cat([r.reshape(-1).double().cpu() for r in scores.values()])
    chosen = torch.zeros(flat.numel(), dtype=torch.bool)
    chosen[flat.argsort(stable=True)[:narrow]] = True
    out, start = {}, 0
    for name, r in scores.items():
        part = chosen[start : start + r.numel()].view(r.shape)
        out[name] = torch.where(part, NARROW, wide).to(torch.uint8)
        start += r.numel()
    return out


def pool(scores: dict[str, Tensor], unit: str) -> dict[str, Tensor]:
    """Every tile's score replaced by the mean of its unit: `row` (one output tile), `column` (one input tile) or `module`.

    scores: module -> [N/64, K/64], also the result; `tile` leaves them as they are
    """
    axes = {"tile": None, "row": (1,), "column": (0,), "module": (0, 1)}[unit]
    return scores if axes is None else {n: r.mean(axes, keepdim=True).expand_as(r) for n, r in scores.items()}


def random_scores(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """A control: scores that know nothing. shapes: module -> (N/64, K/64)."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=g) + 1e-9 for name, shape in shapes.items()}

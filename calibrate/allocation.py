"""The model-wide budget: which tiles become 4-bit."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(scores: dict[str, Tensor], w4_fraction: float) -> dict[str, Tensor]:
    """Give 4 bits to the round(f * tiles) lowest-scored tiles of the whole model, 8 bits to the rest.

    scores: module -> [N/64, K/64], finite and >= 0; -> module -> [N/64, K/64] uint8. Ties go by (module, j, k), so that the
    map is reproducible to the byte. Raises `ValueError` naming modules with non-finite, negative or all-zero scores.
    """
    bad = [name for name, r in scores.items() if not bool((r.isfinite() & (r >= 0)).all()) or not bool(r.any())]
    if bad:
        raise ValueError(f"tile scores are not finite, negative or all zero in {bad}: the loss gradients never reached them")
    flat = torch.cat([r.reshape(-1).double().cpu() for r in scores.values()])
    chosen = torch.zeros(flat.numel(), dtype=torch.bool)
    chosen[flat.argsort(stable=True)[: round(w4_fraction * flat.numel())]] = True
    out, start = {}, 0
    for name, r in scores.items():
        part = chosen[start : start + r.numel()].view(r.shape)
        out[name] = torch.where(part, 4, 8).to(torch.uint8)
        start += r.numel()
    return out


def random_scores(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """A control: scores that know nothing. shapes: module -> (N/64, K/64)."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=g) + 1e-9 for name, shape in shapes.items()}

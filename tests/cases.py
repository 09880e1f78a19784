"""The shapes, maps, levels and activations that every product is tested at."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tilequant.kernels import layout
from vllm_tilequant.schema import NEVER, Transform

#: Rows: one, two, odd, just below, at and beyond the graded limit.
ROWS = (1, 2, 3, 7, 8, 17)
#: (N, K): one tile, off any block size on either axis, wide and tall.
SHAPES = ((64, 64), (192, 64), (64, 320), (320, 192), (576, 1536))
MAPS = ("all4", "all8", "mixed48", "mixed2468", "all2")
THRESHOLDS = {
    "graded": (0.15, 0.5, 1.0, 2.0),
    "full": (-1.0, -1.0, -1.0, -1.0),
    "none": (NEVER, NEVER, NEVER, NEVER),
    "skip2and6": (0.3, 0.3, 1.2, 1.2),
}
TRANSFORMS = layout.transform_stack(
    [
        Transform(kind="identity"),
        Transform(kind="randomized_hadamard", seed=1),
        Transform(kind="randomized_hadamard", seed=2),
    ]
)


@dataclass(frozen=True)
class Case:
    codes: Tensor  # [N, K] uint8
    weight: layout.PackedWeight
    matrices: Tensor  # [N/64, 64, 64] float64


def make_map(kind: str, n_tiles: int, k_tiles: int, generator: torch.Generator) -> Tensor:
    choices = {"all2": [2], "all4": [4], "all8": [8], "mixed48": [4, 8], "mixed2468": [2, 4, 6, 8]}[kind]
    index = torch.randint(len(choices), (n_tiles, k_tiles), generator=generator)
    return torch.tensor(choices, dtype=torch.uint8)[index]


def make_case(n: int, k: int, kind: str = "mixed48", seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    bits = make_map(kind, n // 64, k // 64, g)
    codes = torch.randint(256, (n, k), dtype=torch.uint8, generator=g) >> (8 - layout.expand_tiles(bits))
    scale = torch.rand(n // 64, k // 64, generator=g) * torch.exp2(-bits.float()) + 1e-4
    transform = torch.randint(len(TRANSFORMS), (n // 64,), dtype=torch.uint8, generator=g)
    weight = layout.pack(codes, bits, scale, transform)
    return Case(codes, weight, TRANSFORMS[transform.long()])


def make_rows(m: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Activations with what real ones have: outliers, exact zeros, a group of zeros, and (from two rows on) a zero row."""
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(m, k, generator=g) * torch.exp(torch.randn(1, k, generator=g) * 0.5)
    x[:, torch.randint(k, (max(1, k // 50),), generator=g)] *= 20
    x[:, torch.randint(k, (max(1, k // 20),), generator=g)] = 0
    if k > 64:
        x[:, :64] = 0
    if m > 1:
        x[m // 2] = 0
    return x.to(dtype)


@contextlib.contextmanager
def default_dtype(dtype):
    """vLLM sets torch's default dtype to the model's while it builds layers and loads weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

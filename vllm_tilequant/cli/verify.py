"""`tilequant verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_tilequant.checkpoint import verify as judge


def verify(folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)]) -> None:
    """Read every tensor of a checkpoint and list every fault; exit code 1 if there is one."""
    summary = judge.verify(folder)
    tiles = sum(summary.tile_counts.values())
    shares = ", ".join(f"{n / tiles:.1%} at {bits} bits" for bits, n in summary.tile_counts.items() if n)
    print(f"{folder} is a sound tilequant checkpoint")
    print(f"  {summary.modules} quantized linears, {summary.dense_tensors} dense tensors")
    print(f"  {tiles} tiles: {shares}; {summary.stored_bits:.3f} stored bits per weight")
    print(f"  profiles {', '.join(summary.profiles)}; default {summary.default_profile}")

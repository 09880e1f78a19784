"""`tilequant verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vllm_tilequant.checkpoint import verify as judge
from vllm_tilequant.cli.output import JsonFlag, print_json, tile_shares


def verify(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    as_json: JsonFlag = False,
) -> None:
    """Read every tensor of a checkpoint and list every fault; exit code 1 if there is one."""
    summary = judge.verify(folder)
    if as_json:
        print_json(asdict(summary))
        return
    print(f"{folder} is a sound tilequant checkpoint")
    print(f"  {summary.modules} quantized linears, {summary.dense_tensors} dense tensors")
    print(
        f"  {sum(summary.tile_counts.values())} tiles: {tile_shares(summary.tile_counts)}; "
        f"{summary.stored_bits:.3f} stored bits per weight"
    )
    print(f"  profiles {', '.join(summary.profiles)}; default {summary.default_profile}")

"""`tilequant verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vllm_tilequant.checkpoint import verify as judge
from vllm_tilequant.checkpoint.deep import MAX_ERROR
from vllm_tilequant.checkpoint.manifest import MANIFEST
from vllm_tilequant.cli.output import JsonFlag, print_errors, print_json, tile_shares


def verify(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    deep: Annotated[
        Path | None,
        typer.Option(metavar="SOURCE", help="Folder of the original model: also unpack every weight and compare."),
    ] = None,
    max_error: Annotated[float, typer.Option(help="Largest relative error of a weight that --deep accepts.")] = MAX_ERROR,
    as_json: JsonFlag = False,
) -> None:
    """Read every tensor of a checkpoint and list every fault; exit code 1 if there is one.

    Checks hashes where a SHA256SUMS is there, completeness, shapes, ranges, maps against payload, finite values. With --deep
    also the relative error of every weight against the source model, and that what is dense equals the source.
    """
    summary = judge.verify(folder, deep, max_error)
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
    print(f"  {MANIFEST}: {'all files match' if summary.manifest else 'none there (tilequant manifest writes one)'}")
    if summary.errors is not None:
        print(f"  {summary.equal_to_source} dense tensors and biases equal those of {deep}")
        print_errors(summary.errors, "relative error of the weights, |W^ - W| / |W|")

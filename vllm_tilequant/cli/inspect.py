"""`tilequant inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_tilequant.checkpoint import inspect as look
from vllm_tilequant.checkpoint.parallel import Legality, pipeline_parallel, tensor_parallel
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.cli.output import JsonFlag, print_json, print_table, sizes, tile_shares

_SHOWN = 8


def inspect(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    tp: Annotated[int | None, typer.Option(min=1, help="Say whether this tensor-parallel size is legal.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Say whether this pipeline-parallel size is legal.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print every quantized linear.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what a checkpoint is made of: bits per weight with every byte counted, tiles, profiles, what is dense and why.

    Reads config and headers only, so it is quick for any size. Exit code 1 if the folder is no sound checkpoint or a size
    given with --tp or --pp is not legal; the modules in the way and the next legal sizes are named.
    """
    data = look.inspect(folder)
    asked = {}
    checkpoint = Checkpoint.open(folder)
    if tp is not None:
        asked["tensor_parallel"] = tensor_parallel(checkpoint, tp)
    if pp is not None:
        asked["pipeline_parallel"] = pipeline_parallel(checkpoint, pp)
    if as_json:
        print_json(data | {k: {"size": v.size, "faults": v.faults, "legal_sizes": v.legal} for k, v in asked.items()})
    else:
        _print(data)
        if layers:
            _print_layers(data["modules"])
        for what, legality in asked.items():
            _print_legality(what.replace("_", "-"), legality)
    if any(v.faults for v in asked.values()):
        raise typer.Exit(1)


def _print(data: dict[str, Any]) -> None:
    producer = ", ".join(f"{k} {v}" for k, v in data["producer"].items() if isinstance(v, str))
    transforms = ", ".join(f"{n} {kind}" for kind, n in data["transforms"].items())
    print(f"{data['folder']}: {data['architecture']}, tilequant format {data['format_version']}")
    print(f"  written by   {producer or 'unknown'}")
    print(f"  profiles     {', '.join(data['profiles'])}; default {data['default_profile']}; also full, off")
    print(f"  transforms   {transforms}; inputs rotated in {data['rotated_inputs']} of {len(data['modules'])} linears")
    if data["folded_inputs"]:
        print(f"  diagonal     folded into the inputs of {data['folded_inputs']} linears: adapters of the source do not fit")
    print(f"  tiles        {sum(data['tile_counts'].values())}: {tile_shares(data['tile_counts'])}")
    print(
        f"  linears      {data['stored_bits']:.3f} stored bits per weight ({data['stored_code_bits']:.3f} codes, the rest "
        "scales, maps, transforms, thresholds)"
    )
    print(f"  whole model  {data['model_bits_per_parameter']:.3f} bits per parameter, {sizes(data['tensor_bytes'])} of tensors")
    rows = [
        (name, sizes(p["bytes"]), f"{p['parameters']:,}", f"{8 * p['bytes'] / p['parameters']:.3f}" if p["parameters"] else "")
        for name, p in data["parts"].items()
    ]
    rows += [("file headers", sizes(data["header_bytes"]), "", ""), ("other files", sizes(data["other_file_bytes"]), "", "")]
    print_table("where the bytes are", {"part": False, "bytes": True, "parameters": True, "bits each": True}, rows)
    widths = sorted(data["tile_counts"])
    print_table(
        "tiles by projection",
        {"projection": False, **{f"{b} bits": True for b in widths}, "share at 4 or less": True},
        [
            (name, *(str(c.get(b, 0)) for b in widths), f"{sum(n for b, n in c.items() if b <= 4) / sum(c.values()):.1%}")
            for name, c in data["by_projection"].items()
        ],
    )
    print("not quantized:")
    for name, why in data["skipped"].items():
        print(f"  {name}: {why}")


def _print_layers(rows: list[dict[str, Any]]) -> None:
    print_table(
        "quantized linears",
        {"name": False, "N": True, "K": True, "tiles": False, "bits": True, "bytes": True, "bias": False, "inputs": False},
        [
            (
                r["name"],
                str(r["out_features"]),
                str(r["in_features"]),
                " ".join(f"{n}x{b}" for b, n in r["tile_counts"].items()),
                f"{r['stored_bits']:.3f}",
                sizes(r["bytes"]),
                "yes" if r["bias"] else "",
                "rotated" if r["rotated_inputs"] else "",
            )
            for r in rows
        ],
        caption="tiles: number x bits",
    )


def _print_legality(what: str, legality: Legality) -> None:
    below, above = legality.nearest
    if not legality.faults:
        print(f"{what} size {legality.size}: legal")
    else:
        print(f"{what} size {legality.size}: not legal")
        for fault in legality.faults[:_SHOWN]:
            print(f"  {fault}")
        if len(legality.faults) > _SHOWN:
            print(f"  ... and {len(legality.faults) - _SHOWN} more")
    print(f"  next legal sizes: {below or 'none'} below, {above or 'none'} above")

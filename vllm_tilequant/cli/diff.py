"""`tilequant diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_tilequant.checkpoint import diff as compare
from vllm_tilequant.cli.output import JsonFlag, print_json, print_table

_SHOWN = 10


def diff(
    first: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The other one.", show_default=False)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two checkpoints: config, maps, scales, thresholds, codes, dense tensors; counts and the largest changes.

    Transforms are compared by what they are, not by their place in the list; profiles by name.
    """
    data = compare.diff(first, second)
    if as_json:
        print_json(data)
    elif data["identical"]:
        print(f"{first} and {second} say the same: {data['compared_modules']} linears, all dense tensors, config")
    else:
        _print(data)
    if exit_code and not data["identical"]:
        raise typer.Exit(1)


def _print(data: dict[str, Any]) -> None:
    before, after = data["stored_bits"]
    print(f"stored bits per weight {before:.3f} -> {after:.3f}; {data['compared_modules']} linears compared")
    for field, (x, y) in data["config"].items():
        print(f"  config {field}: {x!r} -> {y!r}"[:200])
    for key in ("modules_only_in_first", "modules_only_in_second", "modules_of_other_shape"):
        if data[key]:
            print(f"  {key.replace('_', ' ')}: {len(data[key])} ({', '.join(data[key][:3])}...)")
    if data["map_changes"]:
        print("  tiles by change of bits: " + ", ".join(f"{k}: {n}" for k, n in data["map_changes"].items()))
    modules = data["modules"]
    if modules:
        kinds = ("map", "scale", "codes_changed", "transform", "input_transform", "thresholds", "bias")
        counts = ", ".join(f"{k.replace('_', ' ')} {sum(k in row for row in modules.values())}" for k in kinds)
        print(f"  linears that differ: {len(modules)} ({counts})")
        worst = sorted(modules, key=lambda n: (-modules[n].get("tiles_changed", 0), -_change(modules[n].get("scale"))))
        headings = {"largest changes": False, "tiles": True, "codes": True, "scale": True, "thresholds": True}
        rows = []
        for name in worst[:_SHOWN]:
            row = modules[name]
            thresholds = max((_change(t) for t in row.get("thresholds", {}).values()), default=0.0)
            moved = (str(row.get("tiles_changed", 0)), str(row.get("codes_changed", 0)))
            rows.append((name, *moved, f"{_change(row.get('scale')):.2%}", f"{thresholds:.2%}"))
        print_table("", headings, rows, caption="codes, scales: of tiles with equal bits; percentages: largest relative change")
    for name, how in list(data["dense"].items())[:_SHOWN]:
        print(f"  dense {name}: {how}")
    if len(data["dense"]) > _SHOWN:
        print(f"  ... and {len(data['dense']) - _SHOWN} more dense tensors")


def _change(entry: dict[str, float] | None) -> float:
    return entry["largest_relative"] if entry else 0.0

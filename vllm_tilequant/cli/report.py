"""`tilequant report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_tilequant.checkpoint import report as make
from vllm_tilequant.cli.output import JsonFlag, print_json


def report(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="HTML file to write.", show_default=False)],
    quality: Annotated[Path | None, typer.Option(help="Rows of `tilequant evaluate --json`, for KL against bits.")] = None,
    speed: Annotated[Path | None, typer.Option(help="bench.json of `tilequant bench`, for times, and KL against them.")] = None,
    png: Annotated[Path | None, typer.Option(help="Folder to write the pictures to as PNG files as well.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write one self-contained HTML page with pictures: tiles by layer and projection, bits by depth, maps, score mass.

    Every layer's maps are in it. Needs matplotlib (the extra `report`). Score mass and level shares appear where
    calibration_report.json is in the folder, KL against bits read with --quality, times and memory with --speed, and KL against
    time with both.
    """
    rows = make.read_quality(quality) if quality else None
    drawn = make.draw(folder, rows, make.read_speed(speed) if speed else None)
    output.write_text(make.page(folder, drawn, rows))
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for name, (data, _) in drawn.items():
            (png / f"{name.replace(' ', '-')}.png").write_bytes(data)
    if as_json:
        print_json({"html": str(output), "bytes": output.stat().st_size, "pictures": list(drawn)})
    else:
        print(f"{output}: {len(drawn)} pictures, {output.stat().st_size >> 10} KiB")

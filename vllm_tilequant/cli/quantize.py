"""`tilequant quantize`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_tilequant.checkpoint.card import CALIBRATION
from vllm_tilequant.checkpoint.files import read_json_object
from vllm_tilequant.cli.output import JsonFlag, print_json


def quantize(
    model: Annotated[str, typer.Argument(help="Folder of the original model, or a hub id.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Calibration text: a .txt, .jsonl, .json, .parquet or .csv file; wikitext, c4, gsm8k, cnn_dailymail, "
            "multi_news or ultrachat_200k from the hub; any hub id, with :split if not train. Default: the bundled text."
        ),
    ] = None,
    pad: Annotated[
        bool, typer.Option(help="One padded record per document, instead of documents packed into full records.")
    ] = False,
    samples: Annotated[int, typer.Option(help="Calibration records.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a record.")] = 512,
    w4_fraction: Annotated[float | None, typer.Option(help="Share of the tiles stored with 4 bits. Default: 0.6.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with fields of TileQuantModifier.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    strict: Annotated[bool, typer.Option(help="Targets or ignore entries that match nothing are an error.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with what an ended run has left in OUTPUT.work.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would be done and needed, and stop.")] = False,
    memory_check: Annotated[bool, typer.Option(help="Refuse to start where memory will not do.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Quantize a model into a tilequant checkpoint: tiles of 4 or 8 bits, thresholds for every profile.

    The folder appears under its name only when it is complete, with tokenizer and chat template, recipe, calibration report,
    model card and hashes. Until then OUTPUT.work holds a log, finished steps and layers.
    """
    # the libraries below log to stdout; with --json that is for the one object
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        from vllm_tilequant.calibrate.run import quantize as run

        said = run(
            model, output, data=data, samples=samples, length=length, seed=seed, recipe=recipe, w4_fraction=w4_fraction,
            pad=pad, strict=strict, resume=resume, dry_run=dry_run, memory_check=memory_check,
        )  # fmt: skip
    if as_json:
        print_json({"folder": str(output), "written": said is None} | (_summary(output) if said is None else _plan(said)))
    else:
        print(said or f"{output}: written")


def _summary(folder: Path) -> dict[str, Any]:
    """The short part of what the calibration says of itself."""
    report = read_json_object(folder, CALIBRATION)
    profiles = {n: p | {"measured": p["measured"] and p["measured"]["average"]} for n, p in report["profiles"].items()}
    kept = ("source", "stored_bits", "calibration_tokens", "seconds", "peak_memory_bytes", "quality")
    return {k: report[k] for k in kept} | {"profiles": profiles, "report": str(folder / CALIBRATION)}


def _plan(said: str) -> dict[str, Any]:
    """The lines of a dry run as an object: first word -> the rest."""
    return {"plan": {name: rest.strip() for name, _, rest in (line.partition(" ") for line in said.splitlines())}}

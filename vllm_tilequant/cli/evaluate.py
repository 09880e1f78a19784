"""`tilequant evaluate`, and the table and progress line that the quality benchmark shares with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from vllm_tilequant import evaluate as ev
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.cli.output import print_json


class Phase(StrEnum):
    static = "static"
    graded = "graded"
    both = "both"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    reference: Annotated[str, typer.Option(help="Source model: folder or hub id.", show_default=False)],
    text: Annotated[Path, typer.Option(help="UTF-8 text file to predict.", show_default=False)],
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 16384,
    window: Annotated[int, typer.Option(help="Tokens per window; windows do not overlap.")] = 512,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="Profile of the graded rows (repeatable), or 'all'; the checkpoint's default if left out."),
    ] = None,
    activation: Annotated[
        list[str] | None,
        typer.Option(help="'none', 'group64', or for the static phase 'token_smooth' or 'token_block' (repeatable)."),
    ] = None,
    phase: Annotated[Phase, typer.Option(help="At stored precision, graded at every position, or both.")] = Phase.both,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Of both models.")] = Dtype.float32,
    batch: Annotated[int | None, typer.Option(help="Windows at once; by the vocabulary if left out.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here as well; -: print only them.")] = None,
) -> None:
    """Compare a checkpoint with its source model: KL, same top token, perplexity, stored and loaded bits."""
    schema = Checkpoint.open(folder).schema
    phases = ev.PHASES if phase is Phase.both else (phase.value,)
    configurations = ev.configurations(schema, profile or [schema.profiles.default], activation or ["group64"], phases)
    rows = ev.evaluate(
        folder,
        reference,
        ev.windows(folder, text, tokens, window),
        configurations,
        device=device,
        dtype=getattr(torch, dtype.value),
        batch=batch,
        progress=print_progress,
    )
    if json_file == Path("-"):
        print_json(rows)
        return
    print_quality(rows)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def print_quality(rows: Iterable[Mapping[str, Any]]) -> None:
    """A table of quality rows on stdout."""
    rows = list(rows)
    first = rows[0]
    title = (
        f"{first['name']} against {first['model']}: {first['tokens']} tokens, windows of {first['window']}, {first['device']}"
    )
    table = Table(title=title, caption=f"reference perplexity {first['ppl_reference']:.6g}; KL in milli-nats per token")
    for heading in ("phase", "profile", "activation"):
        table.add_column(heading)
    for heading in ("stored", "loaded", "KL", "± s.e.", "KL p99", "top-1", "ppl", "channels at 0/2/4/6/8 bits"):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = "/".join(f"{100 * v:.0f}" for v in row["level_shares"].values()) if row["level_shares"] else ""
        table.add_row(
            *(row[k] for k in ("phase", "profile", "activation")),
            *(f"{row[k]:.3f}" for k in ("stored_bits", "loaded_bits")),
            *(f"{row[k]:.1f}" for k in ("kl_milli", "kl_se", "kl_p99")),
            f"{row['top1']:.1%}",
            f"{row['ppl']:.6g}",
            shares,
        )
    # a file or a pipe has no width to wrap to
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for row in rows:
        if row["kl_over_static"] and row["phase"] == "static":
            added = f"{row['kl_over_static']:.2f} ± {row['kl_over_static_se']:.2f}"
            console.print(f"activation {row['activation']} adds {added} milli-nats at stored precision, position by position")


def print_progress(done: int, total: int, seconds: float) -> None:
    """One line on stderr with the time left: rewritten on a terminal, every tenth of the way elsewhere."""
    left = seconds / done * (total - done)
    line = f"evaluate: {done}/{total} steps, {seconds:.0f} s, {left:.0f} s left"
    if sys.stderr.isatty():
        print(f"\r{line}   ", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total or done * 10 // total > (done - 1) * 10 // total:
        print(line, file=sys.stderr, flush=True)

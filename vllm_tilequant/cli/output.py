"""How verbs print: JSON on stdout for scripts, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=1))


def print_table(title: str, headings: Mapping[str, bool], rows: Iterable[Iterable[str]], caption: str | None = None) -> None:
    """headings: name -> whether its column holds numbers (right-aligned)."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading, numeric in headings.items():
        table.add_column(heading, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*row)
    # a file or a pipe has no width to wrap to
    Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False).print(table)


def print_errors(errors: dict[str, float], title: str) -> None:
    """Mean and largest error of each projection."""
    groups: dict[str, dict[str, float]] = {}
    for name, error in errors.items():
        groups.setdefault(name.rpartition(".")[2], {})[name] = error
    rows = []
    for projection, group in groups.items():
        worst = max(group, key=lambda name: group[name])
        rows.append((projection, f"{sum(group.values()) / len(group):.4f}", f"{group[worst]:.4f}", worst))
    print_table(title, {"projection": False, "mean": True, "largest": True, "where": False}, rows)


def sizes(nbytes: int) -> str:
    """Bytes for people: 123.4 MiB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def tile_shares(counts: Mapping[int, int]) -> str:
    """`60.0% at 4 bits, 40.0% at 8 bits`"""
    tiles = sum(counts.values())
    return ", ".join(f"{n / tiles:.1%} at {bits} bits" for bits, n in counts.items() if n)

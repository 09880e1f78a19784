"""Write the tables of docs/parallel.md; `--check` only says whether they are up to date.

python benchmarks/parallel_tables.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import legal_sizes
import report

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "parallel.md"


def rows(stem: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{stem}.cpu.json").read_text())["rows"]


def legal() -> str:
    made = [legal_sizes.row(shape) for shape in legal_sizes.MODELS]
    return report.table(made, dict.fromkeys(made[0], ""))


def loading() -> str:
    columns = {"layer": "", "cut along": "", "ranks": "d", "stored MiB": ".1f", "held": ".1%", "touched": ".1%"}
    made = [{"cut along": r["cut"], "ranks": r["tp"], "stored MiB": r["stored_mib"], **r} for r in rows("loading")]
    return report.table(made, columns)


def scales() -> str:
    columns = {"one scale over": "", "ranks": "d", "KL": ".1f", "± standard error": ".1f", "to the whole row's": ".1f"}
    made = [
        {"one scale over": r["scale"], "ranks": r["tp"], "KL": r["kl_milli"], "± standard error": r["kl_se"]}
        | {"to the whole row's": r["kl_between"]}
        for r in rows("parallel_scales")
    ]
    return report.table(made, columns)


def kl() -> str:
    columns = {"model": "", "reference": "", "beside": "", "KL": ".2f", "± standard error": ".2f", "same top-1": ".1%"}
    names = {"smol": "source model, bf16 weights", "tq16": "60 % of the tiles at 4 bits"}
    made = [
        {"model": names.get(r["name"], r["name"]), "reference": r["reference"], "beside": r["engine"], "KL": r["kl_milli"]}
        | {"± standard error": r["kl_se"], "same top-1": r["top1"]}
        for r in rows("parallel_kl")
    ]
    return report.table(made, columns)


TABLES = {"legal sizes": legal, "loading": loading, "scales": scales, "kl": kl}


def updated(text: str) -> str:
    return report.with_tables(text, {name: make() for name, make in TABLES.items()})


if __name__ == "__main__":
    sys.exit(report.rewrite(DOCUMENT, updated))

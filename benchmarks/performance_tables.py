"""Write the tables of docs/performance.md from the committed traces; `--check` only says whether they are up to date.

    python benchmarks/performance_tables.py [--check]

A kernel belongs to what its name says. `overlapping` is how much the rows add up to more than what kernels cover together (a
launch that starts before its predecessor has ended is counted in both), `no kernel` what no kernel covers of the step as it was
timed without the profiler; where the profiler slows kernels down it is negative. A method that was not traced has no column.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parent.parent
#: Kernels that run in every layer are called at least so often in a step.
IN_LAYERS = 20
PARTS = (
    (r"flash|reshape_and_cache", "attention, key/value cache"),
    (r"^triton_", "norms, rotation of positions, SiLU"),
    (r"^decode_|^prepare_\d|short_rows|^batch|^expand|_quantize_|machete|cutlass_3x_gemm|nvjet|cublasLt", "linears"),
    (r"Memset", "memory set to zero"),
)
METHODS = ("tilequant", "w4a16", "bf16")
CASES = {"decode-1": ("decode", 1), "decode-8": ("decode", 8), "decode-64": ("decode", 64), "prompt": ("prompt", 1)}


def part(row: dict) -> str:
    once = (row["calls"] or 0) < IN_LAYERS
    if once:
        return "output head" if "nvjet" in row["full_name"] and row["grid"] == "2x66x1" else "once a step: inputs, sampling"
    return next((what for pattern, what in PARTS if re.search(pattern, row["full_name"])), "other kernels of layers")


def accounts(rows: list[dict], phase: str, batch: int) -> str:
    """A line for every part of a step, a column for every method, microseconds."""
    table: dict[str, dict] = {}
    traced = {r["model"] for r in rows if (r["phase"], r["batch"]) == (phase, batch)}
    methods = [m for m in METHODS if m in traced and (batch == 1 or m != "bf16")]
    for method in methods:
        own = [r for r in rows if (r["model"], r["phase"], r["batch"]) == (method, phase, batch)]
        spent: dict[str, float] = {}
        for r in own:
            if r.get("full_name"):
                spent[part(r)] = spent.get(part(r), 0.0) + r["us"]
        last = {r["kernel"]: r["us"] for r in own if not r.get("full_name")}
        spent["overlapping"] = last["(any kernel)"] - sum(spent.values())
        spent["no kernel"] = last["(no kernel)"]
        spent["step"] = own[0]["step_us"]
        for what, us in spent.items():
            table.setdefault(what, {"part": what})[method] = us
    order = [
        *sorted((what for _, what in PARTS), key="linears".__ne__),
        "other kernels of layers",
        "output head",
        "once a step: inputs, sampling",
    ]
    order += ["overlapping", "no kernel", "step"]
    lines = [table[what] for what in order if what in table]
    return report.table(lines, {"part": ""} | dict.fromkeys(methods, ".0f"))


def kernels(rows: list[dict], phase: str, batch: int) -> str:
    """Our kernels of a step, one by one."""
    own = [r for r in rows if (r["model"], r["phase"], r["batch"]) == ("tilequant", phase, batch) and r.get("full_name")]
    own = [r | {"each": r["us"] / r["calls"]} for r in own if part(r) == "linears"]
    return report.table(own, {"kernel": "", "grid": "", "calls": ".0f", "us": ".0f", "each": ".1f"})


def updated(text: str) -> str:
    data = json.loads((ROOT / "benchmarks" / "results" / "profile_step.h200.json").read_text())
    tables = {name: accounts(data["rows"], *case) for name, case in CASES.items()}
    return report.with_tables(text, tables | {f"kernels-{name}": kernels(data["rows"], *case) for name, case in CASES.items()})


if __name__ == "__main__":
    sys.exit(report.rewrite(ROOT / "docs" / "performance.md", updated))

"""What a trace of torch's profiler says of kernels: calls and microseconds by kernel and grid, and where it is stored."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import report

#: What tells the rows of one trace from those of another.
CASE = ("model", "phase", "batch", "prompt", "profile")


def kernels(profiler: Any, steps: int) -> list[dict[str, Any]]:
    """Rows of a GPU's kernels, copies and fills, and the time that none of them covers is left to the caller."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summed([e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")], steps)


def summed(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Rows by kernel and grid, the longest first, and as the last one what all of them cover together, `(any kernel)`."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for e in events:
        grid = "x".join(map(str, e["args"]["grid"])) if "grid" in e.get("args", {}) else ""
        found[e["name"], grid].append(e["dur"])
    rows = [
        {"kernel": short(name), "grid": grid, "calls": len(us) / steps, "us": sum(us) / steps, "full_name": name}
        for (name, grid), us in found.items()
    ]
    covered, end = 0.0, 0.0
    for start, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    rows.sort(key=lambda r: -r["us"])
    return [*rows, {"kernel": "(any kernel)", "grid": "", "calls": len(events) / steps, "us": covered / steps}]


def short(name: str) -> str:
    """A kernel's name without its return type and parameters; templates only where the name would be empty without."""
    name = name.removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0][:60] or name[:60]


def without(rows: list[dict[str, Any]], before: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Rows of one step, where `rows` are of `steps` steps and of what `before` holds besides: both of whole traces."""
    known = {(r["kernel"], r["grid"], r.get("full_name")): r for r in before}
    out = []
    for row in rows:
        less = known.get((row["kernel"], row["grid"], row.get("full_name")), {"calls": 0.0, "us": 0.0})
        calls, us = row["calls"] - less["calls"], row["us"] - less["us"]
        if calls > 0:
            out.append(row | {"calls": calls / steps, "us": us / steps})
    last = [r for r in out if "full_name" not in r]
    return [*sorted((r for r in out if "full_name" in r), key=lambda r: -r["us"]), *last]


def store(
    path: Path, device: str, case: dict[str, Any], rows: list[dict[str, Any]], step_us: float, **common: Any
) -> list[Any]:
    """Complete the rows of a step that takes `step_us`, write them in the place of those of the same case, and return them.

    On a GPU a row says what no kernel covers. case: by `CASE`; common: in every row.
    """
    if device != "cpu":  # the profiler slows a CPU's operators down, so that nothing can be taken from a step without it
        rows = [*rows, {"kernel": "(no kernel)", "grid": "", "calls": None, "us": step_us - rows[-1]["us"]}]
    rows = [case | row | {"share": row["us"] / step_us, "step_us": step_us} | common for row in rows]
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in kept if any(row[key] != case[key] for key in CASE)]
    report.write(path, report.envelope("profile_step", device, kept + rows))
    return rows

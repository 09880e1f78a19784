"""The envelope of every file in `benchmarks/results`, and plain tables from its rows."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "vllm-tilequant",
    "torch",
    "triton",
    "transformers",
    "vllm",
    "llmcompressor",
    "compressed-tensors",
    "lm-eval",
)


def envelope(stem: str, device: str | torch.device, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows with all that is needed to judge them later. device: what the rows were measured on."""
    device = torch.device(device)
    return {
        "stem": stem,
        "device": device_name(device),
        "driver": driver_version(device),
        "versions": versions(),
        "commit": commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": list(rows),
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report next to the target and move it there, so that a failure leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


def default_path(stem: str, device: str | torch.device) -> Path:
    """`benchmarks/results/<stem>.<gpu name or cpu>.json`."""
    device = torch.device(device)
    slug = "cpu" if device.type == "cpu" else "".join(c if c.isalnum() else "-" for c in device_name(device).lower())
    return Path(__file__).parent / "results" / f"{stem}.{slug}.json"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"


def driver_version(device: torch.device) -> str | None:
    """The NVIDIA driver's version, None on a CPU or where nvidia-smi is not there."""
    if device.type != "cuda":
        return None
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def versions() -> dict[str, str]:
    """Python, CUDA of torch, and those of our packages that are installed."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the checkout this file lies in, with `+` when tracked files differ from it; None outside of one."""
    here = str(Path(__file__).parent)
    head = _first_line("git", "-C", here, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+" if _first_line("git", "-C", here, "status", "--porcelain", "--untracked-files=no") else "")


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A markdown table. columns: key of a row -> format spec ("" for text); a missing or None value stays empty."""
    cells = [list(columns)]
    for row in rows:
        cells.append([format(row[k], spec) if row.get(k) is not None else "" for k, spec in columns.items()])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [spec != "" for spec in columns.values()]
    lines = [
        "| " + " | ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + ":" if n else "-" * (w + 2) for w, n in zip(widths, numeric, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A document with every table written anew between its marks, `<!-- NAME: begin ... -->` and `<!-- NAME: end -->`."""
    for name, new in tables.items():
        pattern = re.compile(rf"(<!-- {name}: begin[^\n]*-->\n).*?(\n<!-- {name}: end -->)", re.S)
        text, count = pattern.subn(lambda m, new=new: m[1] + new + m[2], text)
        if count != 1:
            raise SystemExit(f"the document has {count} places for the table {name!r}, wanted 1")
    return text


def rewrite(document: Path, updated: Callable[[str], str]) -> int:
    """The whole of a script that keeps a document's tables; with `--check` it only says by its exit code if they are."""
    text = document.read_text()
    new = updated(text)
    if "--check" in sys.argv:
        return 0 if new == text else 1
    document.write_text(new)
    return 0

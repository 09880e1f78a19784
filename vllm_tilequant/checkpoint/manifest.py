"""SHA-256 of every file of a folder, in the form that `sha256sum --check SHA256SUMS` reads.

A manifest tells a broken download from a whole one. It is no signature: who can change a file can change it as well.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from vllm_tilequant.checkpoint.files import CheckpointError, checked_file, printable

MANIFEST = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")
_MAX_BYTES = 1 << 20


def write_manifest(folder: str | Path) -> Path:
    """Write the manifest of all plain files of the folder (no folders, nothing hidden), whole or not at all; returns it."""
    folder = Path(folder)
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith(".") and p.name != MANIFEST)
    if odd := [n for n in names if not n.isprintable() or "\\" in n]:
        raise ValueError(f"{folder}: names that a manifest cannot hold: {printable(odd[:3])}")
    text = "".join(f"{_sha256(folder / name)}  {name}\n" for name in names)
    partial = folder / f".{MANIFEST}.{os.getpid()}"
    partial.write_text(text)
    return partial.replace(folder / MANIFEST)


def manifest_faults(folder: Path) -> list[str] | None:
    """Files that are not what the manifest says, one line each; None where there is no manifest.

    A file that the manifest does not list is no fault: a model card may be added later.
    """
    if not (folder / MANIFEST).exists():
        return None
    path = checked_file(folder, MANIFEST)
    if path.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{path} is larger than a manifest can be")
    try:
        lines = path.read_text().splitlines()
    except (UnicodeDecodeError, OSError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None
    faults, listed = [], set()
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in listed or match[2] in (".", "..", MANIFEST):
            faults.append(f"{MANIFEST} line {number}: wanted a SHA-256 and a file name of this folder, each file once")
            continue
        listed.add(match[2])
        if not (folder / match[2]).is_file():
            faults.append(f"{match[2]}: missing, {MANIFEST} lists it")
        elif _sha256(checked_file(folder, match[2])) != match[1]:
            faults.append(f"{match[2]}: changed since {MANIFEST} was written")
    return faults


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

"""`tilequant manifest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_tilequant.checkpoint import verify as judge
from vllm_tilequant.checkpoint.files import raise_faults
from vllm_tilequant.checkpoint.manifest import MANIFEST, manifest_faults, write_manifest
from vllm_tilequant.cli.output import JsonFlag, print_json


def manifest(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    check: Annotated[bool, typer.Option("--check", help="Only compare with the manifest that is there.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write SHA256SUMS for a sound checkpoint, or check it; `sha256sum --check SHA256SUMS` reads it as well.

    `tilequant verify` checks it whenever it is there. Exit code 1 if the checkpoint is not sound or a file has changed.
    """
    if check:
        faults = manifest_faults(folder)
        raise_faults(folder, [f"no {MANIFEST}"] if faults is None else faults)
    else:
        judge.verify(folder, hashes=False)
        write_manifest(folder)
    files = len((folder / MANIFEST).read_text().splitlines())
    if as_json:
        print_json({"manifest": str(folder / MANIFEST), "files": files, "written": not check})
    else:
        print(f"{folder / MANIFEST}: {files} files {'match' if check else 'listed'}")

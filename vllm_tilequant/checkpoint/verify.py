"""Judge every value of a checkpoint: hashes, maps against payload, scales, thresholds, transforms, dense tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_tilequant.checkpoint import deep
from vllm_tilequant.checkpoint.files import raise_faults
from vllm_tilequant.checkpoint.manifest import manifest_faults
from vllm_tilequant.checkpoint.reader import Checkpoint, dense_faults


@dataclass(frozen=True)
class Summary:
    """What a sound checkpoint is. manifest: whether SHA256SUMS was there (and then matched); errors: see `deep.Deep`."""

    modules: int
    tile_counts: dict[int, int]
    stored_bits: float
    profiles: list[str]
    default_profile: str
    dense_tensors: int
    manifest: bool
    errors: dict[str, float] | None = None
    equal_to_source: int | None = None


def verify(
    folder: str | Path, source: str | Path | None = None, max_error: float = deep.MAX_ERROR, *, hashes: bool = True
) -> Summary:
    """Read every tensor and check every value; raises `CheckpointError` that lists all faults.

    What is checked: all that `Checkpoint.open` checks; the hashes of a manifest; map values and their counts; scales finite,
    positive and in bounds; transform indices; thresholds finite, ascending and equal within a shared-input group; finite bias
    and dense tensors; dense plane 1 empty under 2-bit tiles. With `source`, the folder of the original model, also the
    relative error of every unpacked weight, and that dense tensors are the source's. hashes: whether to look at a manifest.
    """
    checkpoint = Checkpoint.open(folder)
    schema = checkpoint.schema
    changed = manifest_faults(checkpoint.folder) if hashes else None
    faults = list(changed or [])
    tiles: dict[int, int] = {}
    for name, module in schema.modules.items():
        faults += checkpoint.value_faults(name, checkpoint.module_tensors(name))
        for bits, count in module.tile_counts.items():
            tiles[bits] = tiles.get(bits, 0) + count
    for name in checkpoint.dense_names:
        faults += dense_faults(name, checkpoint.tensor(name))
    raise_faults(checkpoint.folder, faults)
    compared = None if source is None else deep.compare(checkpoint, source, max_error)
    if compared is not None:
        raise_faults(checkpoint.folder, compared.faults)
    return Summary(
        modules=len(schema.modules),
        tile_counts=dict(sorted(tiles.items())),
        stored_bits=checkpoint.stored_bits(),
        profiles=schema.profiles.names,
        default_profile=schema.profiles.default,
        dense_tensors=len(checkpoint.dense_names),
        manifest=changed is not None,
        errors=compared.errors if compared else None,
        equal_to_source=compared.equal if compared else None,
    )

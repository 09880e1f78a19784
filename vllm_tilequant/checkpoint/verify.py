"""Judge every value of a checkpoint: maps against payload, scales, thresholds, transforms, dense tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_tilequant.checkpoint.files import raise_faults
from vllm_tilequant.checkpoint.reader import Checkpoint, dense_faults


@dataclass(frozen=True)
class Summary:
    """What a sound checkpoint is."""

    modules: int
    tile_counts: dict[int, int]
    stored_bits: float
    profiles: list[str]
    default_profile: str
    dense_tensors: int


def verify(folder: str | Path) -> Summary:
    """Read every tensor and check every value; raises `CheckpointError` that lists all faults.

    What is checked: all that `Checkpoint.open` checks; map values and their counts; scales finite and positive; transform
    indices; thresholds finite, ascending and equal within a shared-input group; finite bias and dense tensors; dense plane 1
    empty under 2-bit tiles.
    """
    checkpoint = Checkpoint.open(folder)
    schema = checkpoint.schema
    faults: list[str] = []
    tiles: dict[int, int] = {}
    for name, module in schema.modules.items():
        faults += checkpoint.value_faults(name, checkpoint.module_tensors(name))
        for bits, count in module.tile_counts.items():
            tiles[bits] = tiles.get(bits, 0) + count
    for name in checkpoint.dense_names:
        faults += dense_faults(name, checkpoint.tensor(name))
    raise_faults(checkpoint.folder, faults)
    return Summary(
        modules=len(schema.modules),
        tile_counts=dict(sorted(tiles.items())),
        stored_bits=checkpoint.stored_bits(),
        profiles=schema.profiles.names,
        default_profile=schema.profiles.default,
        dense_tensors=len(checkpoint.dense_names),
    )

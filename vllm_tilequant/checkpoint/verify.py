"""Judge every value of a checkpoint: maps against payload, scales, thresholds, transforms, dense tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.reader import Checkpoint, raise_faults
from vllm_tilequant.kernels import layout


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
    schema, faults = checkpoint.schema, []
    tiles: dict[int, int] = {}
    group_thresholds: dict[str, torch.Tensor] = {}
    for name, module in schema.modules.items():
        tensors = checkpoint.module_tensors(name)
        found = layout.payload_faults(tensors, module.tile_counts, len(schema.transforms))
        faults += [f"{name}.{fault}" for fault in found]
        if not any(fault.startswith(s.MAP) for fault in found):
            narrow = layout.expand_tiles(tensors[s.MAP]) == 2
            if bool((layout.unpack(layout.from_tensors(tensors | {s.MAP: _as_4_bits(tensors[s.MAP])}))[narrow] & 3).any()):
                faults.append(f"{name}.{s.PLANE1} is not empty under 2-bit tiles")
        first = group_thresholds.setdefault(module.input_group, tensors[s.THRESHOLDS])
        if not torch.equal(first, tensors[s.THRESHOLDS]):
            faults.append(f"{name}.{s.THRESHOLDS} differ within the shared-input group {module.input_group}")
        for bits, count in module.tile_counts.items():
            tiles[bits] = tiles.get(bits, 0) + count
    for name in checkpoint.dense_names:
        t = checkpoint.tensor(name)
        if t.is_floating_point() and not bool(t.isfinite().all()):
            faults.append(f"{name} is not finite")
    raise_faults(checkpoint.folder, faults)
    return Summary(
        modules=len(schema.modules),
        tile_counts=dict(sorted(tiles.items())),
        stored_bits=checkpoint.stored_bits(),
        profiles=schema.profiles.names,
        default_profile=schema.profiles.default,
        dense_tensors=len(checkpoint.dense_names),
    )


def _as_4_bits(tile_bits: torch.Tensor) -> torch.Tensor:
    """The map with 2-bit tiles seen as 4-bit ones, so that what lies in their dense plane 1 shows in the codes."""
    return tile_bits.clamp_min(4)

"""What a calibration says of itself afterwards: `calibration_report.json`."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, Group, watch_inputs
from vllm_tilequant.kernels import layout
from vllm_tilequant.kernels.reference import levels_ref
from vllm_tilequant.schema import LEVELS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_tilequant.calibrate.result import Result


def measured_bits(
    model: PreTrainedModel, linears: dict[str, nn.Linear], result: Result, records: Iterable[Batch]
) -> list[dict[str, Any]]:
    """Loaded bits per weight of every profile on text that the calibration has not seen, the model's own activations graded.

    -> per profile {"average": over all weights, "layers": by input group, "level_shares": share of channels at each level, each
    weighted by the outputs that read it, "layer_level_shares": by input group, in the order of `LEVELS`}
    """
    rows = dict.fromkeys((g.name for g in result.groups), 0)
    read = {name: torch.zeros(len(t), dtype=torch.float64) for name, t in result.thresholds.items()}
    taken = {name: torch.zeros(len(t), len(LEVELS), dtype=torch.float64) for name, t in result.thresholds.items()}
    bits = {g.name: torch.cat([result.weights[n].tile_bits for n in g.members]) for g in result.groups}

    def use(name: str, x: Tensor) -> None:
        rows[name] += len(x)
        if (table := result.weights[name].input_rotation) is not None:
            x = layout.rotate_inputs(x, table.to(x.device))
        for i, thresholds in enumerate(result.thresholds[name]):
            levels = levels_ref(x, thresholds.to(x.device))
            taken[name][i] += torch.bincount(levels.flatten() // 2, minlength=len(LEVELS)).cpu()
            read[name][i] += layout.loaded_code_bits(levels, bits[name].to(x.device)).sum().cpu()

    watch_inputs(model, {g.name: linears[g.name] for g in result.groups}, records, use)
    weights = {g.name: sum(linears[n].weight.numel() for n in g.members) for g in result.groups}
    per_row = {name: read[name] / rows[name] for name in read}
    outputs = {g.name: sum(linears[n].out_features for n in g.members) for g in result.groups}
    shares = torch.stack([taken[name] * outputs[name] for name in read]).sum(0)
    shares /= shares.sum(1, keepdim=True)
    average = torch.stack(list(per_row.values())).sum(0) / sum(weights.values())
    return [
        {
            "average": float(average[i]),
            "layers": {name: float(per_row[name][i]) / weights[name] for name in read},
            "level_shares": dict(zip(map(str, LEVELS), shares[i].tolist(), strict=True)),
            "layer_level_shares": {name: (taken[name][i] / taken[name][i].sum()).tolist() for name in read},
        }
        for i in range(len(average))
    ]


def complete(
    result: Result, profiles: dict[str, Any], measured: list[dict[str, Any]] | None, facts: dict[str, Any]
) -> dict[str, Any]:
    """The whole report. measured: of `measured_bits`, or None without held-out text; facts: what only the caller knows."""
    masses = result.report.pop("score_mass", {})
    return facts | {
        "calibration_records": result.report.pop("calibration_records"),
        "calibration_tokens": result.report.pop("calibration_tokens"),
        "seconds": result.report.pop("seconds"),
        "peak_memory_bytes": peak_memory(),
        **result.report,
        "stored_bits": stored_bits(result),
        "profiles": {
            name: {"target": target, "measured": measured[i] if measured else None}
            for i, (name, target) in enumerate(profiles.items())
        },
        "modules": _modules(result.groups, result.weights, masses),
    }


def stored_bits(result: Result) -> float:
    """Everything stored of the quantized linears, thresholds with them, per weight."""
    weights = sum(w.out_features * w.in_features for w in result.weights.values())
    return sum(t.nbytes for name in result.weights for t in result.tensors(name).values()) * 8 / weights


def peak_memory() -> dict[str, int]:
    """Most memory that this process has held at once, on the host and, if it used one, on the GPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak["gpu"] = torch.cuda.max_memory_allocated()
    return peak


def _modules(groups: list[Group], weights: dict[str, layout.PackedWeight], masses: dict[str, float]) -> dict[str, Any]:
    out = {}
    for group in groups:
        for name in group.members:
            w = weights[name]
            bits, counts = w.tile_bits.unique(return_counts=True)
            out[name] = {
                "input_group": group.name,
                "tile_counts": {str(int(b)): int(c) for b, c in zip(bits, counts, strict=True)},
                "score_mass": masses.get(name),
                "scale": {
                    "smallest": float(w.tile_scale.min()),
                    "median": float(w.tile_scale.median()),
                    "largest": float(w.tile_scale.max()),
                },
            }
    return out

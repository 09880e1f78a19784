"""What two checkpoints do differently: config, maps, scales, thresholds, codes, dense tensors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.kernels import layout

_MISSING = "(absent)"


def diff(first: str | Path, second: str | Path) -> dict[str, Any]:
    """A JSON object; every list and count in it is empty or zero where the two agree, and `identical` says so."""
    a, b = Checkpoint.open(first), Checkpoint.open(second)
    common = [n for n in a.schema.modules if n in b.schema.modules]
    same = [n for n in common if _shape(a, n) == _shape(b, n)]
    out: dict[str, Any] = {
        "config": _config(a, b),
        "modules_only_in_first": [n for n in a.schema.modules if n not in b.schema.modules],
        "modules_only_in_second": [n for n in b.schema.modules if n not in a.schema.modules],
        "modules_of_other_shape": [n for n in common if n not in same],
        "stored_bits": [a.stored_bits(), b.stored_bits()],
        "modules": {n: row for n in same if (row := _module(a, b, n))},
        "dense": _dense(a, b),
    }
    changes: Counter[str] = Counter()
    for row in out["modules"].values():
        changes.update(row.get("map", {}))
    out["map_changes"] = dict(changes)
    out["compared_modules"] = len(same)
    lists = ("config", "modules_only_in_first", "modules_only_in_second", "modules_of_other_shape", "modules", "dense")
    out["identical"] = not any(out[k] for k in lists)
    return out


def _shape(c: Checkpoint, name: str) -> tuple[int, int]:
    m = c.schema.modules[name]
    return m.out_features, m.in_features


def _config(a: Checkpoint, b: Checkpoint) -> dict[str, list[Any]]:
    """Field -> the two values; `modules` is compared by its tensors instead."""

    def fields(c: Checkpoint) -> dict[str, Any]:
        model = {k: v for k, v in c.config.items() if k != "quantization_config"}
        ours = {f"quantization_config.{k}": v for k, v in c.schema.dump().items() if k != "modules"}
        return model | ours

    left, right = fields(a), fields(b)
    keys = list(dict.fromkeys([*left, *right]))
    return {k: [left.get(k, _MISSING), right.get(k, _MISSING)] for k in keys if left.get(k, _MISSING) != right.get(k, _MISSING)}


def _module(a: Checkpoint, b: Checkpoint, name: str) -> dict[str, Any]:
    """What differs in one linear of equal shape; empty if nothing does."""
    ma, mb = a.module(name), b.module(name)
    wa, wb = ma.weight, mb.weight
    row: dict[str, Any] = {}
    if bool((moved := wa.tile_bits != wb.tile_bits).any()):
        pairs = zip(wa.tile_bits[moved].tolist(), wb.tile_bits[moved].tolist(), strict=True)
        row["map"] = {f"{x}->{y}": n for (x, y), n in sorted(Counter(pairs).items())}
        row["tiles_changed"] = int(moved.sum())
    if (change := _largest(wa.tile_scale[~moved], wb.tile_scale[~moved])) is not None:
        row["scale"] = change  # of tiles with equal bits: other bits always bring another scale
    if not torch.equal(_matrices(a, wa), _matrices(b, wb)):
        row["transform"] = "differs"
    rotations = [None if t is None or t.kind == "identity" else t for t in (c.schema.input_transform(name) for c in (a, b))]
    if rotations[0] != rotations[1]:
        row["input_transform"] = "differs" if all(rotations) else "only in one"
    if not all(torch.equal(getattr(wa, part), getattr(wb, part)) for part in ("plane0", "plane1", "extension")):
        codes = (layout.unpack(wa) != layout.unpack(wb)) & layout.expand_tiles(~moved)
        if bool(codes.any()):
            row["codes_changed"] = int(codes.sum())
    thresholds = {}
    for profile in a.schema.profiles.names:
        if profile in b.schema.profiles.names:
            pair = (c.thresholds[x.schema.profile_row(profile)] for c, x in ((ma, a), (mb, b)))
            if (change := _largest(*pair)) is not None:
                thresholds[profile] = change
    if thresholds:
        row["thresholds"] = thresholds
    if (ma.bias is None) != (mb.bias is None):
        row["bias"] = "only in one"
    elif ma.bias is not None and mb.bias is not None and not torch.equal(ma.bias, mb.bias):
        row["bias"] = "differs"
    return row


def _matrices(c: Checkpoint, weight: layout.PackedWeight) -> Tensor:
    """[N/64, 64, 64]: the transforms themselves, since the two may list them in another order."""
    return c.transforms[weight.output_transform.long()]


def _largest(x: Tensor, y: Tensor) -> dict[str, float] | None:
    """How many entries changed and the largest change relative to the first; None when none did."""
    changed = x != y
    if not bool(changed.any()):
        return None
    x, y = x[changed].double(), y[changed].double()
    relative = ((y - x).abs() / x.abs().clamp_min(1e-30)).max()
    return {"changed": int(changed.sum()), "largest_relative": float(relative)}


def _dense(a: Checkpoint, b: Checkpoint) -> dict[str, str]:
    """Dense tensor -> how it differs."""
    out = dict.fromkeys(set(a.dense_names) - set(b.dense_names), "only in the first")
    out |= dict.fromkeys(set(b.dense_names) - set(a.dense_names), "only in the second")
    for name in a.dense_names:
        if name in out:
            continue
        ha, hb = a.headers[name], b.headers[name]
        if (ha.shape, ha.dtype) != (hb.shape, hb.dtype):
            out[name] = f"{ha.dtype} {list(ha.shape)} and {hb.dtype} {list(hb.shape)}"
        elif bool((other := a.tensor(name) != b.tensor(name)).any()):
            out[name] = f"{int(other.sum())} of {other.numel()} entries differ"
    return dict(sorted(out.items()))

"""One HTML page about a checkpoint that needs no other file: tables, and pictures inside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint import pictures
from vllm_tilequant.checkpoint.card import CALIBRATION
from vllm_tilequant.checkpoint.files import CheckpointError, parse_json, read_json_object
from vllm_tilequant.checkpoint.inspect import inspect
from vllm_tilequant.checkpoint.reader import Checkpoint

_MAPS = 6
_QUALITY = ("phase", "profile", "activation", "loaded_bits", "kl_milli", "kl_se", "top1", "ppl")
_SPEED = ("method", "profile", "batch", "ttft_ms", "tpot_ms", "memory", "weights_gib", "resident_gib", "peak_gib")
_LAYER = "maps of "
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "img{max-width:100%}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}figure{margin:1.5rem 0}figcaption{color:#555}"
)


def draw(
    folder: str | Path, quality: list[dict[str, Any]] | None = None, speed: list[dict[str, Any]] | None = None
) -> dict[str, tuple[bytes, str]]:
    """Picture name -> (PNG, what it shows). quality: rows of `tilequant evaluate --json`; speed: of `tilequant bench`."""
    checkpoint = Checkpoint.open(folder)
    schema = checkpoint.schema
    out = {
        "share": (
            pictures.share_map(schema),
            "Each cell is one linear: dark ones are mostly stored with 4 bits, bright ones with 8.",
        ),
        "depth": (pictures.bits_by_depth(schema), "Stored code bits; scales and maps add about 0.01."),
        "maps": (
            pictures.tile_maps(checkpoint, _mixed(schema)),
            "Maps of the linears whose tiles are mixed most evenly, one pixel a tile of 64 x 64 weights.",
        ),
    }
    calibration = _calibration(checkpoint.folder)
    described = calibration.get("modules")
    modules = described if isinstance(described, dict) else {}
    masses = {name: row.get("score_mass") for name, row in modules.items() if isinstance(row, dict)}
    if mass := _numbers(masses, schema.modules):
        out["mass"] = (pictures.mass_map(mass), "The map follows these scores, per tile, under one budget for the model.")
    search = calibration.get("search")
    shares = {p: row.get("shares") for p, row in search.items() if isinstance(row, dict)} if isinstance(search, dict) else {}
    if quality:
        out["pareto"] = (pictures.pareto(quality), "Measured by tilequant evaluate; bars are one standard error.")
        shares = {f"{r['profile']}": list(r["level_shares"].values()) for r in quality if r.get("level_shares")} or shares
    if speed:
        out["speed"] = (pictures.speed(speed), "Measured by tilequant bench; medians.")
        if quality and (png := pictures.speed_pareto(quality, speed)) is not None:
            out["speed_pareto"] = (png, "Down and to the left is better.")
    drawable = {p: v for p, v in shares.items() if isinstance(v, list) and len(v) == len(s.LEVELS)}
    if drawable:
        out["levels"] = (pictures.level_shares(drawable), "How often a channel is left out, or read at how many bits.")
    for layer, names in pictures.layers(schema.modules).items():
        out[f"{_LAYER}{layer}"] = (pictures.layer_maps(checkpoint, names), layer)
    return out


def page(folder: str | Path, drawn: Mapping[str, tuple[bytes, str]], quality: list[dict[str, Any]] | None = None) -> str:
    """The HTML text. Everything from the checkpoint is escaped."""
    data = inspect(folder)
    name = Path(folder).resolve().name
    facts = [
        ("architecture", data["architecture"]),
        ("format", f"tilequant {data['format_version']}"),
        ("stored bits per weight of the linears", f"{data['stored_bits']:.3f}"),
        ("bits per parameter of the whole model", f"{data['model_bits_per_parameter']:.3f}"),
        ("tensors", f"{data['tensor_bytes'] / 2**20:.1f} MiB"),
        ("tiles", ", ".join(f"{n} at {b} bits" for b, n in data["tile_counts"].items())),
        ("rotated inputs", f"{data['rotated_inputs']} of {len(data['modules'])} linears"),
        ("profiles", f"{', '.join(data['profiles'])}; default {data['default_profile']}"),
        ("written by", ", ".join(f"{k} {v}" for k, v in data["producer"].items() if isinstance(v, str)) or "unknown"),
    ]
    parts = [
        (part, f"{p['bytes']:,}", f"{p['parameters']:,}", f"{8 * p['bytes'] / p['parameters']:.3f}" if p["parameters"] else "")
        for part, p in data["parts"].items()
    ]
    body = [f"<h1>{escape(name)}</h1>", _table((), facts), "<h2>Where the bytes are</h2>"]
    body.append(_table(("part", "bytes", "parameters", "bits each"), parts))
    if quality:
        rows = [[f"{r[k]:.4g}" if isinstance(r[k], float) else str(r[k]) for k in _QUALITY] for r in quality]
        body += ["<h2>Quality</h2>", _table(_QUALITY, rows)]
    body += [_figure(key, *picture) for key, picture in drawn.items() if not key.startswith(_LAYER)]
    body += ["<h2>Maps layer by layer</h2><p>One square a tile, dark 2, then 4, 6 and 8 bits; all linears at one scale.</p>"]
    for key, (png, layer) in drawn.items():
        if key.startswith(_LAYER):
            body.append(f"<details><summary>{escape(layer)}</summary>{_figure(key, png, '')}</details>")
    body += ["<h2>Not quantized</h2>", _table((), data["skipped"].items())]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
    return head + "<body>" + "\n".join(body) + "</body></html>\n"


def read_quality(path: Path) -> list[dict[str, Any]]:
    """Rows that `tilequant evaluate --json` wrote; raises `CheckpointError` on another file."""
    rows = parse_json(path.read_bytes(), str(path))
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) and set(_QUALITY) <= set(r) for r in rows):
        raise CheckpointError(f"{path} does not hold rows of tilequant evaluate --json")
    return rows


def read_speed(path: Path) -> list[dict[str, Any]]:
    """Rows of the bench.json of `tilequant bench`; raises `CheckpointError` on another file."""
    data = parse_json(path.read_bytes(), str(path))
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) and set(_SPEED) <= set(r) for r in rows):
        raise CheckpointError(f"{path} does not hold rows of tilequant bench")
    return rows


def _figure(key: str, png: bytes, caption: str) -> str:
    source = base64.b64encode(png).decode()
    image = f'<img alt="{escape(key)}" src="data:image/png;base64,{source}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _calibration(folder: Path) -> dict[str, Any]:
    return read_json_object(folder, CALIBRATION) if (folder / CALIBRATION).exists() else {}


def _numbers(values: Any, names: Iterable[str]) -> dict[str, float]:
    """Those of `values` that belong to a module and are numbers."""
    given = values if isinstance(values, dict) else {}
    return {n: float(given[n]) for n in names if isinstance(given.get(n), (int, float)) and isfinite(given[n])}


def _mixed(schema: s.QuantizationSchema) -> list[str]:
    """The modules of the most even mix, at most one of each projection first, in the order of the model."""

    def evenness(name: str) -> float:
        counts = [n for n in schema.modules[name].tile_counts.values() if n]
        return 1 - max(counts) / sum(counts)

    ranked = sorted(schema.modules, key=evenness, reverse=True)
    first: dict[str, str] = {}
    for name in ranked:
        first.setdefault(name.rpartition(".")[2], name)
    chosen = set(list(first.values())[:_MAPS])
    for name in ranked:
        if len(chosen) >= min(_MAPS, len(ranked)):
            break
        chosen.add(name)
    return [name for name in schema.modules if name in chosen]


def _table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    lines = [f"<tr>{head}</tr>"] if head else []
    lines += ["<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows]
    return "<table>" + "".join(lines) + "</table>"

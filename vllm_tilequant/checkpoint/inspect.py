"""What a checkpoint is made of: every byte accounted for, every linear by name, every module left dense and why."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.files import Header
from vllm_tilequant.checkpoint.reader import Checkpoint

#: Where the bytes of a checkpoint lie. Only `linears` counts towards the format's promise of bits per weight.
PARTS = ("linears", "embeddings", "head", "ignored linears", "norms and biases")


def inspect(folder: str | Path) -> dict[str, Any]:
    """A JSON object about a folder that `Checkpoint.open` accepts; no tensor is read."""
    checkpoint = Checkpoint.open(folder)
    schema = checkpoint.schema
    parts = {part: {"bytes": 0, "parameters": 0} for part in PARTS}
    rows = [module_row(checkpoint, name) for name in schema.modules]
    parts["linears"] = {"bytes": sum(r["bytes"] for r in rows), "parameters": sum(r["weights"] for r in rows)}
    for name in checkpoint.dense_names:
        header = checkpoint.headers[name]
        part = parts[_part(name, header)]
        part["bytes"] += header.nbytes
        part["parameters"] += prod(header.shape)
    for name, module in schema.modules.items():
        if module.bias:
            header = checkpoint.headers[f"{name}.{s.BIAS}"]
            parts["norms and biases"]["bytes"] += header.nbytes
            parts["norms and biases"]["parameters"] += prod(header.shape)
    tensors = sum(part["bytes"] for part in parts.values())
    parameters = sum(part["parameters"] for part in parts.values())
    files = sorted({h.file for h in checkpoint.headers.values()})
    weight_files = sum((checkpoint.folder / f).stat().st_size for f in files)
    return {
        "folder": str(folder),
        "format_version": schema.format_version,
        "required_features": schema.required_features,
        "architecture": (checkpoint.config.get("architectures") or ["unknown"])[0],
        "producer": schema.producer,
        "transforms": dict(Counter(t.kind for t in schema.transforms)),
        "rotated_inputs": sum(rotated_inputs(schema, name) for name in schema.modules),
        "folded_inputs": sum(m.input_group in schema.folded_input_diagonal for m in schema.modules.values()),
        "profiles": schema.profiles.names,
        "default_profile": schema.profiles.default,
        "threshold_measure": schema.threshold_measure,
        "stored_bits": checkpoint.stored_bits(),
        "stored_code_bits": checkpoint.stored_code_bits(),
        "parts": parts,
        "model_bits_per_parameter": 8 * tensors / parameters,
        "tensor_bytes": tensors,
        "header_bytes": weight_files - tensors,
        "other_file_bytes": sum(p.stat().st_size for p in checkpoint.folder.iterdir() if p.is_file()) - weight_files,
        "weight_files": files,
        "tile_counts": _sum_tiles(schema.modules.values()),
        "by_projection": by_projection(schema),
        "skipped": skipped(checkpoint),
        "modules": rows,
    }


def module_row(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """One quantized linear; `bytes` are all that it stores but its bias, which the source has as well."""
    m = checkpoint.schema.modules[name]
    suffixes = [suffix for suffix in checkpoint.schema.tensor_specs(name) if suffix != s.BIAS]
    nbytes = sum(checkpoint.headers[f"{name}.{suffix}"].nbytes for suffix in suffixes)
    weights = m.out_features * m.in_features
    return {
        "name": name,
        "out_features": m.out_features,
        "in_features": m.in_features,
        "weights": weights,
        "tile_counts": _sum_tiles([m]),
        "bytes": nbytes,
        "stored_bits": 8 * nbytes / weights,
        "bias": m.bias,
        "input_group": m.input_group,
        "rotated_inputs": rotated_inputs(checkpoint.schema, name),
    }


def rotated_inputs(schema: s.QuantizationSchema, name: str) -> bool:
    """Whether the codes of a module belong to rotated inputs."""
    transform = schema.input_transform(name)
    return transform is not None and transform.kind != "identity"


def by_projection(schema: s.QuantizationSchema) -> dict[str, dict[int, int]]:
    """Last part of the module name -> bits -> tiles, over all layers."""
    groups: dict[str, list[s.Module]] = {}
    for name, module in schema.modules.items():
        groups.setdefault(name.rpartition(".")[2], []).append(module)
    return {projection: _sum_tiles(modules) for projection, modules in groups.items()}


def skipped(checkpoint: Checkpoint) -> dict[str, str]:
    """Module -> why it is not quantized, for everything that holds a matrix; output heads that only tie are named as well."""
    out = {}
    for name in checkpoint.dense_names:
        header = checkpoint.headers[name]
        if len(header.shape) >= 2:
            module = name.removesuffix(".weight")
            out[module] = _why(checkpoint.schema, module, name, header)
    for entry in checkpoint.schema.ignore:
        if not entry.startswith("re:") and entry not in out:
            tied = entry.endswith("lm_head") and checkpoint.config.get("tie_word_embeddings")
            out[entry] = "tied to the embeddings, stores nothing" if tied else "listed in ignore, stores nothing"
    return out


def _why(schema: s.QuantizationSchema, module: str, name: str, header: Header) -> str:
    if len(header.shape) > 2:
        return f"{len(header.shape)}-dimensional, no linear"
    if _part(name, header) == "embeddings":
        return "embedding: looked up, not multiplied"
    if (entry := s.ignored_by(schema.ignore, module)) is not None:
        return f"listed in ignore as {entry!r}"
    if any(d % s.TILE for d in header.shape):
        return f"{list(header.shape)} is not a multiple of {s.TILE} on both axes"
    return "neither quantized nor ignored: if it is a linear, a server refuses the checkpoint"


def _part(name: str, header: Header) -> str:
    if len(header.shape) < 2:
        return "norms and biases"
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in ("lm_head", "output", "embed_out"):
        return "head"
    return "embeddings" if "embed" in module or module in ("wte", "wpe") else "ignored linears"


def _sum_tiles(modules: Any) -> dict[int, int]:
    total: Counter[int] = Counter()
    for module in modules:
        total.update({bits: n for bits, n in module.tile_counts.items() if n})
    return dict(sorted(total.items()))

"""Write a checkpoint in the integer forms of compressed-tensors, which stock vLLM and transformers load.

A tile has one scale for 64 x 64 weights. In groups of 64 inputs with a scale for each output (W4A16, W8A16) that is exactly
representable, 64 equal scales below each other, as long as outputs and inputs are not rotated. One scale for a whole output
(W8A8) is not, nor is a rotated weight in its own basis: those are rounded anew, and the error is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.convert import SHARD_BYTES, Planned, cast, dequantized, without_quantization, write_model
from vllm_tilequant.checkpoint.files import CheckpointError, raise_faults
from vllm_tilequant.checkpoint.foreign import pack_int32
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.kernels import layout

#: Fractions of the largest magnitude that a group's scale is tried for when it is rounded anew.
_CLIPS = tuple(1 - 0.025 * i for i in range(13))


class Scheme(StrEnum):
    w4a16 = "w4a16"
    w8a16 = "w8a16"
    w8a8 = "w8a8"

    @property
    def bits(self) -> int:
        return 4 if self is Scheme.w4a16 else 8


@dataclass(frozen=True)
class Compressed:
    """errors: linear -> |W^ - W| / |W| against our weight at stored precision; exact: linears whose codes were kept."""

    files: list[str]
    errors: dict[str, float]
    exact: list[str]


def to_compressed(
    folder: str | Path, output: str | Path, scheme: Scheme, dtype: torch.dtype, requantize: bool, shard_bytes: int = SHARD_BYTES
) -> Compressed:
    """Write the folder in `scheme`; dtype: of scales and of what is dense.

    A quantized output head is written dense. Raises `CheckpointError` naming every linear that the scheme cannot hold exactly
    and why, unless `requantize`.
    """
    checkpoint = Checkpoint.open(folder)
    heads = [name for name in checkpoint.schema.modules if name.rpartition(".")[2] == "lm_head"]  # loaders want these dense
    linears = {name: m for name, m in checkpoint.schema.modules.items() if name not in heads}
    reasons = {name: why for name in linears if (why := _unrepresentable(checkpoint, name, scheme))}
    if reasons and not requantize:
        try:
            raise_faults(checkpoint.folder, [f"{name}: {why}" for name, why in reasons.items()])
        except CheckpointError as e:
            text = str(e).replace("is not a sound tilequant checkpoint", f"cannot be written as {scheme} exactly")
            raise CheckpointError(f"{text}\n{_remedy(scheme)}") from None
    planned: dict[str, Planned] = {}
    errors: dict[str, float] = {}

    @lru_cache(maxsize=1)  # the tensors of a linear are written one after the other
    def made(name: str) -> tuple[Tensor, Tensor]:
        return _integers(checkpoint, name, scheme, dtype, name not in reasons)

    def part(name: str, leaf: str) -> Tensor:
        return _tensors(*made(name), scheme)[leaf]

    for name in heads:
        m = checkpoint.schema.modules[name]
        nbytes = m.out_features * m.in_features * dtype.itemsize
        planned[f"{name}.weight"] = Planned(nbytes, partial(dequantized, checkpoint, name, dtype))
        if m.bias:
            planned[f"{name}.{s.BIAS}"] = cast(checkpoint, f"{name}.{s.BIAS}", dtype)
    for name, m in linears.items():
        errors[name] = _error(checkpoint, name, *made(name))
        n, k = m.out_features, m.in_features
        sizes = {
            "weight_packed": n * k * scheme.bits // 8,
            "weight_scale": n * k // s.TILE * dtype.itemsize,
            "weight_shape": 16,
        }
        if scheme is Scheme.w8a8:
            sizes = {"weight": n * k, "weight_scale": n * dtype.itemsize}
        for leaf, nbytes in sizes.items():
            planned[f"{name}.{leaf}"] = Planned(nbytes, partial(part, name, leaf))
        if m.bias:
            planned[f"{name}.{s.BIAS}"] = cast(checkpoint, f"{name}.{s.BIAS}", dtype)
    planned |= {name: cast(checkpoint, name, dtype) for name in checkpoint.dense_names}
    config = without_quantization(checkpoint.config, dtype) | {
        "quantization_config": _config([*checkpoint.schema.ignore, *heads], scheme)
    }
    files = write_model(checkpoint.folder, Path(output), config, planned, shard_bytes)
    return Compressed(files, errors, [n for n in linears if n not in reasons])


def _unrepresentable(checkpoint: Checkpoint, name: str, scheme: Scheme) -> str | None:
    """Why a linear cannot keep its codes; None if it can."""
    if scheme is Scheme.w8a8:
        return "one scale for each output cannot hold one for each tile"
    weight = checkpoint.module(name).weight
    if weight.input_rotation is not None:
        return "its inputs are rotated"
    kinds = {checkpoint.schema.transforms[i].kind for i in weight.output_transform.unique().tolist()}
    if kinds != {"identity"}:
        return f"its outputs are rotated ({', '.join(sorted(kinds - {'identity'}))})"
    wide = {bits: n for bits, n in checkpoint.schema.modules[name].tile_counts.items() if n and bits > scheme.bits}
    return f"{sum(wide.values())} tiles of {', '.join(map(str, wide))} bits" if wide else None


def _remedy(scheme: Scheme) -> str:
    rounded = "--requantize rounds their weights anew and tells the error"
    if scheme is Scheme.w8a8:
        return f"{rounded}; w4a16 and w8a16 keep the codes of a checkpoint calibrated with output_transform none"
    wide = "; w8a16 holds tiles of every width" if scheme is Scheme.w4a16 else ""
    return f"{rounded}{wide}; a checkpoint calibrated with output_transform none has no rotations"


def _integers(checkpoint: Checkpoint, name: str, scheme: Scheme, dtype: torch.dtype, exact: bool) -> tuple[Tensor, Tensor]:
    """(codes [N, K] int8, scale [N, K/64] or [N, 1] in `dtype`)."""
    if exact:
        weight = checkpoint.module(name).weight
        half = torch.exp2(layout.expand_tiles(weight.tile_bits).float() - 1)
        codes = (layout.unpack(weight).float() - half).to(torch.int8)
        return codes, weight.tile_scale.repeat_interleave(s.TILE, 0).to(dtype)
    dense = dequantized(checkpoint, name, torch.float32)
    group = dense.shape[1] if scheme is Scheme.w8a8 else s.TILE
    return round_anew(dense, scheme.bits, group, dtype)


def _error(checkpoint: Checkpoint, name: str, codes: Tensor, scale: Tensor) -> float:
    """Of the scales in their dtype as well: they are what a reader multiplies with."""
    wanted = dequantized(checkpoint, name, torch.float32)
    spread = scale.float().repeat_interleave(wanted.shape[1] // scale.shape[1], 1)
    return float((codes.float() * spread - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _tensors(codes: Tensor, scale: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    if scheme is Scheme.w8a8:
        return {"weight": codes, "weight_scale": scale}
    unsigned = (codes.to(torch.int16) + (1 << (scheme.bits - 1))).to(torch.uint8)
    shape = torch.tensor(codes.shape, dtype=torch.int64)
    return {"weight_packed": pack_int32(unsigned, scheme.bits), "weight_scale": scale, "weight_shape": shape}


def round_anew(dense: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to nearest with the scale of least squared error for each output and `group` inputs, as it is after `dtype`.

    dense: [N, K] float32 -> (codes [N, K] int8, scale [N, K/group] dtype)
    """
    rows = dense.view(dense.shape[0], -1, group)
    half = 1 << (bits - 1)
    largest = rows.abs().amax(2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * half)
    best = torch.full_like(largest, torch.inf)
    scale = torch.zeros_like(largest, dtype=dtype)
    for clip in _CLIPS:
        tried = (largest * clip / (half - 0.5)).to(dtype)
        step = tried.float().clamp_min(torch.finfo(torch.float32).tiny)
        error = ((rows / step).round().clamp(-half, half - 1) * step - rows).square().sum(2, keepdim=True)
        better = error < best
        scale, best = torch.where(better, tried, scale), torch.where(better, error, best)
    step = scale.float().clamp_min(torch.finfo(torch.float32).tiny)
    codes = (rows / step).round().clamp(-half, half - 1).to(torch.int8)
    return codes.view(dense.shape), scale[..., 0]


def _config(ignore: list[str], scheme: Scheme) -> dict[str, Any]:
    """What compressed-tensors writes for such a model itself."""
    a8 = scheme is Scheme.w8a8
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if a8 else "group",
    }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    form = "int-quantized" if a8 else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": form,
                "targets": ["Linear"],
                "weights": weights if a8 else weights | {"group_size": s.TILE},
                "input_activations": activations if a8 else None,
                "output_activations": None,
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }

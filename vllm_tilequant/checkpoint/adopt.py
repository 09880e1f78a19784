"""Make a tilequant checkpoint of a GPTQ or compressed-tensors one: exactly where its scales hold for whole tiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.card import write_card
from vllm_tilequant.checkpoint.convert import SHARD_BYTES, Planned, cast, without_quantization, write_model
from vllm_tilequant.checkpoint.files import CheckpointError
from vllm_tilequant.checkpoint.foreign import Foreign, Integers, raise_foreign
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.kernels import layout

#: The one profile of an adopted checkpoint: thresholds need calibration, so that each channel is read at all its stored bits.
PROFILE = "stored"
_SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_DENSE = re.compile(r"embed|norm|rotary|wte|wpe")


@dataclass(frozen=True)
class Adopted:
    """errors: linear -> |W^ - W| / |W| against what the source says, 0 where its codes were taken as they are."""

    files: list[str]
    errors: dict[str, float]


def adopt(
    folder: str | Path, output: str | Path, dtype: torch.dtype, requantize: bool, shard_bytes: int = SHARD_BYTES
) -> Adopted:
    """Write the tilequant form of a foreign checkpoint. dtype: of what is dense.

    Codes and scales are taken as they are where one scale holds for each tile of 64 x 64 (block or tensor scales): no error.
    Other linears are refused by name or, with `requantize`, rounded to 8-bit tiles. Outputs are not rotated, and there is one
    profile, which reads all stored bits: for graded profiles, quantize the original model. Raises `CheckpointError`.
    """
    source = Foreign.open(Path(folder))
    shapes = {name: list(linear.shape) for name, linear in source.linears.items()}
    ragged = [f"{n}: {shape}, not multiples of {s.TILE}" for n, shape in shapes.items() if any(d % s.TILE for d in shape)]
    raise_foreign(source.folder, ragged)
    planned: dict[str, Planned] = {}
    modules: dict[str, s.Module] = {}
    errors: dict[str, float] = {}
    faults = []
    packed = lru_cache(maxsize=1)(partial(_packed, source))  # the tensors of a linear are written one after the other

    def part(name: str, suffix: str) -> Tensor:
        return packed(name)[suffix]

    for name, linear in source.linears.items():
        weight = source.linear(name)
        why = weight.tiles()
        bits = weight.bits if not isinstance(why, str) else 8
        if isinstance(why, str) and not requantize:
            faults.append(f"{name}: {why}")
        n, k = linear.shape
        errors[name] = _error(weight)
        bias = f"{name}.{s.BIAS}" in source.headers
        tiles = (n // s.TILE) * (k // s.TILE)
        modules[name] = s.Module(out_features=n, in_features=k, tile_counts={bits: tiles}, bias=bias, input_group=_group(name))
        for suffix in s.TENSORS:
            planned[f"{name}.{suffix}"] = Planned(0, partial(part, name, suffix))
        if bias:
            planned[f"{name}.{s.BIAS}"] = cast(source, f"{name}.{s.BIAS}", dtype)
    if faults:
        try:
            raise_foreign(source.folder, faults)
        except CheckpointError as e:
            remedy = "--requantize rounds them to 8-bit tiles and tells the error; better, quantize the original model"
            raise CheckpointError(f"{str(e).replace('cannot be read', 'cannot be taken over exactly')}\n{remedy}") from None
    dense = [n for n in source.dense_names if n not in planned]
    planned |= {name: cast(source, name, dtype) for name in dense}
    schema = s.QuantizationSchema(
        quant_method=s.QUANT_METHOD,
        format_version=s.FORMAT_VERSION,
        tile=s.TILE,
        max_bits=max(4, *(max(m.tile_counts) for m in modules.values())),
        transforms=[s.Transform(kind="identity")],
        profiles=s.Profiles(names=[PROFILE], default=s.PROFILE_OFF),
        ignore=_ignore(source, dense),
        modules=modules,
        producer={"converted from": source.method},
    )
    sizes = {f"{n}.{x}": spec for n in modules for x, spec in schema.tensor_specs(n).items()}
    planned = {
        name: Planned(_nbytes(sizes[name]), p.make) if name in sizes and not p.nbytes else p for name, p in planned.items()
    }  # fmt: skip
    config = without_quantization(source.config, dtype) | {"quantization_config": schema.dump()}
    files = write_model(source.folder, Path(output), config, planned, shard_bytes, _finish)
    return Adopted(files, errors)


def _finish(folder: Path) -> None:
    verify(folder, hashes=False)
    write_card(folder)


def _packed(source: Foreign, name: str) -> dict[str, Tensor]:
    """The stored tensors of one linear by suffix."""
    weight = source.linear(name)
    exact = weight.tiles()
    codes, scale = weight.rounded() if isinstance(exact, str) else exact
    bits = 8 if isinstance(exact, str) else weight.bits
    tile_bits = torch.full(scale.shape, bits, dtype=torch.uint8)
    unsigned = (codes + (1 << (bits - 1))).to(torch.uint8)
    packed = layout.pack(unsigned, tile_bits, scale, torch.zeros(scale.shape[0], dtype=torch.uint8))
    return layout.to_tensors(packed, torch.full((1, 4), -1.0))  # every |x| is greater than -1: all stored bits are read


def _error(weight: Integers) -> float:
    if not isinstance(weight.tiles(), str):
        return 0.0
    codes, scale = weight.rounded()
    dense = weight.dense()
    return float((codes * layout.expand_tiles(scale) - dense).norm() / dense.norm().clamp_min(1e-30))


def _group(name: str) -> str:
    """Linears that read the same input, as far as usual names tell it."""
    parent, _, leaf = name.rpartition(".")
    members = next((m for m in _SHARED if leaf in m), (leaf,))
    return f"{parent}.{members[0]}" if parent else members[0]


def _ignore(source: Foreign, dense: list[str]) -> list[str]:
    """Linears that stay dense, by name: matrices that are no embeddings; the output head also where it stores nothing."""
    found = [n.removesuffix(".weight") for n in dense if n.endswith(".weight") and len(source.headers[n].shape) == 2]
    return sorted({n for n in found if not _DENSE.search(n)} | {"lm_head"})


def _nbytes(spec: s.TensorSpec) -> int:
    return spec.shape[0] * spec.shape[-1] * {"I32": 4, "F32": 4, "U8": 1}.get(spec.dtypes[0], 2)

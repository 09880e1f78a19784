"""Write a checkpoint in another form: as an ordinary dense model that any program loads, at the stored precision.

The forms of other quantizers are in `compressed` (out) and `foreign` (in); all write folders through `write_model`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.card import CALIBRATION, CARD, RECIPE
from vllm_tilequant.checkpoint.files import CONFIG, INDEX, PICKLE_SUFFIXES, SINGLE, Tensors, checked_file
from vllm_tilequant.checkpoint.foreign import Foreign, is_foreign
from vllm_tilequant.checkpoint.manifest import MANIFEST, write_manifest
from vllm_tilequant.checkpoint.reader import Checkpoint, dense_faults
from vllm_tilequant.kernels import portable

SHARD_BYTES = 4 << 30
#: What belongs to the quantized form alone. Python files stay behind as well: no loader of ours runs them.
_LEFT_OUT = {CONFIG, INDEX, MANIFEST, CARD, CALIBRATION, RECIPE}


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written: its size now, itself when its file is."""

    nbytes: int
    make: Callable[[], Tensor]


def to_dense(
    folder: str | Path, output: str | Path, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write the dense model of a tilequant, GPTQ or compressed-tensors folder; returns the names of its weight files.

    Every quantized linear is dequantized at its stored precision; what is dense already is cast to `dtype` where it is a
    float. The folder appears whole or not at all. Raises `CheckpointError` on a bad checkpoint, `FileExistsError` where
    `output` is there already.
    """
    source = Foreign.open(Path(folder)) if is_foreign(Path(folder)) else Checkpoint.open(folder)
    planned: dict[str, Planned] = {}
    if isinstance(source, Foreign):
        for name, linear in source.linears.items():
            nbytes = linear.shape[0] * linear.shape[1] * dtype.itemsize
            planned[f"{name}.weight"] = Planned(nbytes, partial(_foreign, source, name, dtype))
    else:
        for name, m in source.schema.modules.items():
            nbytes = m.out_features * m.in_features * dtype.itemsize
            planned[f"{name}.weight"] = Planned(nbytes, partial(dequantized, source, name, dtype))
            if m.bias:
                planned[f"{name}.bias"] = cast(source, f"{name}.{s.BIAS}", dtype)
    planned |= {name: cast(source, name, dtype) for name in source.dense_names}
    return write_model(source.folder, Path(output), without_quantization(source.config, dtype), planned, shard_bytes)


def dequantized(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """[N, K]: the weight of a module at its stored precision, in the basis of the source model."""
    return portable.dequantize(checkpoint.module(name).weight, checkpoint.transforms, dtype).contiguous()


def _foreign(source: Foreign, name: str, dtype: torch.dtype) -> Tensor:
    return source.linear(name).dense().to(dtype)


def cast(source: Tensors, name: str, dtype: torch.dtype) -> Planned:
    """A dense tensor in `dtype` if it is a float, else as it is. Making it raises `CheckpointError` if it is not finite."""
    header = source.headers[name]
    floating = header.dtype.startswith(("F", "BF"))

    def make() -> Tensor:
        tensor = source.tensor(name)
        if faults := dense_faults(name, tensor):
            raise s.FormatError(f"{source.folder}: {faults[0]}")
        return tensor.to(dtype) if floating else tensor

    return Planned(prod(header.shape) * dtype.itemsize if floating else header.nbytes, make)


def without_quantization(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the dense model."""
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config", "torch_dtype")}
    return plain | {"dtype": str(dtype).removeprefix("torch.")}


def write_model(
    source: Path,
    output: Path,
    config: Mapping[str, Any],
    planned: Mapping[str, Planned],
    shard_bytes: int = SHARD_BYTES,
    finish: Callable[[Path], object] = lambda folder: None,
) -> list[str]:
    """Write a model folder whole or not at all: weights in shards, config, the other files of `source`, a manifest.

    finish: called with the folder before the manifest is written. Returns the names of the weight files.
    """
    plan = _shards(planned, shard_bytes)
    with atomic_folder(output) as partial:
        for file, names in plan.items():
            tensors = {name: planned[name].make().contiguous() for name in names}
            save_file(tensors, partial / file, metadata={"format": "pt"})
        if len(plan) > 1:
            weight_map = {name: file for file, names in plan.items() for name in names}
            total = sum((partial / file).stat().st_size for file in plan)
            (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for path in sorted(source.iterdir()):
            weights = path.name.endswith((".safetensors", ".py", *PICKLE_SUFFIXES)) or path.name.startswith(".")
            if path.is_file() and not weights and path.name not in _LEFT_OUT:
                shutil.copyfile(checked_file(source, path.name), partial / path.name)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes 0600: a server under another user could not read it
        finish(partial)
        write_manifest(partial)
    return list(plan)


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name when the block ends well, and vanishes when it does not."""
    if output.exists():
        raise FileExistsError(f"{output} is there already: name a folder that is not")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shards(planned: Mapping[str, Planned], shard_bytes: int) -> dict[str, list[str]]:
    """File -> names of its tensors, in the order given."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in planned.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}

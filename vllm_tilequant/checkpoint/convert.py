"""Write a checkpoint in another form: as an ordinary dense model that any program loads, at the stored precision."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_tilequant.checkpoint.files import CONFIG, INDEX, PICKLE_SUFFIXES, SINGLE, checked_file
from vllm_tilequant.checkpoint.manifest import MANIFEST, write_manifest
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.kernels import portable

SHARD_BYTES = 4 << 30
#: What belongs to the quantized form alone. Python files stay behind as well: no loader of ours runs them.
_LEFT_OUT = {CONFIG, INDEX, MANIFEST, "calibration_report.json", "recipe.yaml"}


def to_dense(
    folder: str | Path, output: str | Path, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write the dense model; returns the names of its weight files. The folder appears whole or not at all.

    Every quantized linear is dequantized at its stored precision; what is dense already is cast to `dtype` where it is a
    float. Raises `CheckpointError` on a bad checkpoint, `FileExistsError` where `output` is there already.
    """
    checkpoint = Checkpoint.open(folder)
    plan = _plan(checkpoint, dtype.itemsize, shard_bytes)
    with atomic_folder(Path(output)) as partial:
        for file, names in plan.items():
            save_file({name: _dense(checkpoint, name, dtype) for name in names}, partial / file, metadata={"format": "pt"})
        if len(plan) > 1:
            weight_map = {name: file for file, names in plan.items() for name in names}
            total = sum((partial / file).stat().st_size for file in plan)
            (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
        config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "torch_dtype")}
        (partial / CONFIG).write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
        for path in sorted(checkpoint.folder.iterdir()):
            weights = path.name.endswith((".safetensors", ".py", *PICKLE_SUFFIXES)) or path.name.startswith(".")
            if path.is_file() and not weights and path.name not in _LEFT_OUT:
                shutil.copyfile(checked_file(checkpoint.folder, path.name), partial / path.name)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes 0600: a server under another user could not read it
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


def _plan(checkpoint: Checkpoint, itemsize: int, shard_bytes: int) -> dict[str, list[str]]:
    """File -> names of its tensors, in the order of the checkpoint."""
    sizes = {}
    for name, m in checkpoint.schema.modules.items():
        sizes[f"{name}.weight"] = m.out_features * m.in_features * itemsize
        if m.bias:
            sizes[f"{name}.bias"] = m.out_features * itemsize
    for name in checkpoint.dense_names:
        sizes[name] = checkpoint.headers[name].nbytes
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


def _dense(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    module, _, leaf = name.rpartition(".")
    if module not in checkpoint.schema.modules:
        tensor = checkpoint.dense(name)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    stored = checkpoint.module(module)
    if leaf == "weight":
        return portable.dequantize(stored.weight, checkpoint.transforms, dtype).contiguous()
    if stored.bias is None:
        raise AssertionError(f"{name} was planned without a bias")
    return stored.bias.to(dtype)

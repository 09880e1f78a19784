"""Open a checkpoint folder: every name, dtype and shape is checked against the format before a tensor is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.files import CheckpointError, Header, Tensors, raise_faults, read_config, read_headers
from vllm_tilequant.checkpoint.model_config import model_config_faults
from vllm_tilequant.kernels import layout

__all__ = ["Checkpoint", "CheckpointError", "Header", "StoredModule", "header_faults", "read_config"]


@dataclass(frozen=True)
class StoredModule:
    """One quantized linear as stored. thresholds: [profiles, 4] float32; bias: [N] in its own dtype; smoothing: [K] float32."""

    weight: layout.PackedWeight
    thresholds: Tensor
    bias: Tensor | None
    smoothing: Tensor | None = None


class Checkpoint(Tensors):
    """A folder whose config and headers hold what the format promises. Tensors are read on demand, memory-mapped."""

    def __init__(self, folder: Path, config: dict[str, Any], schema: s.QuantizationSchema, headers: dict[str, Header]):
        super().__init__(folder, headers)
        self.config, self.schema = config, schema

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config.json and all headers; raises `CheckpointError` that lists every fault found."""
        folder = Path(folder)
        config = read_config(folder)
        if "quantization_config" not in config:
            raise CheckpointError(f"{folder} is not quantized: its config.json has no quantization_config")
        try:
            schema = s.QuantizationSchema.parse(config["quantization_config"])
        except s.FormatError as e:
            raise CheckpointError(f"{folder}: {e}") from None
        headers = read_headers(folder)
        raise_faults(folder, header_faults(schema, headers) + model_config_faults(config, headers))
        return cls(folder, config, schema, headers)

    def dense(self, name: str) -> Tensor:
        """A tensor that belongs to no quantized linear; raises `CheckpointError` when it is not finite."""
        tensor = self.tensor(name)
        raise_faults(self.folder, dense_faults(name, tensor))
        return tensor

    def module(self, name: str) -> StoredModule:
        """The packed weight, thresholds and bias of one quantized linear; raises `CheckpointError` on any bad value."""
        tensors = self.module_tensors(name)
        raise_faults(self.folder, self.value_faults(name, tensors))
        weight = layout.from_tensors(tensors, self.schema.input_transform(name))
        codes = tensors.get(s.SMOOTHING)
        smoothing = None if codes is None else layout.smoothing_values(codes)
        return StoredModule(weight, tensors[s.THRESHOLDS], tensors.get(s.BIAS), smoothing)

    def module_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one quantized linear by suffix, as stored: their values are not judged."""
        return {suffix: self.tensor(f"{name}.{suffix}") for suffix in self.schema.tensor_specs(name)}

    def value_faults(self, name: str, tensors: dict[str, Tensor]) -> list[str]:
        """What is wrong with the values of one quantized linear, one line each."""
        module = self.schema.modules[name]
        found = layout.payload_faults(tensors, module.tile_counts, len(self.schema.transforms))
        faults = [f"{name}.{fault}" for fault in found]
        first = self.schema.groups[module.input_group][0]
        for suffix in (s.THRESHOLDS, s.SMOOTHING) if module.smoothing else (s.THRESHOLDS,):
            if first != name and not torch.equal(self.tensor(f"{first}.{suffix}"), tensors[suffix]):
                faults.append(f"{name}.{suffix} differ within the shared-input group {module.input_group}")
        return faults

    @cached_property
    def transforms(self) -> Tensor:
        """[n, 64, 64] float64: the matrices that `output_transform` indexes."""
        return layout.transform_stack(self.schema.transforms)

    @property
    def dense_names(self) -> list[str]:
        """Tensors that belong to no quantized linear (embeddings, norms, ignored linears)."""
        own = {f"{m}.{suffix}" for m in self.schema.modules for suffix in self.schema.tensor_specs(m)}
        return [name for name in self.headers if name not in own]

    def stored_bits(self) -> float:
        """All stored bytes of the quantized linears (codes, scales, maps, transforms, thresholds, smoothing) x 8 / weights."""
        total = weights = 0
        for name, m in self.schema.modules.items():
            weights += m.out_features * m.in_features
            for suffix in self.schema.tensor_specs(name):
                total += self.headers[f"{name}.{suffix}"].nbytes if suffix != s.BIAS else 0
        return 8 * total / weights

    def stored_code_bits(self) -> float:
        """Code bits alone per weight: what a static pass reads."""
        weights = sum(m.out_features * m.in_features for m in self.schema.modules.values())
        codes = sum(
            max(bits, 4) * n * s.TILE * s.TILE for m in self.schema.modules.values() for bits, n in m.tile_counts.items()
        )
        return codes / weights


def header_faults(schema: s.QuantizationSchema, headers: dict[str, Header]) -> list[str]:
    """What is missing, extra or of a wrong dtype or shape, one line each."""
    faults, expected = [], set()
    for module in schema.modules:
        for suffix, spec in schema.tensor_specs(module).items():
            name = f"{module}.{suffix}"
            expected.add(name)
            header = headers.get(name)
            if header is None:
                faults.append(f"{name}: missing")
            elif header.dtype not in spec.dtypes or header.shape != spec.shape:
                faults.append(
                    f"{name}: {header.dtype} {list(header.shape)}, wanted {' or '.join(spec.dtypes)} {list(spec.shape)}"
                )
    for name in headers:
        module, _, suffix = name.rpartition(".")
        if name not in expected and (suffix in (*s.TENSORS, s.SMOOTHING) or module in schema.modules):
            faults.append(f"{name}: extra, config.json does not announce it")
    return faults


def dense_faults(name: str, tensor: Tensor) -> list[str]:
    """What is wrong with the values of a dense tensor."""
    return [f"{name} is not finite"] if tensor.is_floating_point() and not _finite(tensor) else []


def _finite(tensor: Tensor) -> bool:
    """By its ends, which a NaN becomes: one pass without memory, a fiftieth of what `isfinite` takes for an embedding."""
    if tensor.numel() == 0:
        return True
    least, most = torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float())
    return bool(least.isfinite() and most.isfinite())

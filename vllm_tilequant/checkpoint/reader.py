"""Open a checkpoint folder: every name, dtype and shape is checked against the format before a tensor is read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_tilequant import schema as s
from vllm_tilequant.kernels import layout

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OWN_SUFFIXES = (s.PLANE0, s.PLANE1, s.EXTENSION, s.MAP, s.SCALE, s.OUTPUT_TRANSFORM, s.THRESHOLDS)
_SHOWN = 12


class CheckpointError(s.FormatError):
    """A folder that is not a complete, consistent tilequant checkpoint. The message lists every fault."""


@dataclass(frozen=True)
class Header:
    """Where a tensor lies and what its file says about it; `dtype` is the safetensors name."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredModule:
    """One quantized linear as stored. thresholds: [profiles, 4] float32; bias: [N] in its own dtype."""

    weight: layout.PackedWeight
    thresholds: Tensor
    bias: Tensor | None


class Checkpoint:
    """A folder whose config and headers hold what the format promises. Tensors are read on demand, memory-mapped."""

    def __init__(self, folder: Path, config: dict[str, Any], schema: s.QuantizationSchema, headers: dict[str, Header]):
        self.folder, self.config, self.schema, self.headers = folder, config, schema, headers

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
        faults = header_faults(schema, headers)
        raise_faults(folder, faults)
        return cls(folder, config, schema, headers)

    def tensor(self, name: str) -> Tensor:
        """One tensor by its full name, on the CPU."""
        return self._handle(self.headers[name].file).get_tensor(name)

    def module(self, name: str) -> StoredModule:
        """The packed weight, thresholds and bias of one quantized linear."""
        tensors = self.module_tensors(name)
        return StoredModule(layout.from_tensors(tensors), tensors[s.THRESHOLDS], tensors.get(s.BIAS))

    def module_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one quantized linear by suffix."""
        return {suffix: self.tensor(f"{name}.{suffix}") for suffix in self.schema.tensor_specs(name)}

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
        """All stored bytes of the quantized linears (codes, scales, maps, transforms, thresholds) x 8 / weights."""
        total = weights = 0
        for name, m in self.schema.modules.items():
            weights += m.out_features * m.in_features
            for suffix in _OWN_SUFFIXES:
                h = self.headers[f"{name}.{suffix}"]
                total += _bytes(h)
        return 8 * total / weights

    def stored_code_bits(self) -> float:
        """Code bits alone per weight: what a static pass reads."""
        weights = sum(m.out_features * m.in_features for m in self.schema.modules.values())
        codes = sum(
            max(bits, 4) * n * s.TILE * s.TILE for m in self.schema.modules.values() for bits, n in m.tile_counts.items()
        )
        return codes / weights

    def _handle(self, file: str) -> Any:
        handles = self.__dict__.setdefault("_handles", {})
        if file not in handles:
            handles[file] = safe_open(self.folder / file, framework="pt")
        return handles[file]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; raises `CheckpointError` in one sentence when there is none or it is no JSON object."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no config.json: it is not a model folder")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return config


def read_headers(folder: Path) -> dict[str, Header]:
    """Name -> header of every tensor of the folder's safetensors files. Raises `CheckpointError`."""
    files, listed = _weight_files(folder)
    headers: dict[str, Header] = {}
    for file in files:
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder}: {file} is missing, though the index lists it")
        try:
            with safe_open(folder / file, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    if name in headers:
                        raise CheckpointError(f"{folder}: tensor {name} is in both {headers[name].file} and {file}")
                    view = f.get_slice(name)
                    headers[name] = Header(file, view.get_dtype(), tuple(view.get_shape()))
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{folder / file} is damaged or not a safetensors file: {e}") from None
    if listed is not None:
        raise_faults(
            folder,
            [f"{n}: the index names it, {f} does not hold it" for n, f in listed.items() if _file_of(headers, n) != f]
            + [f"{n}: not in the index" for n in headers if n not in listed],
        )
    return headers


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
        if name not in expected and (suffix in _OWN_SUFFIXES or module in schema.modules):
            faults.append(f"{name}: extra, config.json does not announce it")
    return faults


def raise_faults(folder: Path, faults: list[str]) -> None:
    """Raise one `CheckpointError` for all faults; nothing when there is none."""
    if not faults:
        return
    shown = "\n  ".join(faults[:_SHOWN])
    more = f"\n  ... and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise CheckpointError(f"{folder} is not a sound tilequant checkpoint ({len(faults)} faults):\n  {shown}{more}")


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The weight files, and the index's own map of tensor -> file if the folder has an index."""
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{folder / INDEX} is not a safetensors index") from None
        # The index is a trust boundary: a file name may not lead out of the folder.
        if bad := [f for f in files if not isinstance(f, str) or not re.fullmatch(r"[\w.-]+\.safetensors", f)]:
            raise CheckpointError(f"{folder / INDEX} names files outside the folder or of another kind: {bad[:3]}")
        return files, weight_map
    if (folder / SINGLE).is_file():
        return [SINGLE], None
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}: no weights")


def _file_of(headers: dict[str, Header], name: str) -> str | None:
    return headers[name].file if name in headers else None


def _bytes(h: Header) -> int:
    width = {"I32": 4, "U8": 1, "F32": 4}[h.dtype]
    for d in h.shape:
        width *= d
    return width

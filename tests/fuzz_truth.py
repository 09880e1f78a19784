"""What a checkpoint says, in float64, read without the package's reader and layout: numpy on bytes, after docs/format.md.

`fuzz_checkpoint.py` holds what was loaded against this.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch

from vllm_tilequant.schema import rotation_v1

_DTYPES = {"I32": np.int32, "U8": np.uint8, "F32": np.float32, "BF16": np.uint16, "F16": np.float16}
_SHIFT = np.array([8 * (o // 4) + 2 * (o % 4) for o in range(16)])


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the folder; bfloat16 becomes float32, which holds it exactly."""
    out = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + o for o in entry["data_offsets"])
            array = np.frombuffer(raw[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            out[name] = (array.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else array
    return out


def _planes(words: np.ndarray) -> np.ndarray:
    """[..., W] int32 -> [..., 16 W] int64 of two bits."""
    return ((words.astype(np.int64)[..., None] >> _SHIFT) & 3).reshape(*words.shape[:-1], -1)


@cache
def _matrix(kind: str, seed: int) -> np.ndarray:
    if kind == "identity":
        return np.eye(64)
    permutation, left, right = rotation_v1(seed)
    h = np.array([[(-1) ** bin(i & j).count("1") / 8 for j in range(64)] for i in range(64)])
    return np.diag(left) @ h[permutation] @ np.diag(right)


class TrueLinear:
    """One quantized linear: codes u [N, K], stored bits B [N, K], scale s [N, K], and the matrix of every output tile."""

    def __init__(self, tensors: dict[str, np.ndarray], name: str, transforms: list[dict], rotation: int | None):
        """rotation: index of the transform of every 64 inputs, or None."""
        t = {suffix: tensors[f"{name}.{suffix}"] for suffix in ("weight_plane0", "weight_plane1", "weight_extension")}
        bits = tensors[f"{name}.weight_tile_bits"].astype(np.int64)
        planes = [_planes(t["weight_plane0"]).T, _planes(t["weight_plane1"]).T]
        planes += [np.zeros_like(planes[0]), np.zeros_like(planes[0])]
        row = 0
        for kt in range(bits.shape[1]):
            for nt in range(bits.shape[0]):
                for plane in range(2, bits[nt, kt] // 2):
                    tile = _planes(t["weight_extension"][row].reshape(64, 4))  # [channels, outputs]
                    planes[plane][64 * nt : 64 * nt + 64, 64 * kt : 64 * kt + 64] = tile.T
                    row += 1
        self.bits = bits.repeat(64, 0).repeat(64, 1)
        aligned = sum(p << (6 - 2 * i) for i, p in enumerate(planes))
        self.codes = aligned >> (8 - self.bits)
        self.scale = tensors[f"{name}.weight_tile_scale"].astype(np.float64).repeat(64, 0).repeat(64, 1)
        index = tensors[f"{name}.output_transform"].reshape(-1)
        self.matrices = [_matrix(transforms[i]["kind"], transforms[i].get("seed", 0)) for i in index]
        self.thresholds = tensors[f"{name}.thresholds"].astype(np.float64)
        bias = tensors.get(f"{name}.bias")
        self.bias = None if bias is None else bias.astype(np.float64)
        self.rotation = None if rotation is None else transforms[rotation]

    def read(self, level: np.ndarray) -> np.ndarray:
        """W~ [N, K] with channel i read at level[i] bits."""
        dropped = self.bits - np.minimum(level[None, :], self.bits)
        value = (self.codes >> dropped << dropped) + (2.0**dropped - 1) / 2 - 2.0 ** (self.bits - 1)
        return np.where(level[None, :] > 0, self.scale * value, 0.0)

    def restore(self, rotated: np.ndarray) -> np.ndarray:
        """U applied to each 64 outputs (the first axis)."""
        return np.concatenate([u @ rotated[64 * i : 64 * i + 64] for i, u in enumerate(self.matrices)])

    def weight(self) -> np.ndarray:
        w = self.restore(self.read(np.full(self.codes.shape[1], 8)))
        if self.rotation is not None:
            v = _matrix(self.rotation["kind"], self.rotation.get("seed", 0))
            w = np.concatenate([w[:, k : k + 64] @ v.T for k in range(0, w.shape[1], 64)], 1)
        return w

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """x' of one row, in the order of float32 sums that the format prescribes. [K] -> [K]"""
        if self.rotation is None or self.rotation["kind"] == "identity":
            return x
        permutation, left, right = rotation_v1(self.rotation.get("seed", 0))
        v = np.empty((len(x) // 64, 64), dtype=np.float32)
        v[:, permutation] = x.astype(np.float32).reshape(-1, 64) * np.array(left, dtype=np.float32)
        for step in (1, 2, 4, 8, 16, 32):
            a, b = v.reshape(-1, 2, step)[:, 0], v.reshape(-1, 2, step)[:, 1]
            v = np.stack((a + b, a - b), 1).reshape(v.shape)
        return (v * np.array(right, dtype=np.float32) / 8).reshape(-1).astype(np.float64)

    def graded(self, x: np.ndarray, row: int) -> np.ndarray:
        """[K] -> [N], one row graded with the thresholds of stored profile `row`."""
        x = self.rotate(x)
        level = 2 * (np.abs(x)[:, None] > self.thresholds[row][None, :]).sum(1)
        y = self.restore((self.read(level) @ x)[:, None])[:, 0]
        return y if self.bias is None else y + self.bias


@cache
def _skeleton(config_text: str):
    """A float64 transformers model of this config, to be filled."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(config_text)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def true_model(folder: Path):
    """(transformers model in float64 that holds what the files say, its quantized linears)."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    tensors = read_tensors(folder)
    linears = {
        name: TrueLinear(tensors, name, quantization["transforms"], module.get("input_transform"))
        for name, module in quantization["modules"].items()
    }
    model = _skeleton(json.dumps(config))
    state = model.state_dict()
    with torch.no_grad():
        for name, place in state.items():
            module, _, leaf = name.rpartition(".")
            if module in linears and leaf == "weight":
                place.copy_(torch.from_numpy(linears[module].weight()))
            elif name in tensors:
                place.copy_(torch.from_numpy(np.ascontiguousarray(tensors[name]).astype(np.float64)))
    return model, linears

"""Checkpoints of two other quantizers, read as integers and scales: GPTQ, and the integer formats of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_tilequant.checkpoint.files import CheckpointError, Header, Tensors, raise_faults, read_config, read_headers
from vllm_tilequant.kernels.layout import expand_tiles
from vllm_tilequant.schema import QUANT_METHOD, TILE

GPTQ, COMPRESSED = "gptq", "compressed-tensors"
_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "dense")
#: Tensors of these formats that say how activations or the cache are quantized: nothing of a weight is lost without them.
_BESIDE = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale")


@dataclass(frozen=True)
class Integers:
    """A weight as (codes - zero) * scale.

    codes: [N, K] int16, signed; scale: [n, k] float32 and zero: [n, k] int16, or None, with n dividing N and k dividing K: each
    entry holds for its block; columns: [K] int64, the column of `scale` that each input has where its order is not theirs
    """

    bits: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    columns: Tensor | None = None

    def dense(self) -> Tensor:
        """[N, K] float32."""
        codes = self.codes.float()
        return (codes if self.zero is None else codes - self._spread(self.zero).float()) * self._spread(self.scale)

    def tiles(self) -> tuple[Tensor, Tensor] | str:
        """(codes without a zero point [N, K] int16, scale of each 64 x 64 tile [N/64, K/64] float32), or why there are none."""
        scale, zero = self._spread(self.scale), None if self.zero is None else self._spread(self.zero)
        n, k = scale.shape
        per_tile = scale.view(n // TILE, TILE, k // TILE, TILE)
        first = per_tile[:, :1, :, :1]
        if not bool((per_tile == first).all()):
            return "its scales differ inside tiles of 64 x 64"
        codes = self.codes if zero is None else self.codes - zero
        half = 1 << (self.bits - 1)
        if bool((codes < -half).any()) or bool((codes >= half).any()):
            return f"its zero points shift codes out of the {self.bits} bits that a tile has"
        return codes, first[:, 0, :, 0].contiguous()

    def rounded(self) -> tuple[Tensor, Tensor]:
        """As `tiles`, of 8-bit tiles: rounded to nearest anew, since its own scales are finer than tiles."""
        dense = self.dense()
        n, k = dense.shape
        largest = dense.view(n // TILE, TILE, k // TILE, TILE).abs().amax((1, 3))
        scale = (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return (dense / expand_tiles(scale)).round().clamp(-128, 127).to(torch.int16), scale

    def _spread(self, per_block: Tensor) -> Tensor:
        n, k = self.codes.shape
        rows = per_block.repeat_interleave(n // per_block.shape[0], 0)
        return rows[:, self.columns] if self.columns is not None else rows.repeat_interleave(k // rows.shape[1], 1)


@dataclass(frozen=True)
class Linear:
    """Where one quantized linear lies. kind: which tensors it has; shape: [N, K]."""

    kind: str
    shape: tuple[int, int]


class Foreign(Tensors):
    """A folder of another quantizer. linears: its quantized linears by name; dense_names: all other tensors worth keeping."""

    def __init__(self, folder: Path, headers: dict[str, Header], config: dict[str, Any]):
        super().__init__(folder, headers)
        self.config = config
        quantization = quantization_of(config)
        self.method = quantization["quant_method"]
        self.quantization = quantization
        self.linears: dict[str, Linear] = {}
        faults: list[str] = []
        for name in headers:
            module, _, leaf = name.rpartition(".")
            if leaf in ("qweight", "weight_packed") or (leaf == "weight" and f"{module}.weight_scale" in headers):
                try:
                    self.linears[module] = self._describe(module, leaf)
                except ValueError as e:
                    faults.append(f"{module}: {e}")
        raise_foreign(folder, faults)
        if not self.linears:
            raise CheckpointError(f"{folder}: config.json says {self.method}, but no tensor is quantized")
        own = {f"{m}.{leaf}" for m, linear in self.linears.items() for leaf in _LEAVES[linear.kind]}
        beside = {n for n in headers if n.rpartition(".")[2] in _BESIDE}
        self.dense_names = [n for n in headers if n not in own | beside]

    @classmethod
    def open(cls, folder: Path) -> Foreign:
        """Read config and headers; raises `CheckpointError`, `NotImplementedError` on a form that is not read here."""
        config = read_config(folder)
        quantization = quantization_of(config)
        if quantization["quant_method"] == COMPRESSED:
            stated = {str(g.get("format")) for g in [quantization, *_groups(quantization)] if g.get("format")}
            if odd := sorted(stated - {*_INTEGER_FORMATS, "mixed-precision"}):
                raise NotImplementedError(f"{folder} is in the format {odd}; {_INTEGER_FORMATS} are read")
            if quantization.get("transform_config"):
                raise NotImplementedError(f"{folder} has online transforms (transform_config), which are not read")
            if quantization.get("sparsity_config"):
                raise NotImplementedError(f"{folder} is stored sparsely (sparsity_config), which is not read")
        return cls(folder, read_headers(folder, strangers=True), config)

    def linear(self, name: str) -> Integers:
        """The integers and scales of one linear; raises `CheckpointError` where they are not finite or not in range."""
        kind = self.linears[name].kind
        found = {leaf: self.tensor(f"{name}.{leaf}") for leaf in _LEAVES[kind] if f"{name}.{leaf}" in self.headers}
        try:
            integers = {"gptq": self._gptq, "packed": self._packed, "plain": self._plain}[kind](name, found)
            n, k = integers.codes.shape
            if n % integers.scale.shape[0] or (integers.columns is None and k % integers.scale.shape[1]):
                raise ValueError(f"scales {list(integers.scale.shape)} do not divide a weight [{n}, {k}]")
            if not bool((integers.scale.isfinite()).all()):
                raise ValueError("its scales are not finite")
            if bool((integers.scale < 0).any()):  # a tile's scale is positive: the sign goes to the codes
                raise ValueError("it has negative scales")
        except (ValueError, IndexError, RuntimeError) as e:
            raise_foreign(self.folder, [f"{name}: {e}"])
            raise
        return replace(integers, scale=integers.scale.clamp_min(torch.finfo(torch.float32).tiny))

    def _describe(self, name: str, leaf: str) -> Linear:
        kind = {"qweight": "gptq", "weight_packed": "packed"}.get(leaf, "plain")
        if lacking := [part for part in _NEEDED[kind] if f"{name}.{part}" not in self.headers]:
            raise ValueError(f"has {leaf}, but no {', '.join(lacking)}")
        header = self.headers[f"{name}.{leaf}"]
        if leaf == "qweight":
            if self.method != GPTQ or len(header.shape) != 2:
                raise ValueError("qweight without GPTQ")
            return Linear("gptq", (header.shape[1], header.shape[0] * 32 // self._gptq_bits()))
        if leaf == "weight_packed":
            rows, columns = (int(v) for v in self.tensor(f"{name}.weight_shape").tolist())
            bits = header.shape[1] * 32 // max(columns, 1)
            if bits not in (4, 8) or header.dtype != "I32" or header.shape != (rows, columns * bits // 32):
                raise ValueError(f"{header.dtype} {list(header.shape)} for a weight [{rows}, {columns}] of 4 or 8 bits")
            return Linear("packed", (rows, columns))
        if header.dtype != "I8" or len(header.shape) != 2:
            raise ValueError(f"{header.dtype} {list(header.shape)} with a scale: only integer weights are read")
        return Linear("plain", (header.shape[0], header.shape[1]))

    def _gptq_bits(self) -> int:
        bits = self.quantization.get("bits")
        if bits not in (2, 4, 8):
            raise ValueError(f"GPTQ of {bits!r} bits; 2, 4 and 8 are read")
        return int(bits)

    def _gptq(self, name: str, t: dict[str, Tensor]) -> Integers:
        """qweight packs along inputs, qzeros along outputs; scales are [groups, N]."""
        bits = self._gptq_bits()
        half = 1 << (bits - 1)
        codes = unpack_int32(t["qweight"].T.contiguous(), bits).to(torch.int16) - half  # [N, K]
        zero = unpack_int32(t["qzeros"], bits).T.to(torch.int16) - half
        if self.quantization.get("checkpoint_format", "gptq") == "gptq":
            zero = zero + 1  # the first form of the format stores them one too small
        columns = t.get("g_idx")
        groups = t["scales"].shape[0]
        if columns is not None:
            if columns.numel() != codes.shape[1] or bool((columns < 0).any()) or bool((columns >= groups).any()):
                raise ValueError(f"g_idx does not name one of {groups} groups for each of {codes.shape[1]} inputs")
            in_order = torch.arange(codes.shape[1]) // (codes.shape[1] // groups)
            columns = None if torch.equal(columns.long(), in_order) else columns.long()
        return Integers(bits, codes, t["scales"].T.float(), zero if bool((zero != 0).any()) else None, columns)

    def _packed(self, name: str, t: dict[str, Tensor]) -> Integers:
        n, k = self.linears[name].shape
        bits = t["weight_packed"].shape[1] * 32 // k
        half = 1 << (bits - 1)
        codes = unpack_int32(t["weight_packed"], bits).to(torch.int16) - half
        zero = None
        if "weight_zero_point" in t:
            zero = t["weight_zero_point"]
            if zero.dtype == torch.int32:  # packed along the outputs
                zero = unpack_int32(zero.T.contiguous(), bits).T[: t["weight_scale"].shape[0]].to(torch.int16) - half
        columns = t.get("weight_g_idx")
        if columns is not None and bool((columns < 0).all()):
            columns = None  # "not used"
        return Integers(bits, codes, _two(t["weight_scale"]), _nonzero(zero), None if columns is None else columns.long())

    def _plain(self, name: str, t: dict[str, Tensor]) -> Integers:
        codes = t["weight"].to(torch.int16)
        narrow = bool((codes >= -8).all()) and bool((codes < 8).all())
        return Integers(4 if narrow else 8, codes, _two(t["weight_scale"]), _nonzero(t.get("weight_zero_point")))


_LEAVES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "plain": ("weight", "weight_scale", "weight_zero_point"),
}


_NEEDED = {
    "gptq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale", "weight_shape"),
    "plain": ("weight", "weight_scale"),
}


def is_foreign(folder: Path) -> bool:
    """Whether a folder's config names another quantizer; raises `CheckpointError` where it is no model folder."""
    quantization = read_config(folder).get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") != QUANT_METHOD


def quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of a quantizer that is read here; raises `NotImplementedError` on another one."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(quantization, dict) or method not in (GPTQ, COMPRESSED):
        raise NotImplementedError(f"quant_method {method!r}: of other quantizers, {GPTQ} and {COMPRESSED} are read")
    return quantization


def unpack_int32(words: Tensor, bits: int) -> Tensor:
    """[..., W] int32 -> [..., 32 W / bits] uint8, the first value in the lowest bits. bits: 2, 4 or 8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (words.contiguous().view(torch.uint8)[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def pack_int32(values: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack_int32`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    grouped = values.view(*values.shape[:-1], -1, 8 // bits) << shifts
    return grouped.sum(-1, dtype=torch.uint8).contiguous().view(torch.int32)


def raise_foreign(folder: Path, faults: list[str]) -> None:
    """One error for all; nothing when there is none."""
    try:
        raise_faults(folder, faults)
    except CheckpointError as e:
        raise CheckpointError(str(e).replace("is not a sound tilequant checkpoint", "cannot be read")) from None


def _groups(quantization: dict[str, Any]) -> list[dict[str, Any]]:
    groups = quantization.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _two(scale: Tensor) -> Tensor:
    """A scale of a whole tensor has one dimension or none."""
    return (scale if scale.dim() == 2 else scale.reshape(-1, 1)).float()


def _nonzero(zero: Tensor | None) -> Tensor | None:
    if zero is None or not bool((zero != 0).any()):
        return None
    return (zero if zero.dim() == 2 else zero.reshape(-1, 1)).to(torch.int16)

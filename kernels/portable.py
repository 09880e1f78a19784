"""The products in plain torch, on any device: what serves where no kernel does, and what the kernels are compared with.

The graded product is the arithmetic of the GPU: integer sums inside a tile, one float32 scale per tile and row, tiles added
in ascending order. Rows are computed one by one, so that a row's bits cannot depend on its neighbours. Whole sums of small
integers are exact in float32 (|sum| <= 64 * 127 * 256 < 2^24) in whatever order a matrix product adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tilequant.kernels.layout import (
    PackedWeight,
    aligned_codes,
    expand_tiles,
    pack_aligned,
    restore_outputs,
    restore_weight,
    restore_weight_inputs,
)
from vllm_tilequant.kernels.reference import activation_int8_ref, levels_ref
from vllm_tilequant.schema import LEVELS, TILE


@dataclass(frozen=True)
class PortableWeight:
    """What the portable graded product keeps resident: 1 byte a weight.

    codes: [K, N] uint8, aligned, input-major, rotated
    tile_bits: [N/64, K/64] uint8; tile_scale: [N/64, K/64] float32
    matrices: [N/64, 64, 64] float32, U of every output tile
    """

    codes: Tensor
    tile_bits: Tensor
    tile_scale: Tensor
    matrices: Tensor


def prepare(w: PackedWeight, transforms: Tensor) -> PortableWeight:
    """Unpack once, at load. transforms: [n, 64, 64] float64, addressed by `w.output_transform`."""
    matrices = transforms.to(w.plane0.device)[w.output_transform.long()]
    return PortableWeight(aligned_codes(w), w.tile_bits, w.tile_scale, matrices.float())


def packed(w: PortableWeight, transforms: Tensor) -> PackedWeight:
    """The checkpoint's own form of a weight: the inverse of `prepare`, bit for bit, on the device where it lies.

    transforms: as `prepare` got them; of several equal entries the first is named. Needs about twice the codes' memory.
    `input_rotation` is not part of the portable form and stays None.
    """
    index = torch.zeros(w.matrices.shape[0], dtype=torch.uint8, device=w.codes.device)
    for i in reversed(range(transforms.shape[0])):
        index[(w.matrices == transforms[i].to(w.matrices)).flatten(1).all(1)] = i
    return pack_aligned(w.codes, w.tile_bits, w.tile_scale, index)


def level_weight(codes: Tensor, tile_bits: Tensor, tile_scale: Tensor, level: int) -> Tensor:
    """The rotated weight with every channel read at `level` > 0 bits: [N, K] float32.

    codes: [K, N] uint8, aligned. In aligned units a tile of B bits has its grid in steps of 2^(8-B).
    """
    bits = expand_tiles(tile_bits).T.float()
    kept = bits.clamp_max(level)
    step = torch.exp2(8 - kept)  # of the levels that remain, in aligned units
    unit = torch.exp2(8 - bits)
    value = (codes.float() / step).floor() * step + (step - unit) / 2 - 128
    return (value / unit * expand_tiles(tile_scale).T).T


def dequantize(w: PackedWeight, transforms: Tensor, dtype: torch.dtype, level: int = LEVELS[-1]) -> Tensor:
    """The dense weight in the basis of the source model: [N, K] `dtype`, each channel read at `level` bits."""
    rotated = level_weight(aligned_codes(w), w.tile_bits, w.tile_scale, level).contiguous()
    matrices = transforms.to(rotated.device)[w.output_transform.long()]
    weight = restore_weight(rotated.double(), matrices.double())
    return (weight if w.input_rotation is None else restore_weight_inputs(weight, w.input_rotation)).to(dtype)


def fake_quantize(x: Tensor) -> Tensor:
    """x after INT8 with one scale per row and 64 inputs, back in float32. x: [M, K] any float."""
    q, scale = activation_int8_ref(x)
    return (q.view(x.shape[0], -1, TILE).float() * scale[..., None]).view(x.shape)


def static_linear(x: Tensor, dense: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """Prompts and large batches: [M, K] -> [M, N] at stored precision, in x's dtype. dense: [N, K], from `dequantize`."""
    if activation == "group64":
        x = fake_quantize(x).to(x.dtype)
    return F.linear(x, dense, bias)


def graded_linear(
    x: Tensor, w: PortableWeight, bias: Tensor | None, thresholds: Tensor, *, activation: str, in_order: bool = True
) -> Tensor:
    """Decode: every row reads each channel at its own level. x: [M, K] -> [M, N] in x's dtype.

    thresholds: [4] float32 ascending. activation: `group64` is the GPU's integer arithmetic; `none` keeps
    the activations in float32 (for comparisons). in_order: add tiles in ascending order, as is promised of what is served;
    else in whichever order is fast.
    """
    k, n = w.codes.shape
    levels = levels_ref(x, thresholds)
    if activation == "group64":
        q, scale = activation_int8_ref(x)
        a = q.float()
    else:
        a, scale = x.float(), torch.ones(x.shape[0], k // TILE, dtype=torch.float32, device=x.device)
    a = a.where(levels > 0, 0.0).view(x.shape[0], k // TILE, 1, TILE)
    # [M, K/64, 64, N/64]: min(level, B) leading bits of a channel in a tile, as a mask and as the doubled constant
    bits = w.tile_bits.T[:, None, :]
    y = torch.empty(x.shape[0], n, dtype=torch.float32, device=x.device)
    for m in range(x.shape[0]):
        kept = torch.minimum(bits, levels[m].view(k // TILE, TILE, 1)).to(torch.int16)
        mask = (0xFF00 >> kept & 0xFF).to(torch.uint8)
        # doubled, in aligned units: 2 (a & mask) + 2^(8-kept) - 2^(8-B) - 256
        centre = ((256 >> kept) - (256 >> bits.to(torch.int16)) - 256).float()
        tiles = (w.codes.view(k // TILE, TILE, -1, TILE) & mask[..., None]).view(k // TILE, TILE, n).float()
        sums = 2 * (a[m] @ tiles).view(k // TILE, -1, TILE) + (a[m] @ centre).view(k // TILE, -1, 1)  # exact integers
        factor = w.tile_scale.T * scale[m][:, None] * torch.exp2(bits[:, 0].float() - 9)  # 2^(B-8), and 1/2 for doubled
        terms = sums * factor[..., None]
        acc = terms[0] if in_order else terms.sum(0)
        for t in range(1, k // TILE if in_order else 0):  # a fixed order of float32 additions
            acc = acc + terms[t]
        y[m] = restore_outputs(acc.view(1, n), w.matrices)[0]
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)

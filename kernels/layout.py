"""Tiles, planes and plane words: pack, unpack, slice, join; stored and loaded bits. Pure torch, exact for every width and map.

A weight is cut into tiles of 64 outputs x 64 inputs. A tile stored with B bits (2, 4, 6 or 8) keeps unsigned codes
u = q + 2^(B-1), cut into 2-bit planes from the most significant pair down. Planes 0 and 1 of all tiles are dense; planes 2
and 3 exist only for 6- and 8-bit tiles, as rows of the `extension`, in the order (input tile, output tile, plane).

*Aligned* codes a = u << (8 - B) put plane p of every tile at bits 7-2p, 6-2p whatever its width; reading a channel at b bits
is then a mask of the leading bits. Packing, unpacking and the products work on these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from vllm_tilequant.schema import (
    BIAS,
    EXTENSION,
    LEVELS,
    MAP,
    MAX_SCALE,
    OUTPUT_TRANSFORM,
    OUTPUTS_PER_WORD,
    PLANE0,
    PLANE1,
    SCALE,
    SMOOTHING,
    SMOOTHING_ONE,
    SMOOTHING_STEPS,
    THRESHOLDS,
    TILE,
    TILE_BITS,
    WORDS_PER_TILE_PLANE,
    Transform,
    rotation_v1,
)


@dataclass(frozen=True)
class PackedWeight:
    """One linear (or several joined along their outputs) in the checkpoint's own form.

    plane0, plane1: [K, N/16] int32, one word = 16 outputs of one input channel
    extension: [E, 256] int32, one row = one plane of one tile, 64 channels x 4 words
    tile_bits: [N/64, K/64] uint8
    tile_scale: [N/64, K/64] float32
    output_transform: [N/64] uint8, index into the checkpoint's transforms
    input_rotation: [64] uint8 of `rotation_table`, V of every 64 inputs; None where inputs are taken as they come. Codes belong
        to x' = `rotate_inputs(x)`
    """

    plane0: Tensor
    plane1: Tensor
    extension: Tensor
    tile_bits: Tensor
    tile_scale: Tensor
    output_transform: Tensor
    input_rotation: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.plane0.shape[1] * OUTPUTS_PER_WORD

    @property
    def in_features(self) -> int:
        return self.plane0.shape[0]


def check_tile_bits(tile_bits: Tensor) -> None:
    """Raise `ValueError` unless every entry of a precision map is a width that the format knows."""
    bad = ~torch.isin(tile_bits, torch.tensor(TILE_BITS, dtype=tile_bits.dtype, device=tile_bits.device))
    if bool(bad.any()):
        raise ValueError(
            f"precision map holds {sorted(set(tile_bits[bad].tolist()))} at {int(bad.sum())} tiles; wanted {TILE_BITS}"
        )


def expand_tiles(per_tile: Tensor) -> Tensor:
    """[N/64, K/64] -> [N, K]: repeat a value per tile over its weights."""
    return per_tile.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)


def extension_rows_per_tile(tile_bits: Tensor) -> Tensor:
    """Rows of the extension that each tile owns: 0 for 2 and 4 bits, 1 for 6, 2 for 8. [N/64, K/64] int64."""
    return ((tile_bits.long() >> 1) - 2).clamp_min(0)


def extension_starts(tile_bits: Tensor) -> Tensor:
    """First row of every tile in the extension, in its order (input tile, output tile, plane). [N/64, K/64] int64.

    Tiles that own no row have the position at which theirs would stand.
    """
    rows = extension_rows_per_tile(tile_bits).T.reshape(-1)
    return (rows.cumsum(0) - rows).view(tile_bits.shape[1], tile_bits.shape[0]).T.contiguous()


def _extension_index(tile_bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(input tile, output tile, plane) of every row of the extension, int64 each, in its order."""
    rows = extension_rows_per_tile(tile_bits).T.contiguous()  # [K/64, N/64]
    tiles = torch.arange(rows.numel(), device=rows.device).repeat_interleave(rows.reshape(-1))
    starts = extension_starts(tile_bits).T.reshape(-1)
    plane = 2 + torch.arange(tiles.numel(), device=rows.device) - starts[tiles]
    return tiles // rows.shape[1], tiles % rows.shape[1], plane


def _to_words(values: Tensor) -> Tensor:
    """[..., n] uint8 of two bits -> [..., n/16] int32; output 16w + 4t + j lies in bits 8t + 2j, 8t + 2j + 1."""
    v = values.reshape(*values.shape[:-1], values.shape[-1] // 4, 4)
    packed = v[..., 0] | v[..., 1] << 2 | v[..., 2] << 4 | v[..., 3] << 6
    return packed.contiguous().view(torch.int32)  # little-endian, as safetensors stores it


def _from_words(words: Tensor) -> Tensor:
    """Inverse of `_to_words`."""
    b = words.contiguous().view(torch.uint8)
    return torch.stack((b & 3, b >> 2 & 3, b >> 4 & 3, b >> 6), -1).flatten(-2)


def align_codes(codes: Tensor, tile_bits: Tensor) -> Tensor:
    """Unsigned codes [N, K] uint8 -> aligned codes [N, K] uint8. Raises `ValueError` on a code too wide for its tile."""
    bits = expand_tiles(tile_bits)
    too_wide = (codes.to(torch.int16) >> bits.to(torch.int16)) != 0
    if bool(too_wide.any()):
        n, k = (int(i) for i in too_wide.nonzero()[0])
        raise ValueError(f"code {int(codes[n, k])} at [{n}, {k}] does not fit its {int(bits[n, k])}-bit tile")
    return codes << (8 - bits)


def pack(codes: Tensor, tile_bits: Tensor, tile_scale: Tensor, output_transform: Tensor) -> PackedWeight:
    """Pack unsigned codes.

    codes: [N, K] uint8, u = q + 2^(B-1), in the rotated basis
    tile_bits: [N/64, K/64] uint8; tile_scale: [N/64, K/64] float32; output_transform: [N/64] uint8
    Raises `TypeError` / `ValueError` on dtypes, shapes, widths or codes that the format does not know.
    """
    n, k = codes.shape
    if n % TILE or k % TILE:
        raise ValueError(f"codes are [{n}, {k}], wanted multiples of {TILE} on both axes")
    wanted = (n // TILE, k // TILE)
    for name, t, dtype, shape in (
        ("codes", codes, torch.uint8, (n, k)),
        ("tile_bits", tile_bits, torch.uint8, wanted),
        ("tile_scale", tile_scale, torch.float32, wanted),
        ("output_transform", output_transform, torch.uint8, wanted[:1]),
    ):
        if t.dtype != dtype:
            raise TypeError(f"{name} is {t.dtype}, wanted {dtype}")
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} is {list(t.shape)}, wanted {list(shape)}")
    check_tile_bits(tile_bits)
    return pack_aligned(align_codes(codes, tile_bits).T.contiguous(), tile_bits, tile_scale, output_transform)


def pack_aligned(aligned: Tensor, tile_bits: Tensor, tile_scale: Tensor, output_transform: Tensor) -> PackedWeight:
    """Pack aligned codes [K, N] uint8, the rest as in `pack`: the inverse of `aligned_codes`. Nothing is checked."""
    k, n = aligned.shape
    plane0, plane1 = (_to_words(aligned >> (6 - 2 * p) & 3) for p in (0, 1))
    kt, nt, plane = _extension_index(tile_bits)
    tiles = aligned.view(k // TILE, TILE, n // TILE, TILE).permute(0, 2, 1, 3)[kt, nt]  # [E, 64 channels, 64 outputs]
    tiles = tiles >> (6 - 2 * plane).to(torch.uint8)[:, None, None] & 3
    extension = _to_words(tiles).view(tiles.shape[0], WORDS_PER_TILE_PLANE)
    return PackedWeight(plane0, plane1, extension, tile_bits, tile_scale, output_transform)


def aligned_codes(w: PackedWeight) -> Tensor:
    """Aligned codes, input-major: [K, N] uint8."""
    k, n = w.in_features, w.out_features
    out = _from_words(w.plane0) << 6 | _from_words(w.plane1) << 4
    kt, nt, plane = _extension_index(w.tile_bits)
    values = _from_words(w.extension.view(w.extension.shape[0], TILE, TILE // OUTPUTS_PER_WORD))  # [E, 64 channels, 64 outputs]
    values = values << (6 - 2 * plane).to(torch.uint8)[:, None, None]
    tiles = out.view(k // TILE, TILE, n // TILE, TILE).permute(0, 2, 1, 3)
    for p in (2, 3):  # within one plane every tile occurs once, so that no two writes meet
        m = plane == p
        tiles[kt[m], nt[m]] |= values[m]
    return out


def unpack(w: PackedWeight) -> Tensor:
    """Unsigned codes [N, K] uint8: the inverse of `pack`."""
    return aligned_codes(w).T.contiguous() >> (8 - expand_tiles(w.tile_bits))


def slice_weight(w: PackedWeight, outputs: tuple[int, int], inputs: tuple[int, int]) -> PackedWeight:
    """The rectangle outputs[0]:outputs[1] x inputs[0]:inputs[1]; all four must be multiples of 64 (else `ValueError`)."""
    if any(v % TILE for v in (*outputs, *inputs)):
        raise ValueError(f"slice {outputs} x {inputs} does not fall on borders of {TILE}-tiles")
    (n0, n1), (k0, k1) = outputs, inputs
    if not (0 <= n0 < n1 <= w.out_features and 0 <= k0 < k1 <= w.in_features):
        raise ValueError(f"slice {outputs} x {inputs} of a weight [{w.out_features}, {w.in_features}]")
    tiles = slice(n0 // TILE, n1 // TILE), slice(k0 // TILE, k1 // TILE)
    words = slice(n0 // OUTPUTS_PER_WORD, n1 // OUTPUTS_PER_WORD)
    bits = w.tile_bits[tiles].contiguous()
    return PackedWeight(
        w.plane0[k0:k1, words].contiguous(),
        w.plane1[k0:k1, words].contiguous(),
        gather_extension(w.extension, extension_starts(w.tile_bits)[tiles], bits),
        bits,
        w.tile_scale[tiles].contiguous(),
        w.output_transform[tiles[0]].contiguous(),
        w.input_rotation,
    )


def gather_extension(extension: Tensor, starts: Tensor, tile_bits: Tensor) -> Tensor:
    """Rebuild the extension of a set of tiles from a larger one.

    extension: [E, 256] int32; starts: [n, k] int64, first row in `extension` of every wanted tile
    tile_bits: [n, k] uint8 of the wanted tiles
    """
    kt, nt, plane = _extension_index(tile_bits)
    return extension[starts[nt, kt] + plane - 2]


def concat_outputs(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Join weights with the same inputs along their outputs (q, k, v; gate, up), whatever their maps.

    Raises `ValueError` where they want different rotations of these inputs.
    """
    first = parts[0].input_rotation
    if any((p.input_rotation is None) != (first is None) for p in parts) or (
        first is not None and not all(torch.equal(first, p.input_rotation) for p in parts[1:])  # type: ignore[arg-type]
    ):
        raise ValueError("weights that share their inputs differ in input_rotation: they cannot be joined")
    bits = torch.cat([p.tile_bits for p in parts])
    offsets = [0]
    for p in parts:
        offsets.append(offsets[-1] + p.extension.shape[0])
    starts = torch.cat([extension_starts(p.tile_bits) + o for p, o in zip(parts, offsets[:-1], strict=True)])
    return PackedWeight(
        torch.cat([p.plane0 for p in parts], 1),
        torch.cat([p.plane1 for p in parts], 1),
        gather_extension(torch.cat([p.extension for p in parts]), starts, bits),
        bits,
        torch.cat([p.tile_scale for p in parts]),
        torch.cat([p.output_transform for p in parts]),
        first,
    )


def to_device(w: PackedWeight, device: torch.device | str) -> PackedWeight:
    tensors = {f: getattr(w, f) for f in w.__dataclass_fields__}
    return replace(w, **{f: t.to(device) for f, t in tensors.items() if t is not None})


def tile_code_bits(tile_bits: Tensor) -> int:
    """Bits of all codes of a map as stored: the two dense planes count in full, even under 2-bit tiles."""
    return int(tile_bits.long().clamp_min(4).sum()) * TILE * TILE


def loaded_code_bits(levels: Tensor, tile_bits: Tensor) -> Tensor:
    """Code bits that one decode step reads, per row.

    levels: [M, K] uint8, bits of every channel; tile_bits: [N/64, K/64] uint8 -> [M] float64
    A tile gives at most the bits it has: a 4-bit tile is read at min(level, 4).
    """
    cost = level_cost(tile_bits).repeat_interleave(TILE, 1)  # [5, K]
    return cost.gather(0, (levels.long() // 2)).sum(1)


def level_cost(tile_bits: Tensor) -> Tensor:
    """Code bits read for one channel of each input tile at every level. [5, K/64] float64, rows as `LEVELS`."""
    return torch.stack([tile_bits.long().clamp_max(b).sum(0).double() * TILE for b in LEVELS])


def transform_matrix(transform: Transform) -> Tensor:
    """The orthogonal 64 x 64 matrix U of a transform, float64. W~ = U^T W per output tile, y = y~ U^T."""
    if transform.kind == "identity":
        return torch.eye(TILE, dtype=torch.float64)
    permutation, left, right = rotation_v1(transform.seed)
    return (
        torch.tensor(left, dtype=torch.float64)[:, None]
        * hadamard_matrix()[torch.tensor(permutation)]
        * torch.tensor(right, dtype=torch.float64)[None, :]
    )


def rotation_table(transform: Transform) -> Tensor | None:
    """A transform as [64] uint8: its permutation in bits 0-5, bit 6 where a left sign is negative, bit 7 a right one.

    None for the identity.
    """
    if transform.kind == "identity":
        return None
    permutation, left, right = (torch.tensor(part) for part in rotation_v1(transform.seed))
    return (permutation | (left < 0).long() << 6 | (right < 0).long() << 7).to(torch.uint8)


def rotate_inputs(x: Tensor, table: Tensor) -> Tensor:
    """x' = x V for every 64 inputs. x: [M, K] any float; table: [64] uint8 of `rotation_table` -> [M, K] float32

    V = diag(left) H[permutation, :] diag(right), as a transform of outputs. Signs, permutation and the factor 1/8 are exact,
    and the sums are butterflies in float32 over distances 1, 2, 4, ..., 32: every implementation in that order gives the same
    bits, on which levels and codes depend.
    """
    code = table.long()
    left, right = 1 - (code >> 6 & 1) * 2, 1 - (code >> 7 & 1) * 2
    v = torch.empty(x.shape[0], x.shape[1] // TILE, TILE, dtype=torch.float32, device=x.device)
    v[..., code & 63] = x.float().view(v.shape) * left
    shape = v.shape
    distance = 1
    while distance < TILE:
        pairs = v.view(*shape[:2], -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), 3).view(shape)
        distance *= 2
    return (v * (right / 8)).view(x.shape)


def rotate_weight_inputs(weight: Tensor, table: Tensor) -> Tensor:
    """W' = W V for every 64 inputs: the weight that belongs to `rotate_inputs(x)`. [N, K], summed in float64."""
    return (weight.double().view(weight.shape[0], -1, TILE) @ _table_matrix(table)).to(weight.dtype).view(weight.shape)


def restore_weight_inputs(rotated: Tensor, table: Tensor) -> Tensor:
    """W = W' V^T: the inverse of `rotate_weight_inputs`."""
    return (rotated.double().view(rotated.shape[0], -1, TILE) @ _table_matrix(table).T).to(rotated.dtype).view(rotated.shape)


def _table_matrix(table: Tensor) -> Tensor:
    """[64, 64] float64 of a `rotation_table`."""
    code = table.long()
    left, right = 1 - (code >> 6 & 1) * 2, 1 - (code >> 7 & 1) * 2
    return left[:, None] * hadamard_matrix().to(table.device)[code & 63] * right


def hadamard_matrix() -> Tensor:
    """Sylvester's Hadamard matrix of order 64 over 8 (orthonormal), float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < TILE:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / 8


def transform_stack(transforms: Sequence[Transform]) -> Tensor:
    """[len(transforms), 64, 64] float64, to be indexed by `output_transform`."""
    return torch.stack([transform_matrix(t) for t in transforms])


def rotate_outputs(weight: Tensor, matrices: Tensor) -> Tensor:
    """W~ = U^T W for every output tile. weight: [N, K]; matrices: [N/64, 64, 64] or [64, 64] (one for all)."""
    return (matrices.mT @ weight.view(-1, TILE, weight.shape[1])).reshape(weight.shape)


def restore_outputs(y: Tensor, matrices: Tensor) -> Tensor:
    """y = y~ U^T for every output tile. y: [M, N]; matrices: [N/64, 64, 64] or [64, 64]."""
    tiles = y.view(y.shape[0], -1, TILE).transpose(0, 1)  # [N/64, M, 64]
    return (tiles @ matrices.mT).transpose(0, 1).reshape(y.shape)


def restore_weight(rotated: Tensor, matrices: Tensor) -> Tensor:
    """W = U W~ for every output tile: the inverse of `rotate_outputs`. rotated: [N, K]; matrices as there."""
    return rotate_outputs(rotated, matrices.mT)


def smoothing_codes(smoothing: Tensor) -> Tensor:
    """The nearest stored form of positive factors: uint8, see `smoothing_values`."""
    steps = (smoothing.double().log2() * SMOOTHING_STEPS).round() + SMOOTHING_ONE
    return steps.clamp(0, 255).to(torch.uint8)


def smoothing_values(codes: Tensor) -> Tensor:
    """2^((c - 128) / 8), float32. codes: uint8."""
    table = torch.exp2((torch.arange(256, dtype=torch.float64) - SMOOTHING_ONE) / SMOOTHING_STEPS).float()
    return table.to(codes.device)[codes.long()]


def to_tensors(w: PackedWeight, thresholds: Tensor, smoothing: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors of one module as the checkpoint stores them, by suffix.

    thresholds: [profiles, 4] float32; smoothing: [K] uint8 of `smoothing_codes`, for a module that announces it
    """
    return ({} if smoothing is None else {SMOOTHING: smoothing}) | {
        PLANE0: w.plane0,
        PLANE1: w.plane1,
        EXTENSION: w.extension,
        MAP: w.tile_bits,
        SCALE: w.tile_scale,
        OUTPUT_TRANSFORM: w.output_transform[:, None],
        THRESHOLDS: thresholds,
    }


def from_tensors(tensors: Mapping[str, Tensor], input_transform: Transform | None = None) -> PackedWeight:
    """Inverse of `to_tensors` (without the thresholds). input_transform: the module's, from the schema."""
    return PackedWeight(
        tensors[PLANE0],
        tensors[PLANE1],
        tensors[EXTENSION],
        tensors[MAP],
        tensors[SCALE],
        tensors[OUTPUT_TRANSFORM].squeeze(1),
        None if input_transform is None else rotation_table(input_transform),
    )


def payload_faults(
    tensors: Mapping[str, Tensor], tile_counts: Mapping[int, int], n_transforms: int, *, part: bool = False
) -> list[str]:
    """What is wrong with the values of one module's tensors (their shapes and dtypes being right): one phrase a fault.

    tensors: any subset of the suffixes of `to_tensors`, so that a loader can ask as they arrive; part: they are those of a
    slice, whose map holds no more tiles of a width than the module's
    """
    faults = []
    if (bits := tensors.get(MAP)) is not None:
        found = {b: c for b, c in enumerate(torch.bincount(bits.reshape(-1)).tolist()) if c}
        if unknown := sorted(set(found) - set(TILE_BITS)):
            faults.append(f"{MAP} holds {unknown}, wanted {TILE_BITS}")
        elif part and any(c > tile_counts.get(b, 0) for b, c in found.items()):
            faults.append(f"{MAP} has tiles {found} in a part of what config.json promises, {dict(tile_counts)}")
        elif not part and found != {b: c for b, c in tile_counts.items() if c}:
            faults.append(f"{MAP} has tiles {found}, config.json promises {dict(tile_counts)}")
        elif (plane1 := tensors.get(PLANE1)) is not None and bool((narrow := bits == 2).any()):
            # the words of plane 1 by tile: [K/64, 64 channels, N/64, 4 words]; those of 2-bit tiles hold nothing
            words = plane1.view(bits.shape[1], TILE, bits.shape[0], TILE // OUTPUTS_PER_WORD)
            if bool(((words != 0).any(3).any(1) & narrow.T).any()):
                faults.append(f"{PLANE1} is not empty under 2-bit tiles")
    if (scale := tensors.get(SCALE)) is not None:
        least, most = (float(end) for end in torch.aminmax(scale))  # both are NaN if an entry is
        if not (least > 0 and most < inf):
            bad = ~(scale.isfinite() & (scale > 0))
            faults.append(f"{SCALE} holds {int(bad.sum())} entries that are not finite and > 0")
        elif most > MAX_SCALE:
            faults.append(f"{SCALE} holds {most:.4g}, wanted at most 2^64")
    if (index := tensors.get(OUTPUT_TRANSFORM)) is not None and bool((index.long() >= n_transforms).any()):
        faults.append(f"{OUTPUT_TRANSFORM} holds {int(index.max())}, the checkpoint has {n_transforms} transforms")
    if (t := tensors.get(THRESHOLDS)) is not None and not bool(t.isfinite().all() and (t[:, 1:] >= t[:, :-1]).all()):
        faults.append(f"{THRESHOLDS} are not finite and ascending")
    if (bias := tensors.get(BIAS)) is not None and not bool(bias.isfinite().all()):
        faults.append(f"{BIAS} is not finite")
    return faults

"""The decode form of a weight: the checkpoint's planes, re-ordered once at load so that a warp reads long aligned runs.

Outputs are cut into blocks of 512 (8 tiles). A dense plane of one block and input tile is `[64 channels, 8 tiles, 4 words]`,
8 KiB in one piece, and a channel's share of it 128 bytes, a whole cache line. Planes 2 and 3 exist only for the tiles that have
them and lie compact: `[64 channels, tiles of the block that have the plane, 4 words]`. `docs/format.md` describes the words.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vllm_tilequant.kernels.cuda_runtime import tensor_map
from vllm_tilequant.kernels.layout import (
    PackedWeight,
    check_tile_bits,
    extension_rows_per_tile,
    extension_starts,
    hadamard_matrix,
)
from vllm_tilequant.kernels.tuning import stream_ctas
from vllm_tilequant.schema import TILE, WORDS_PER_TILE_PLANE

BLOCK_TILES = 8
#: Sums of a block, of two rows: what a CTA of a stream may leave in `arrivals` for the next one.
CARRIED = 2 * BLOCK_TILES * TILE
BLOCK_WORDS = BLOCK_TILES * TILE // 16
#: `transform` of an output tile that is not rotated.
IDENTITY = 255


@dataclass  # not frozen, which would take twice as long: the plugin's op makes one in every call
class DecodeWeight:
    """One linear (or several joined along their outputs) as the graded kernels read it.

    codes: [units, 4] int32, a unit = one channel of one tile and plane. First planes 0 and 1 of everything,
        `[blocks, K/64, 2, 64, 8]` units (outputs beyond N are zeros that no kernel reads); then per (block, input tile) plane 2
        and plane 3, compact
    meta: [blocks, K/64, 2] int32: first unit of planes 2 and 3; tiles with plane 2 (bits 0-7), with plane 3 (8-15), and two
        bits per tile from 16 up: its class, stored bits / 2 - 1
    factor: [blocks, K/64, 8] float32, tile scale * 2^(bits - 9): the value of one step of doubled, 8-bit-aligned codes
    transform: [N/64] uint8, row of `table` per output tile, `IDENTITY` for none
    table: [transforms, 64] uint8: bits 0-5 the permutation, 6 the left sign, 7 the right sign of diag(l) H[p, :] diag(r)
    arrivals: int32, zeros between launches. Where CTAs that share blocks count each other ([blocks, 4]), and behind it where
        one leaves sums of one or two rows for the next one (1,024 to each). So two such launches over one weight must not run
        at the same time
    """

    codes: Tensor
    meta: Tensor
    factor: Tensor
    transform: Tensor
    table: Tensor
    arrivals: Tensor
    out_features: int
    in_features: int

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device | str) -> DecodeWeight:
        moved: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            moved[f.name] = value.to(device) if isinstance(value, Tensor) else value
        return DecodeWeight(**moved)

    @property
    def resident_bytes(self) -> int:
        return sum(t.nbytes for t in (getattr(self, f.name) for f in fields(self)) if isinstance(t, Tensor))


def carried_from(blocks: int) -> int:
    """Where in `arrivals` the first CTA's sums lie: behind four words of each block."""
    return 4 * blocks


def planes_map(w: DecodeWeight, tiles: int) -> bytes:
    """Tensor map of planes 0 and 1 in boxes of both planes of so many tiles at one input tile. tiles: 2, 4 or 8"""
    rows = -(-w.out_features // (TILE * BLOCK_TILES)) * (w.in_features // TILE) * 2 * TILE
    return tensor_map(w.codes.data_ptr(), rows, BLOCK_TILES * 16, 2 * TILE, tiles * 16)


def prepare(w: PackedWeight, transforms: Tensor, *, ctas: int | None = None) -> DecodeWeight:
    """Re-order a packed weight for decoding, on the device where it lies; the codes themselves are not changed.

    transforms: [n, 64, 64] float64, addressed by `w.output_transform`; each the identity or a randomised Hadamard.
    ctas: the most that a stream over it will have; None for the one that is tuned for the shape and device, if there is one
    """
    check_tile_bits(w.tile_bits)
    n, k = w.out_features, w.in_features
    k_tiles, blocks = k // TILE, -(-n // (TILE * BLOCK_TILES))
    dense_units = blocks * k_tiles * 2 * TILE * BLOCK_TILES
    units = dense_units + w.extension.shape[0] * TILE
    if units >= 2**32:
        raise ValueError(f"{units} units of 16 bytes do not fit 32-bit offsets: split the weight's outputs")
    codes = torch.zeros(units, 4, dtype=torch.int32, device=w.plane0.device)
    dense = codes[:dense_units].view(blocks, k_tiles, 2, TILE, BLOCK_WORDS)
    for p, plane in enumerate((w.plane0, w.plane1)):
        words = torch.nn.functional.pad(plane.view(k_tiles, TILE, -1), (0, blocks * BLOCK_WORDS - plane.shape[1]))
        dense[:, :, p] = words.view(k_tiles, TILE, blocks, BLOCK_WORDS).permute(2, 0, 1, 3)

    bits = torch.nn.functional.pad(w.tile_bits.T.long(), (0, blocks * BLOCK_TILES - n // TILE), value=2)
    bits = bits.view(k_tiles, blocks, BLOCK_TILES).transpose(0, 1)  # [blocks, K/64, 8]
    place = torch.arange(BLOCK_TILES, device=bits.device)
    has = torch.stack((bits >= 6, bits >= 8))  # [2, blocks, K/64, 8]: plane 2, plane 3
    count = has.sum(-1)
    start = dense_units + (TILE * count.sum(0)).view(-1).cumsum(0).view(blocks, k_tiles) - TILE * count.sum(0)
    masks = (has[0] << place).sum(-1) | (has[1] << place + 8).sum(-1) | ((bits // 2 - 1) << 2 * place + 16).sum(-1)
    _order_extension(codes, w, has, count, start)
    factor = torch.zeros(k_tiles, blocks * BLOCK_TILES, dtype=torch.float32, device=bits.device)
    factor[:, : n // TILE] = w.tile_scale.T * torch.exp2(w.tile_bits.T.float() - 9)
    transform, table = _transforms(w.output_transform, transforms)
    return DecodeWeight(
        codes,
        torch.stack((_as_int32(start), _as_int32(masks)), -1).contiguous(),
        factor.view(k_tiles, blocks, BLOCK_TILES).transpose(0, 1).contiguous(),
        transform,
        table,
        torch.zeros(
            carried_from(blocks) + CARRIED * min(stream_ctas(n, k, bits.device) if ctas is None else ctas, blocks * k_tiles),
            dtype=torch.int32,
            device=bits.device,
        ),
        n,
        k,
    )


def _as_int32(t: Tensor) -> Tensor:
    """The low 32 bits of non-negative int64 values."""
    return torch.where(t >= 2**31, t - 2**32, t).to(torch.int32)


def _order_extension(codes: Tensor, w: PackedWeight, has: Tensor, count: Tensor, start: Tensor) -> None:
    """Write planes 2 and 3. has: [2, blocks, K/64, 8] bool; count: [2, blocks, K/64]; start: [blocks, K/64] int64, units."""
    for rows, units in _extension_units(w.tile_bits, has, count, start):
        codes[units.view(-1)] = w.extension[rows].view(-1, 4)


def _extension_units(tile_bits: Tensor, has: Tensor, count: Tensor, start: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For planes 2 and 3: rows of the checkpoint's extension, [r] int64, and the units [r, 64] of `codes` that hold them."""
    channels = torch.arange(TILE, device=start.device)
    rank = has.long().cumsum(-1) - has.long()
    rows = extension_rows_per_tile(tile_bits)
    starts = extension_starts(tile_bits)
    for p in (0, 1):
        nt, kt = (rows > p).nonzero(as_tuple=True)
        block, tile = nt // BLOCK_TILES, nt % BLOCK_TILES
        first = start[block, kt] + p * TILE * count[0, block, kt] + rank[p, block, kt, tile]
        yield starts[nt, kt] + p, first[:, None] + channels * count[p, block, kt][:, None]


def packed(w: DecodeWeight, transforms: Tensor) -> PackedWeight:
    """The checkpoint's own form of a weight: the inverse of `prepare`, bit for bit, on the device where it lies.

    transforms: as `prepare` got them. Of several equal entries the first is named, which is the same transform; a scale below
    2^-119 has lost the bits that `prepare` could not hold. Needs memory for the result, one dense plane, and half as much as
    the extension for its addresses. `input_rotation` is not part of the decode form and stays None.
    """
    k_tiles, n_tiles, blocks = w.in_features // TILE, w.out_features // TILE, w.meta.shape[0]

    def by_tile(values: Tensor) -> Tensor:  # [blocks, K/64, 8] -> [N/64, K/64]
        return values.transpose(0, 1).reshape(k_tiles, blocks * BLOCK_TILES)[:, :n_tiles].T.contiguous()

    start, masks = (w.meta[..., i].long() & 0xFFFFFFFF for i in (0, 1))
    place = torch.arange(BLOCK_TILES, device=w.device)
    bits = by_tile(2 + 2 * (masks[..., None] >> 2 * place + 16 & 3)).to(torch.uint8)
    has = torch.stack([(masks[..., None] >> place + shift & 1).bool() for shift in (0, 8)])
    dense = w.codes[: blocks * k_tiles * 2 * TILE * BLOCK_TILES].view(blocks, k_tiles, 2, TILE, BLOCK_WORDS)
    plane0, plane1 = (
        dense[:, :, p].permute(1, 2, 0, 3).reshape(w.in_features, -1)[:, : w.out_features // 16].contiguous() for p in (0, 1)
    )
    extension = w.codes.new_empty(int(extension_rows_per_tile(bits).sum()), WORDS_PER_TILE_PLANE)
    for rows, units in _extension_units(bits, has, has.sum(-1), start):
        extension[rows] = w.codes[units.view(-1)].view(-1, WORDS_PER_TILE_PLANE)
    scale = by_tile(w.factor) * torch.exp2(9 - bits.float())
    eye = torch.eye(TILE, dtype=transforms.dtype, device=transforms.device)
    plain = (transforms == eye).flatten(1).all(1).nonzero().view(-1)  # where `IDENTITY` may stand for
    index = w.transform if len(plain) == 0 else w.transform.where(w.transform != IDENTITY, int(plain[0]))
    return PackedWeight(plane0, plane1, extension, bits, scale, index.to(torch.uint8))


def _transforms(index: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Per output tile a row of the table or `IDENTITY`; the table of factored Hadamards."""
    if matrices.shape[0] > IDENTITY:
        raise NotImplementedError(
            f"{matrices.shape[0]} output transforms in one weight; the decode kernel addresses {IDENTITY}"
        )
    if int(index.max()) >= matrices.shape[0]:
        raise ValueError(f"output_transform names entry {int(index.max())} of {matrices.shape[0]} transforms")
    eye = torch.eye(TILE, dtype=torch.float64)
    matrices = matrices.double().cpu()
    table = torch.zeros(max(1, matrices.shape[0]), TILE, dtype=torch.uint8)
    remap = torch.full((max(1, matrices.shape[0]),), IDENTITY, dtype=torch.uint8)
    for i, matrix in enumerate(matrices):
        if not torch.equal(matrix, eye):
            table[i] = _factored(matrix.numpy().tobytes())
            remap[i] = i
    return remap.to(index.device)[index.long()], table.to(index.device)


@functools.lru_cache(maxsize=4096)
def _factored(matrix: bytes) -> Tensor:
    """`factor_hadamard` of [64, 64] float64 in memory's order: all layers of a checkpoint have the same few."""
    return factor_hadamard(torch.frombuffer(bytearray(matrix), dtype=torch.float64).view(TILE, TILE))


def factor_hadamard(matrix: Tensor) -> Tensor:
    """Write a 64 x 64 matrix as diag(l) H[p, :] diag(r), H = Sylvester's Hadamard over 8: [64] uint8, `DecodeWeight.table`.

    Signs and permutation are not unique (rows of H form a group under products); any that give the matrix back will do.
    Raises `NotImplementedError` for a matrix that has no such form.
    """
    signs = (matrix.double().cpu() * 8).round()
    right = signs[0]  # taking row 0 as H[0, :] = 1
    rows = signs * right
    left = rows[:, 0]
    bits = torch.stack([(rows[:, 1 << b] * left) < 0 for b in range(6)], 1)
    permutation = (bits.long() << torch.arange(6)).sum(1)
    rebuilt = left[:, None] * hadamard_matrix()[permutation] * right
    if not torch.allclose(rebuilt, matrix.double().cpu(), atol=1e-9):
        raise NotImplementedError("output transform is neither the identity nor a signed, permuted 64-point Hadamard matrix")
    return (permutation | (left < 0).long() << 6 | (right < 0).long() << 7).to(torch.uint8)

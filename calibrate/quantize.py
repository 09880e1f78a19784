"""Scales and codes of a weight's tiles: search, round-to-nearest, GPTQ under a precision map, errors per level.

All weights here are in the rotated basis (U applied), float32, [N, K] with N the outputs of one linear or of several that
share their input. Formulas: `docs/method` of the papers are named where they are used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_tilequant.kernels.layout import expand_tiles
from vllm_tilequant.schema import LEVELS, TILE

#: Weights of the nested objective for wide tiles, at their own width and read at 4 bits: a decode step reads most of their
#: channels at fewer bits.
NESTED = (0.9, 0.1)
#: Scale candidates as fractions of the absmax scale: coarse grid, then a fine one around the best.
_RANGE = {4: (0.25, 1.25), 6: (0.4375, 1.125), 8: (0.6, 1.0625)}
_COARSE, _FINE = 1 / 16, 1 / 128
_SMALLEST_SCALE = 2.0**-100  # zero and denormal tiles: finite, positive, and their codes are exactly zero


def _tiles(per_weight: Tensor) -> Tensor:
    """[N, K] -> [N/64, 64, K/64, 64], a view."""
    n, k = per_weight.shape
    return per_weight.view(n // TILE, TILE, k // TILE, TILE)


def _broadcast(per_tile: Tensor) -> Tensor:
    return per_tile[:, None, :, None]


def code_range(bits: int) -> tuple[int, int]:
    """Least and greatest signed code of a width."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def absmax_scale(weight: Tensor, bits: int) -> Tensor:
    """The smallest scale that clips nothing: max(max(w) / qmax, -min(w) / |qmin|) per tile. [N/64, K/64]."""
    low, high = code_range(bits)
    t = _tiles(weight)
    return torch.maximum(t.amax((1, 3)) / high, t.amin((1, 3)) / low).clamp_min(_SMALLEST_SCALE)


def search_scale(weight: Tensor, bits: int, channel_weight: Tensor | None, nested: bool) -> Tensor:
    """The scale of every tile that minimises sum_i h_i (w - s q)^2 over a grid of fractions of the absmax scale.

    weight: [N, K]; channel_weight: [K] h_i = E[x_i^2], or None for the plain squared error; nested: weigh the error at `bits`
    with that of the same codes read at 4 bits (`NESTED`). -> [N/64, K/64] float32
    """
    base = absmax_scale(weight, bits)
    t = _tiles(weight)
    h = None if channel_weight is None else channel_weight.view(1, 1, -1, TILE)

    def error(scale: Tensor) -> Tensor:
        s = _broadcast(scale)
        q = (t / s).round_().clamp_(*code_range(bits))
        total = torch.zeros_like(scale)
        for kept, weight_of in zip((bits, 4), NESTED, strict=True) if nested else ((bits, 1.0),):
            drop = bits - kept
            read = q if drop == 0 else (q / 2**drop).floor_().mul_(2**drop).add_((2**drop - 1) / 2)
            e = (read * s).sub_(t).square_()
            total += weight_of * (e if h is None else e.mul_(h)).sum((1, 3))
        return total

    low, high = _RANGE[bits]
    steps = round((high - low) / _COARSE)
    fraction, best = _best(error, base, torch.ones_like(base), [low + i * _COARSE for i in range(steps + 1)], absolute=True)
    around = [i * _FINE for i in range(-7, 8) if i]
    fraction, _ = _best(error, base, fraction, around, absolute=False, best=best)
    return base * fraction


def _best(
    error: Callable[[Tensor], Tensor],
    base: Tensor,
    fraction: Tensor,
    candidates: list[float],
    *,
    absolute: bool,
    best: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    start = fraction
    if best is None:
        best = torch.full_like(base, float("inf"))
    for c in candidates:
        trial = torch.full_like(base, c) if absolute else (start + c).clamp_min(_FINE)
        e = error(base * trial)
        better = e < best
        best, fraction = torch.where(better, e, best), torch.where(better, trial, fraction)
    return fraction, best


def round_to_nearest(weight: Tensor, scale: Tensor, tile_bits: Tensor) -> Tensor:
    """Signed codes q = clip(RNE(w / s)) under a map. weight: [N, K]; scale, tile_bits: [N/64, K/64] -> [N, K] float32."""
    half = _broadcast(torch.exp2(tile_bits.float() - 1))
    q = (_tiles(weight) / _broadcast(scale)).round_()
    return q.clamp_(-half, half - 1).view(weight.shape)


def read_uniform(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The weight after rounding every tile to `bits` with the given scales. [N, K]"""
    tile_bits = torch.full_like(scale, bits, dtype=torch.uint8)
    return read_at(round_to_nearest(weight, scale, tile_bits), scale, tile_bits, bits)


class Columns:
    """GPTQ inside one block of 64 inputs, column after column.

    On a GPU the steps of a block are captured once for every N: 64 times ten launches from Python cost more than their work.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, torch.device], tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}

    def __call__(self, block: Tensor, u: Tensor, scale: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """block: [N, 64] weights, overwritten on a CPU; u: [64, 64] upper factor; scale, high: [N] -> codes, errors: [N, 64].

        The results are overwritten by the next call.
        """
        if block.device.type != "cuda":
            return self._walk(block, u, scale, high)
        key = (block.shape[0], block.device)
        if key not in self._graphs:
            with torch.cuda.device(block.device):
                self._graphs[key] = self._captured(block, u, scale, high)
        graph, held = self._graphs[key]
        for place, value in zip(held, (block, u, scale, high), strict=False):
            place.copy_(value)
        graph.replay()
        return held[4], held[5]

    def _captured(self, *inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        """The graph of a block on the current device, and its tensors: inputs, then codes and errors."""
        held = [t.clone() for t in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._walk(held[0].clone(), *held[1:])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held += self._walk(*held)
        return graph, held

    @staticmethod
    def _walk(block: Tensor, u: Tensor, scale: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        codes, errors = torch.empty_like(block), torch.empty_like(block)
        for i in range(TILE):
            column = block[:, i]
            code = torch.minimum(torch.maximum((column / scale).round_(), -high), high - 1)
            codes[:, i] = code
            errors[:, i] = (column - code * scale) / u[i, i]
            block[:, i + 1 :].addr_(errors[:, i], u[i, i + 1 :], alpha=-1)
        return codes, errors


def gptq(
    weight: Tensor, scale: Tensor, tile_bits: Tensor, hessian: Tensor, damping: float, columns: Columns | None = None
) -> Tensor:
    """Signed codes by GPTQ under a finished map: every tile at its own width, errors fed forward along the inputs.

    weight: [N, K] float32; scale, tile_bits: [N/64, K/64]; hessian: [K, K] sum of x x^T, float32 or float64
    columns: kept by the caller, so that weights of one N share it
    -> [N, K] float32. GPTQ: Frantar et al. 2022 (arXiv 2210.17323); the widths per tile are this project's.
    """
    n, k = weight.shape
    w, columns = weight.clone(), columns or Columns()
    upper = _inverse_cholesky(hessian, damping).to(w.dtype)
    q = torch.empty_like(w)
    half = torch.exp2(tile_bits.float() - 1)
    for kt in range(k // TILE):
        c0 = kt * TILE
        u = upper[c0 : c0 + TILE, c0 : c0 + TILE].contiguous()
        s, high = (t[:, kt].repeat_interleave(TILE) for t in (scale, half))
        q[:, c0 : c0 + TILE], errors = columns(w[:, c0 : c0 + TILE].clone(), u, s, high)
        w[:, c0 + TILE :].addmm_(errors, upper[c0 : c0 + TILE, c0 + TILE :], alpha=-1)
    return q


def _inverse_cholesky(hessian: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped Hessian, float64."""
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian, damping))), upper=True)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """A Hessian that can be inverted, float64: a share of its mean added to the diagonal, ones for channels never used."""
    h = hessian.to(torch.float64, copy=True)
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping * diagonal.mean()
    return h


def read_at(q: Tensor, scale: Tensor, tile_bits: Tensor, level: int) -> Tensor:
    """The weight as a decode step reads it when every channel is at `level` > 0 bits. q: [N, K] signed codes -> [N, K]."""
    drop = _broadcast(torch.exp2(tile_bits.float() - tile_bits.float().clamp_max(level)))
    t = (_tiles(q) / drop).floor_().mul_(drop).add_((drop - 1) / 2)  # one copy at a time: a group of an 8B model has 117 M
    return t.mul_(_broadcast(scale)).view(q.shape)


def output_tile_errors(weight: Tensor, scale: Tensor, bits: int, channel_weight: Tensor | None) -> Tensor:
    """Error of rounding to `bits`, per output tile: sum over its rows and all inputs of h_i (w - s q)^2. [N/64]

    weight: [N, K]; scale: [N/64, K/64]; channel_weight: [K] h_i, or None for ones
    """
    e = read_uniform(weight, scale, bits).sub_(weight).square_()
    per_row = e.sum(1) if channel_weight is None else e @ channel_weight
    return per_row.view(-1, TILE).sum(1)


def level_errors(weight: Tensor, q: Tensor, scale: Tensor, tile_bits: Tensor, output_weight: Tensor) -> Tensor:
    """Error of reading one input channel at each level, averaged over channels: C_b = sum_o f_o mean_i (w - w_b)^2. [5]

    weight, q: [N, K]; output_weight: [N] f_o, the sensitivity of every output (mean squared loss gradient, or ones)
    """
    f = output_weight.double()
    out = []
    for level in LEVELS:
        e = weight if level == 0 else read_at(q, scale, tile_bits, level).sub_(weight)
        squares = e.square() if level == 0 else e.square_()
        out.append((squares.mean(1).double() * f).sum())
    return torch.stack(out)


def to_unsigned(q: Tensor, tile_bits: Tensor) -> Tensor:
    """Signed codes [N, K] -> stored codes u = q + 2^(B-1), uint8."""
    return (q + expand_tiles(torch.exp2(tile_bits.float() - 1))).to(torch.uint8)

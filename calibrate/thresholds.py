"""Activation thresholds: how many bits a channel's activation earns.

`optimal`: reading channel i at level b costs C_b x_i^2 of error and B_b bits; minimising the total error plus lambda times the
bits gives thresholds on |x| at theta^2 = lambda (B_b' - B_b) / (C_b - C_b') along the lower convex hull of (B, C). One lambda
for the whole model meets the wanted average, or one lambda per group of linears with one input. `percentile` is GRINQH's way:
fixed shares of channels per level, from the mean of the records' magnitude percentiles.

Magnitudes are kept as histograms on a logarithmic grid, so that memory does not grow with the calibration text and a bisection
costs table look-ups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_tilequant.schema import LEVELS, NEVER, TILE

_LOWEST, _OCTAVES, _PER_OCTAVE = -24, 44, 64  # |x| from 2^-24 to 2^20 in steps of 1.1 %
BINS = _OCTAVES * _PER_OCTAVE
_CHANGES = len(LEVELS) - 1
_LEAST_LAMBDA = -120.0  # log2: everything useful is read


@dataclass
class Histogram:
    """Magnitudes of one shared input.

    tiles: [K/64, bins] int64, all records together, per input tile (the cost of a level differs between tiles)
    records: one [bins] int64 per record, all channels together
    """

    in_features: int
    tiles: Tensor = field(init=False)
    records: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tiles = torch.zeros(self.in_features // TILE, BINS, dtype=torch.int64)

    def add_record(self, x: Tensor) -> None:
        """Count the magnitudes of one record's rows. x: [M, K] any float, padding left out."""
        k_tiles = self.in_features // TILE
        octave = x.float().abs().clamp_min(2.0**_LOWEST).log2()
        index = ((octave - _LOWEST) * _PER_OCTAVE).long().clamp(0, BINS - 1)
        tile = torch.arange(self.in_features, device=x.device) // TILE
        at = (index + tile * BINS).flatten()
        counts = torch.zeros(k_tiles * BINS, dtype=torch.int64, device=x.device).scatter_add_(0, at, torch.ones_like(at))
        self.tiles = self.tiles.to(x.device) + counts.view(k_tiles, BINS)
        self.records.append(counts.view(k_tiles, BINS).sum(0))

    def to_cpu(self) -> None:
        """What was counted on a GPU, when all records are in."""
        self.tiles = self.tiles.cpu()
        self.records = [r.cpu() for r in self.records]

    @property
    def rows(self) -> int:
        return int(self.tiles[0].sum()) // TILE


@dataclass(frozen=True)
class GroupStatistics:
    """What the thresholds of one shared-input group depend on.

    errors: [5] float64, C_b at LEVELS, all members of the group together
    cost: [5, K/64] float64, code bits read per channel at every level (`layout.level_cost`, members together)
    weights: number of weights of all members
    """

    histogram: Histogram
    errors: Tensor
    cost: Tensor
    weights: int

    def bits_above(self) -> Tensor:
        """Bits per row that each level change adds when its threshold is a bin's lower edge. [4, bins + 1] float64."""
        added = (self.cost[1:] - self.cost[:-1]) @ self.histogram.tiles.double()  # [4, bins]
        tail = added.flip(1).cumsum(1).flip(1) / self.histogram.rows
        return torch.cat((tail, torch.zeros(_CHANGES, 1, dtype=tail.dtype)), 1)


def level_ratios(bits: Tensor, errors: Tensor) -> Tensor:
    """Thresholds for lambda = 1, in the order of the four level changes; inf where a level is never worth its bits.

    bits, errors: [5] float64. Levels above the lower convex hull are skipped: the thresholds around them coincide.
    """
    ratios = torch.full((_CHANGES,), math.inf, dtype=torch.float64)
    i = 0
    while i < _CHANGES:
        slopes = [
            (float(errors[i] - errors[j]) / float(bits[j] - bits[i]) if bits[j] > bits[i] else -1.0, -j)
            for j in range(i + 1, len(LEVELS))
        ]
        slope, j = max(slopes)
        if slope <= 0:
            break
        ratios[i:-j] = math.sqrt(1 / slope)
        i = -j
    return ratios


class _Frontier:
    """Loaded bits of some groups as a function of their common lambda."""

    def __init__(self, groups: dict[str, GroupStatistics]):
        self.names = list(groups)
        self.ratios = torch.stack([level_ratios(g.cost.mean(1), g.errors) for g in groups.values()])  # [groups, 4]
        self.above = torch.stack([_padded(g.bits_above()) for g in groups.values()])  # [groups, 4, bins + 2]
        self.weights = sum(g.weights for g in groups.values())

    def average(self, log_lambda: float) -> float:
        """Loaded bits per weight at log2 of lambda."""
        position = ((self.ratios.log2() + log_lambda / 2 - _LOWEST) * _PER_OCTAVE).clamp(0, BINS)
        whole = position.floor().long()
        low = self.above.gather(2, whole[..., None])[..., 0]
        high = self.above.gather(2, whole[..., None] + 1)[..., 0]
        return float((low + (high - low) * (position - whole)).sum()) / self.weights

    @property
    def most(self) -> float:
        """Loaded bits when everything useful is read."""
        return self.average(_LEAST_LAMBDA)

    def thresholds(self, target: float) -> dict[str, Tensor]:
        low, high = _LEAST_LAMBDA, -_LEAST_LAMBDA
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if self.average(middle) > target else (low, middle)
        chosen = (self.ratios * 2 ** (high / 2)).clamp_max(NEVER).float()
        return dict(zip(self.names, chosen, strict=True))


def _padded(bits_above: Tensor) -> Tensor:
    """The last column twice, so that interpolation may look beyond it."""
    return torch.cat((bits_above, bits_above[:, -1:]), 1)


def optimal_thresholds(groups: dict[str, GroupStatistics], target: float) -> dict[str, Tensor]:
    """Thresholds of all groups under one lambda whose average of loaded bits per weight meets `target`.

    -> group -> [4] float32. Raises `ValueError` when even reading everything useful stays below the target.
    """
    return _reachable(groups, target).thresholds(target)


def optimal_thresholds_per_group(groups: dict[str, GroupStatistics], target: float) -> dict[str, Tensor]:
    """Every group under a lambda of its own that meets `target`; one that stores less reads everything useful.

    Returns and raises as `optimal_thresholds`.
    """
    _reachable(groups, target)
    out: dict[str, Tensor] = {}
    for name, group in groups.items():
        frontier = _Frontier({name: group})
        out |= frontier.thresholds(min(target, frontier.most))
    return out


def _reachable(groups: dict[str, GroupStatistics], target: float) -> _Frontier:
    frontier = _Frontier(groups)
    if not 0 < target <= frontier.most:
        raise ValueError(
            f"a profile of {target} loaded bits cannot be reached: at most {frontier.most:.2f} bits are worth reading"
        )
    return frontier


def expected_error(group: GroupStatistics, thresholds: Tensor | None) -> float:
    """Mean over rows of sum_i C_b x_i^2: the error of reading channels at their levels.

    thresholds: [4]; None reads all at 8 bits
    """
    middle = torch.exp2((torch.arange(BINS, dtype=torch.float64) + 0.5) / _PER_OCTAVE + _LOWEST)
    level = torch.full((BINS,), _CHANGES) if thresholds is None else torch.bucketize(middle, thresholds.double())
    power = middle.square() * group.histogram.tiles.sum(0).double()
    return float((group.errors[level] * power).sum()) / group.histogram.rows


def percentile_thresholds(groups: dict[str, GroupStatistics], shares: Sequence[float]) -> dict[str, Tensor]:
    """Thresholds that give the shares P = (p0, p2, p4, p6, p8) of channels each level, per group (GRINQH, section 3).

    Every record's magnitudes have their own quantiles; a threshold is their mean over records. -> group -> [4] float32.
    """
    cumulative = torch.tensor(shares, dtype=torch.float64).cumsum(0)[:-1].clamp_max(1.0)
    out = {}
    for name, group in groups.items():
        quantiles = torch.stack([_quantiles(counts, cumulative) for counts in group.histogram.records]).mean(0)
        quantiles[cumulative <= 0] = -1.0  # even a zero activation is read
        quantiles[cumulative >= 1 - 1e-12] = NEVER
        out[name] = quantiles.float()
    return out


def _quantiles(counts: Tensor, cumulative: Tensor) -> Tensor:
    """Magnitudes below which the given shares of a record lie, interpolated inside a bin. [4] float64."""
    total = counts.double().cumsum(0)
    wanted = cumulative * total[-1]
    index = torch.searchsorted(total, wanted).clamp_max(BINS - 1)
    before = torch.where(index > 0, total[(index - 1).clamp_min(0)], 0.0)
    inside = ((wanted - before) / counts[index].clamp_min(1)).clamp(0, 1)
    return torch.exp2((index + inside) / _PER_OCTAVE + _LOWEST)

"""What is known of a linear's inputs before its codes are made, and the scales and transforms that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tilequant.calibrate import quantize
from vllm_tilequant.calibrate.allocation import NARROW
from vllm_tilequant.calibrate.basis import Basis
from vllm_tilequant.calibrate.capture import Group
from vllm_tilequant.calibrate.placing import device_of
from vllm_tilequant.calibrate.thresholds import GroupStatistics, Histogram, expected_error, optimal_thresholds_per_group
from vllm_tilequant.kernels import layout
from vllm_tilequant.schema import PROFILE_FULL, PROFILE_OFF, TILE

#: Rows of a record whose magnitudes enter the threshold histograms.
HISTOGRAM_ROWS = 128
#: Whether inputs are rotated, by `Settings.input_rotation`: what is tried.
FORMS = {"off": (False,), "on": (True,), "auto": (False, True)}


@dataclass
class InputStatistics:
    """Of one shared input in one form: sum of x^2 per channel ([K] float64) and magnitudes."""

    squares: Tensor
    histogram: Histogram

    @classmethod
    def empty(cls, in_features: int) -> InputStatistics:
        return cls(torch.zeros(in_features, dtype=torch.float64), Histogram(in_features))

    def add_record(self, x: Tensor) -> None:
        """x: [M, K], the rows of one batch. Sums stay on its device: a transfer would wait for the model's pass."""
        self.squares = self.squares.to(x.device) + x.float().square().sum(0).double()
        self.histogram.add_record(x[:: max(1, x.shape[0] // HISTOGRAM_ROWS)])

    def to_cpu(self) -> None:
        self.squares = self.squares.cpu()
        self.histogram.to_cpu()


class ScaleSearch:
    """Output transforms and tile scales of all groups; where both forms of the inputs are known, the better one.

    inputs: group -> whether rotated -> statistics; the form that lost is dropped
    tokens: rows behind them; narrow: share of tiles that the budget makes 4-bit
    Results: `basis` (filled), `scales` (linear -> bits -> [N/64, K/64]), `errors` (group -> expected error of each form).
    """

    def __init__(self, basis: Basis, inputs: dict[str, dict[bool, InputStatistics]], tokens: int, narrow: float):
        self.basis, self.settings, self.inputs = basis, basis.settings, inputs
        self.tokens, self.narrow = tokens, narrow
        self.scales: dict[str, dict[int, Tensor]] = {}
        self.errors: dict[str, dict[str, float]] = {}

    @torch.no_grad()
    def search(self, group: Group) -> None:
        forms = self.inputs[group.name]
        found = {}
        for rotated in forms:
            self._turn(group, rotated)
            for name in group.members:
                self._search_linear(name)
            error = self._expected_error(group) if len(forms) > 1 else 0.0
            found[rotated] = error, {n: (self.basis.output_index[n], self.scales[n]) for n in group.members}
        best = min(found, key=lambda rotated: (found[rotated][0], rotated))
        self._turn(group, best)
        for name, (index, scales) in found[best][1].items():
            self.basis.output_index[name], self.scales[name] = index, scales
        self.inputs[group.name] = {best: forms[best]}
        if len(found) > 1:
            self.errors[group.name] = {"off": found[False][0], "on": found[True][0]}

    def _turn(self, group: Group, rotated: bool) -> None:
        (self.basis.rotated.add if rotated else self.basis.rotated.discard)(group.name)

    def _search_linear(self, name: str) -> None:
        self._choose_transforms(name)
        w = self.basis.weight(name)
        found = {b: self._scale(name, w, b) for b in {NARROW, self.settings.max_bits}}
        self.scales[name] = {b: s.cpu() for b, s in found.items()}

    def _scale(self, name: str, w: Tensor, bits: int) -> Tensor:
        """[N/64, K/64] for the rotated weight w of a linear."""
        if self.settings.scales == "absmax":
            return quantize.absmax_scale(w, bits)
        h = self._channel_weight(name).to(w.device) if self.settings.scales == "activation" else None
        return quantize.search_scale(w, bits, h, nested=self.settings.nested_scales and bits != NARROW)

    def _choose_transforms(self, name: str) -> None:
        """Per output tile the transform with the least activation-weighted 4-bit error, the first among equals."""
        linear = self.basis.linears[name]
        index = torch.zeros(linear.out_features // TILE, dtype=torch.uint8)
        if len(self.basis.output_transforms) > 1:
            h = self._channel_weight(name).to(device_of(linear))
            errors = []
            for i in range(len(self.basis.output_transforms)):
                self.basis.output_index[name] = torch.full_like(index, i)
                w = self.basis.weight(name)
                errors.append(quantize.output_tile_errors(w, self._scale(name, w, NARROW), NARROW, h))
            index = torch.stack(errors).argmin(0).to("cpu", torch.uint8)
        self.basis.output_index[name] = index

    def _channel_weight(self, name: str) -> Tensor:
        """E[x_i^2] of a linear's input in the form that is tried, [K] float32."""
        group = self.basis.group_of[name]
        return (self.inputs[group][group in self.basis.rotated].squares / self.tokens).float()

    def _expected_error(self, group: Group) -> float:
        """Squared output error of a row that the budget's mix of round-to-nearest tiles would have at the default profile.

        Of a stored profile graded at the group's own thresholds, of `full` and `off` at stored precision.
        """
        w = torch.cat([self.basis.weight(n) for n in group.members])
        found = []
        for bits in (NARROW, self.settings.max_bits):
            scale = torch.cat([self.scales[n][bits] for n in group.members]).to(w.device)
            tile_bits = torch.full_like(scale, bits, dtype=torch.uint8)
            q = quantize.round_to_nearest(w, scale, tile_bits)
            errors = quantize.level_errors(w, q, scale, tile_bits, torch.ones(len(w), device=w.device)).cpu()
            found.append((errors, layout.level_cost(tile_bits).cpu()))
        errors, cost = (self.narrow * a + (1 - self.narrow) * b for a, b in zip(*found, strict=True))
        histogram = self.inputs[group.name][group.name in self.basis.rotated].histogram
        statistics = GroupStatistics(histogram, errors, cost, w.numel())
        target = self.settings.profiles.get(self.settings.default_profile)
        if self.settings.default_profile in (PROFILE_FULL, PROFILE_OFF) or not isinstance(target, float | int):
            return expected_error(statistics, None)
        return expected_error(statistics, optimal_thresholds_per_group({group.name: statistics}, target)[group.name])

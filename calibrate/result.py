"""What a finished calibration hands on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from vllm_tilequant.calibrate.capture import Group
from vllm_tilequant.kernels import layout
from vllm_tilequant.schema import Transform


@dataclass(frozen=True)
class Result:
    """A finished calibration: packed weights by module, thresholds [profiles, 4] by group, and what was measured.

    rotated: groups whose inputs are rotated, by the last of `transforms`
    smoothing: [K] uint8 by group, as stored, where long prompts divide their inputs
    folded: groups whose inputs were scaled, by `diagonal.fold`
    """

    groups: list[Group]
    weights: dict[str, layout.PackedWeight]
    thresholds: dict[str, Tensor]
    transforms: list[Transform]
    max_bits: int
    report: dict
    rotated: frozenset[str] = frozenset()
    smoothing: dict[str, Tensor] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()

    @cached_property
    def group_of(self) -> dict[str, str]:
        """Linear -> its shared-input group."""
        return {name: g.name for g in self.groups for name in g.members}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What the checkpoint stores of a linear, by suffix; members of a group share some of it."""
        group = self.group_of[name]
        return layout.to_tensors(self.weights[name], self.thresholds[group], self.smoothing.get(group))

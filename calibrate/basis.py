"""The basis of a linear's codes: outputs rotated by U per output tile, and inputs by V where their group's are."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from vllm_tilequant.calibrate.placing import device_of
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.kernels import layout
from vllm_tilequant.schema import Transform


@dataclass
class Basis:
    """Of all linears of a calibration.

    group_of: linear -> name of its shared-input group
    output_index: linear -> [N/64] uint8, positions in `output_transforms`
    rotated: groups whose inputs are rotated, by `input_transform`
    """

    linears: dict[str, nn.Linear]
    settings: Settings
    group_of: dict[str, str]
    output_index: dict[str, Tensor] = field(default_factory=dict)
    rotated: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        s = self.settings
        if s.output_transform == "none":
            self.output_transforms = [Transform(kind="identity")]
        else:
            n = s.output_seeds if s.output_transform == "best" else 1
            self.output_transforms = [Transform(kind="randomized_hadamard", seed=s.output_seed + i) for i in range(n)]
        self.matrices = layout.transform_stack(self.output_transforms)
        self.input_transform = Transform(kind="randomized_hadamard", seed=s.input_seed)
        self._table = layout.rotation_table(self.input_transform)

    @property
    def transforms(self) -> list[Transform]:
        """Those that the checkpoint names: of outputs, then that of inputs if any group's are rotated."""
        return [*self.output_transforms, self.input_transform] if self.rotated else self.output_transforms

    def outputs(self, name: str) -> Tensor:
        """U of every output tile of a linear: [N/64, 64, 64] float32 on its device."""
        index, device = self.output_index[name].long(), device_of(self.linears[name])
        if len(self.output_transforms) == 1:  # one matrix for all, in memory too
            return self.matrices[0].to(device).float().expand(len(index), -1, -1)
        return self.matrices[index].to(device).float()

    def input_rotation(self, name: str) -> Tensor | None:
        """[64] uint8 of `layout.rotation_table`, None where a linear's inputs are taken as they come."""
        return self._table if self.group_of[name] in self.rotated else None

    def inputs(self, name: str, x: Tensor) -> Tensor:
        """What levels and codes of a linear belong to: its inputs x V, or as they come. x: [M, K]."""
        return self.turned(x) if self.group_of[name] in self.rotated else x

    def turned(self, x: Tensor) -> Tensor:
        """x V, whatever the group. [M, K] -> [M, K] float32"""
        assert self._table is not None
        return layout.rotate_inputs(x, self._table.to(x.device))

    def weight(self, name: str) -> Tensor:
        """U^T W V of a linear, [N, K] float32."""
        w = self.linears[name].weight.detach().float()
        if (table := self.input_rotation(name)) is not None:
            w = layout.rotate_weight_inputs(w, table.to(w.device))
        return layout.rotate_outputs(w, self.outputs(name))

"""Second moments of what a group of linears receives, and the weight that fits them best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tilequant.calibrate.quantize import damped


@dataclass
class Moments:
    """Sums over rows, float32. x: what the source model would hand to the linears; z: what they do receive.

    hessian: [K, K] of z z^T
    shift: [K, K] of (x - z) z^T; None while both are the same
    lacking: [N, K] of r z^T, r being what the hidden states lack at the linear's output; None where nothing is added to them
    """

    hessian: Tensor
    shift: Tensor | None = None
    lacking: Tensor | None = None

    @classmethod
    def empty(cls, in_features: int, device: torch.device) -> Moments:
        return cls(torch.zeros(in_features, in_features, device=device))

    def add(self, x: Tensor, z: Tensor, r: Tensor | None) -> None:
        """x, z: [M, K], the same object where the streams do not differ; r: [M, N] or None."""
        received = z.float()
        self.hessian.addmm_(received.T, received)
        if x is not z:
            difference = x.float() - received
            self.shift = torch.zeros_like(self.hessian) if self.shift is None else self.shift
            self.shift.addmm_(difference.T, received)
        if r is not None:
            if self.lacking is None:
                self.lacking = torch.zeros(r.shape[1], z.shape[1], device=z.device)
            self.lacking.addmm_(r.float().T, received)

    def target(self, weight: Tensor, lacking: Tensor | None, strength: float, damping: float) -> Tensor:
        """The weight whose outputs for z come closest to the source's for x (plus what is lacking): least squares.

        W + strength * (W E[(x - z) z^T] + E[r z^T]) E[z z^T]^-1. weight: [N, K] float32; lacking: [N, K], `lacking` in the
        weight's basis of outputs; strength: how far to go, since the moments know the calibration text only -> [N, K] float32
        """
        if strength == 0 or (self.shift is None and lacking is None):
            return weight
        change = torch.zeros(weight.shape, dtype=torch.float64, device=weight.device)
        if self.shift is not None:
            change += weight.double() @ self.shift.double()
        if lacking is not None:
            change += lacking.double()
        factor = torch.linalg.cholesky(damped(self.hessian, damping))
        return (weight.double() + strength * torch.cholesky_solve(change.T, factor).T).float()

"""Which input channels long prompts scale down before they become INT8 with one scale per row.

A row's scale is set by its largest channel, and what is lost is lost in the small ones. Dividing channel i by a_i moves its size
into the weight, which is requantized with one scale per output anyway: a_i = rms(x_i)^alpha / max|W_i|^(1 - alpha). alpha is
searched per shared input on the error of its outputs, in the very arithmetic of the product, and "none" is one of the candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, Group, watch_inputs
from vllm_tilequant.kernels.layout import PackedWeight, aligned_codes, restore_weight, to_device
from vllm_tilequant.kernels.portable import level_weight
from vllm_tilequant.kernels.reference import activation_token_ref, requantize_ref
from vllm_tilequant.schema import LEVELS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALPHAS = (0.25, 0.375, 0.5, 0.625, 0.75)
#: Rows of a shared input on which the error is measured.
ROWS = 384
#: A channel is moved by at most this factor, up or down.
_MOST = 2.0**20


def candidate(mean_square: Tensor, largest: Tensor, alpha: float) -> Tensor:
    """[K] float32. mean_square: E[x_i^2]; largest: max|W_i| over outputs; both [K]. Silent channels stay as they are."""
    size, used = mean_square.double().sqrt(), (mean_square > 0) & (largest > 0)
    log = (alpha * size.log2() - (1 - alpha) * largest.double().log2()).where(used, 0.0)
    log = (log - log[used].mean() if bool(used.any()) else log).where(used, 0.0)
    return torch.exp2(log).clamp(1 / _MOST, _MOST).float()


@torch.no_grad()
def search(
    x: Tensor, weights: Sequence[tuple[PackedWeight, Tensor]], mean_square: Tensor
) -> tuple[Tensor | None, dict[str, float]]:
    """The smoothing of one shared input, None where none is best, and every candidate's error relative to the outputs' power.

    x: [M, K], rows of this input; weights: of the members, each with the [N/64, 64, 64] matrices U of its output tiles
    """
    dense = []
    for w, matrices in weights:
        rotated = level_weight(aligned_codes(w), w.tile_bits, w.tile_scale, LEVELS[-1]).contiguous()
        dense.append(restore_weight(rotated, matrices.float()))
    wanted = [x.float() @ d.T for d in dense]
    power = sum(float(y.double().square().sum()) for y in wanted)
    largest = torch.stack([d.abs().amax(0) for d in dense]).amax(0)
    del dense
    found: dict[str, tuple[float, Tensor | None]] = {}
    tried = {"none": None} | {str(a): candidate(mean_square.to(x.device), largest, a) for a in ALPHAS}
    for name, smoothing in tried.items():
        q, scale = activation_token_ref(x, smoothing)
        rows, error = q.float() * scale[:, None], 0.0
        for (w, matrices), y in zip(weights, wanted, strict=True):
            codes, unit = requantize_ref(w, matrices, smoothing)
            error += float((rows @ (codes.float() * unit[:, None]).T - y).double().square().sum())
        found[name] = (error / power if power else 0.0, smoothing)
    best = min(found.values(), key=lambda pair: pair[0])[1]
    return (None if best is None else best.cpu()), {name: error for name, (error, _) in found.items()}


def search_all(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    groups: Iterable[Group],
    weights: dict[str, PackedWeight],
    transforms: Tensor,
    mean_squares: dict[str, Tensor],
    batches: Sequence[Batch],
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Smoothing by group (those without are left out), and the errors of all candidates by group.

    groups: whose inputs are not rotated; weights: by linear; transforms: [n, 64, 64]; mean_squares: E[x^2] by group;
    batches: of text to take rows from; the model's own weights make them
    """
    samples: dict[str, list[Tensor]] = {g.name: [] for g in groups}
    share = -(-ROWS // max(1, len(batches)))

    def keep(name: str, x: Tensor) -> None:
        samples[name].append(x[:: max(1, x.shape[0] // share)][:share].clone())

    watch_inputs(model, {name: linears[name] for name in samples}, batches, keep)
    found, errors = {}, {}
    for group in groups:
        x = torch.cat(samples.pop(group.name))
        members = []
        for name in group.members:
            w = to_device(weights[name], x.device)
            members.append((w, transforms.to(x.device)[w.output_transform.long()]))
        smoothing, errors[group.name] = search(x, members, mean_squares[group.name])
        if smoothing is not None:
            found[group.name] = smoothing
    return found, errors

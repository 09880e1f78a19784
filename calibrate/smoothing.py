"""Which input channels long prompts scale down before they become INT8 with one scale per row.

A row's scale is set by its largest channel, and what is lost is lost in the small ones. Dividing channel i by a_i moves its
size into the weight, which is requantized with one scale per output anyway: a_i = size(x_i)^alpha / rms(W_i)^(1 - alpha), the
size being the root mean square, or its geometric mean with the largest |x_i|. Both are searched per shared input on the
error of its outputs, in the very arithmetic of the product; "none" is a candidate too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, Group, watch_inputs
from vllm_tilequant.kernels.layout import (
    PackedWeight,
    aligned_codes,
    restore_weight,
    slice_weight,
    smoothing_codes,
    smoothing_values,
    to_device,
)
from vllm_tilequant.kernels.portable import level_weight
from vllm_tilequant.kernels.reference import activation_token_ref, requantize_ref
from vllm_tilequant.schema import LEVELS, SMOOTHING_ONE, TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: (size, alpha) that are tried.
CANDIDATES = (("rms", 0.375), ("rms", 0.5), ("rms", 0.625), ("mixed", 0.5), ("mixed", 0.625), ("mixed", 0.75))
#: Rows of a shared input on which the error is measured, and records that they are taken from.
ROWS, RECORDS = 384, 4
#: Weights looked at together: requantizing takes float64.
_PIECE = 2**22


def candidate(size: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """[K] uint8 of `layout.smoothing_codes`; silent channels stay as they are.

    size: of every input channel; weight: root mean square of its column; both [K]
    """
    used = (size > 0) & (weight > 0)
    log = (alpha * size.double().log2() - (1 - alpha) * weight.double().log2()).where(used, 0.0)
    log = (log - log[used].mean() if bool(used.any()) else log).where(used, 0.0)
    return smoothing_codes(torch.exp2(log))


@torch.no_grad()
def search(x: Tensor, weights: Sequence[tuple[PackedWeight, Tensor]], mean_square: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The smoothing of one shared input, [K] uint8 as stored, and every candidate's error relative to the outputs' power.

    x: [M, K], rows of this input; weights: of the members, each with the [N/64, 64, 64] matrices U of its output tiles
    """
    weight = torch.stack([dense.square().sum(0) for _, _, dense in _pieces(weights)]).sum(0).sqrt()
    rms = mean_square.to(x.device).sqrt().float()
    sizes = {"rms": rms, "mixed": (rms * x.float().abs().amax(0)).sqrt()}
    stored = {f"{size} {alpha}": candidate(sizes[size], weight, alpha) for size, alpha in CANDIDATES}
    tried = {"none": None} | {name: smoothing_values(codes) for name, codes in stored.items()}
    rows = {}
    for name, smoothing in tried.items():
        q, scale = activation_token_ref(x, smoothing)
        rows[name] = q.float() * scale[:, None]
    power, errors = 0.0, dict.fromkeys(tried, 0.0)
    for w, matrices, dense in _pieces(weights):
        wanted = x.float() @ dense.T
        power += float(wanted.double().square().sum())
        for name, smoothing in tried.items():
            codes, unit = requantize_ref(w, matrices, smoothing)
            errors[name] += float((rows[name] @ (codes.float() * unit[:, None]).T - wanted).double().square().sum())
    best = stored.get(min(errors, key=errors.__getitem__), torch.full(x.shape[1:], SMOOTHING_ONE, dtype=torch.uint8))
    return best.cpu(), {name: error / power if power else 0.0 for name, error in errors.items()}


def _pieces(weights: Sequence[tuple[PackedWeight, Tensor]]) -> Iterator[tuple[PackedWeight, Tensor, Tensor]]:
    """Some output tiles at a time: (packed, their matrices, dense [n, K] float32)."""
    for w, matrices in weights:
        tiles = max(1, _PIECE // (TILE * w.in_features))
        for first in range(0, len(matrices), tiles):
            u = matrices[first : first + tiles]
            piece = slice_weight(w, (first * TILE, (first + len(u)) * TILE), (0, w.in_features))
            rotated = level_weight(aligned_codes(piece), piece.tile_bits, piece.tile_scale, LEVELS[-1]).contiguous()
            yield piece, u, restore_weight(rotated, u.float())


def search_all(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    groups: Sequence[Group],
    weights: dict[str, PackedWeight],
    transforms: Tensor,
    mean_squares: dict[str, Tensor],
    batches: Sequence[Batch],
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Smoothing by group, as stored, and the errors of all candidates by group.

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
        found[group.name], errors[group.name] = search(x, members, mean_squares[group.name])
    return found, errors

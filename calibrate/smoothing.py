"""Which input channels long prompts scale down before they become INT8 with one scale per row.

A row's scale is set by its largest channel, and what is lost is lost in the small ones. Dividing channel i by a_i moves its
size into the weight, which is requantized with one scale per output anyway. Candidates are powers of the sizes of inputs over
those of weights (`CANDIDATES`), with W's outputs weighed by how much the loss feels them; the best one is refined entry by
entry; what is stored is the one with the least error of the outputs. "None" is a candidate too.

The error is that of the product's own roundings on real rows, taken as independent of one another: what rounding x_i loses
costs the loss-weighed norm of column i, and what rounding W_ni loses costs the size of x_i. So no product is needed for a
candidate, and there can be many rows: largest entries are all that counts here, and few rows show few of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, Group, watch_inputs
from vllm_tilequant.calibrate.placing import device_of
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
from vllm_tilequant.kernels.reference import activation_token_ref
from vllm_tilequant.schema import LEVELS, SMOOTHING_ONE, TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: (size of an input, alpha) that are tried: its root mean square, or that of weighed rows times their largest.
CANDIDATES = tuple((size, alpha) for size in ("rms", "mixed") for alpha in (0.4, 0.5, 0.6, 0.7))
#: The name of the refined one among the errors.
REFINED = "refined"
#: Rows of a shared input on which the error is measured, and records that they are taken from.
ROWS, RECORDS = 2048, 8
#: Weights looked at together, so that few are dense at a time; outputs that refining looks at.
_PIECE, _OUTPUTS = 2**22, 1024
#: Of refining: steps, their first size in octaves of a^2, and how often ratios to a largest are squared to soften a maximum.
_STEPS, _RATE, _SHARPNESS = 20, 0.06, 3


@dataclass(frozen=True)
class Sample:
    """One shared input as the search sees it.

    x: [M, K] float32 rows; power: [M], weighed squares of a row's outputs
    columns: [K] what an error of an input costs, sum_n f_n W_ni^2
    outputs: [n, K] some rows of the weight; output_weight: [n], what each of them stands for
    """

    x: Tensor
    power: Tensor
    columns: Tensor
    outputs: Tensor
    output_weight: Tensor

    @property
    def rows(self) -> Tensor:
        """[M] what a row's error counts: one over the size of its outputs. Some tokens' are a thousand times the others'; they
        are neither to decide alone nor to be left out."""
        return self.power.rsqrt().where(self.power > 0, 0.0)

    @property
    def inputs(self) -> Tensor:
        """[K] what an error of a weight costs: sum over rows of weighed squares."""
        return self.rows @ self.x.square()

    def half(self, first: int) -> Sample:
        """Every other row, or the only one."""
        return replace(self, x=self.x[first::2], power=self.power[first::2]) if len(self.x) > 1 else self


def candidate(size: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """[K] uint8 of `layout.smoothing_codes`; silent channels stay as they are.

    size: of every input channel; weight: root mean square of its column; both [K]
    """
    used = (size > 0) & (weight > 0)
    log = (alpha * size.double().log2() - (1 - alpha) * weight.double().log2()).where(used, 0.0)
    log = (log - log[used].mean() if bool(used.any()) else log).where(used, 0.0)
    return smoothing_codes(torch.exp2(log))


def refine(sample: Sample, start: Tensor) -> Tensor:
    """A better smoothing near `start` in the model of even noise: [K] uint8. start: [K] float32

    A rounding to steps of d costs d^2 / 12, and a row's steps are its largest |x_i| / a_i over 127, an output's the largest
    |W_ni| a_i over 127. The sum of both parts falls along its own gradient, with maxima softened to powers.
    """
    x2, w2, rows, inputs = sample.x.square(), sample.outputs.square(), sample.rows, sample.inputs
    used = (sample.columns > 0) & (inputs > 0)
    log = 2 * start.log2()
    first, second = torch.zeros_like(log), torch.zeros_like(log)
    for step in range(1, _STEPS + 1):
        a2 = torch.exp2(log)
        sizes, shares = _soft_maximum(x2 / a2)
        units, parts = _soft_maximum(w2 * a2)
        sizes, units = rows * sizes, sample.output_weight * units
        spread, taken = (sample.columns * a2).sum(), (inputs / a2).sum()
        of_rows, of_outputs = spread * sizes.sum(), taken * units.sum()
        slope = of_rows * (sample.columns * a2 / spread - sizes @ shares / sizes.sum())
        slope += of_outputs * (units @ parts / units.sum() - inputs / a2 / taken)
        slope = (slope / (of_rows + of_outputs)).where(used, 0.0)
        first, second = 0.9 * first + 0.1 * slope, 0.95 * second + 0.05 * slope.square()  # Adam
        rate = _RATE * (1 - 0.9 * step / _STEPS)
        log = log - rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-12)
    log = ((log - log[used].mean()) / 2).where(used, 0.0)
    return smoothing_codes(torch.exp2(log))


def _soft_maximum(v: Tensor) -> tuple[Tensor, Tensor]:
    """Of every row of v >= 0, [n, K]: its softened maximum [n], and the derivative of that one's logarithm by those of v."""
    top = v.amax(1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    share = v / top
    for _ in range(_SHARPNESS):
        share = share.square()
    total = share.sum(1, keepdim=True).clamp_min(1e-30)
    return (top * total ** (0.5**_SHARPNESS))[:, 0], share / total


@torch.no_grad()
def search(
    x: Tensor, weights: Sequence[tuple[PackedWeight, Tensor]], mean_square: Tensor, output_weights: Sequence[Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """The smoothing of one shared input, [K] uint8 as stored, and every candidate's error relative to the outputs' power.

    x: [M, K], rows of this input; weights: of the members, each with the [N/64, 64, 64] matrices U of its output tiles
    output_weights: of the members, [N] what the loss feels of each output in the rotated basis, or ones
    Refining sees every other row, and the errors are those of the rest.
    """
    sample = _sample(x.float(), weights, output_weights)
    columns, rms = sample.columns.sqrt(), mean_square.to(x.device).sqrt().float()
    largest = (sample.rows[:, None] * sample.x.square()).amax(0)
    sizes = {"rms": rms, "mixed": (sample.inputs * largest).sqrt().sqrt()}
    stored = {"none": torch.full(x.shape[1:], SMOOTHING_ONE, dtype=torch.uint8, device=x.device)}
    stored |= {f"{size} {alpha}": candidate(sizes[size], columns, alpha) for size, alpha in CANDIDATES}
    errors = _errors(sample.half(1), stored, weights, output_weights)
    if bool(sample.power.any()):
        best = min(errors, key=errors.__getitem__)
        stored[REFINED] = refine(sample.half(0), smoothing_values(stored[best]))
        errors |= _errors(sample.half(1), {REFINED: stored[REFINED]}, weights, output_weights)
    return stored[min(errors, key=errors.__getitem__)].cpu(), errors


def _sample(x: Tensor, weights: Sequence[tuple[PackedWeight, Tensor]], output_weights: Sequence[Tensor]) -> Sample:
    power, columns = torch.zeros(x.shape[0], device=x.device), torch.zeros(x.shape[1], device=x.device)
    outputs, counts = [], []
    step = -(-sum(w.out_features for w, _ in weights) // _OUTPUTS)
    for rotated, dense, f in _pieces(weights, output_weights):
        power += (x @ rotated.T).square() @ f
        columns += f @ rotated.square()
        outputs.append(dense[::step])
        counts.append(_of_tiles(f)[::step] * step)
    return Sample(x, power, columns, torch.cat(outputs), torch.cat(counts))


def _errors(
    sample: Sample, stored: dict[str, Tensor], weights: Sequence[tuple[PackedWeight, Tensor]], output_weights: Sequence[Tensor]
) -> dict[str, float]:
    """Of every smoothing: the expected squared error of the outputs over their power."""
    x, rows, inputs = sample.x, sample.rows, sample.inputs
    power = float(rows @ sample.power)
    tried = {name: smoothing_values(codes) for name, codes in stored.items()}
    errors = {}
    for name, a in tried.items():
        q, scale = activation_token_ref(x, a)
        errors[name] = float(rows @ (q.float() * scale[:, None] * a - x).square() @ sample.columns)
    for _, dense, f in _pieces(weights, output_weights):
        for name, a in tried.items():
            scaled = dense * a
            unit = scaled.abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / 127
            lost = ((scaled / unit).round() * unit - scaled) / a
            errors[name] += float(_of_tiles(f) @ (lost.square() @ inputs))
    return {name: error / power if power else 0.0 for name, error in errors.items()}


def _of_tiles(f: Tensor) -> Tensor:
    """What an output in the model's basis counts: the mean of its tile's, since rotations spread an error evenly. [n] -> [n]"""
    return f.view(-1, TILE).mean(1).repeat_interleave(TILE)


def _pieces(
    weights: Sequence[tuple[PackedWeight, Tensor]], output_weights: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some output tiles at a time: (rotated, in the model's basis, both [n, K] float32; [n] weights, one on average)."""
    whole = torch.cat([f.float() for f in output_weights]).mean()
    for (w, matrices), output_weight in zip(weights, output_weights, strict=True):
        f = (output_weight.float() / whole if float(whole) > 0 else torch.ones_like(output_weight.float())).to(w.plane0.device)
        tiles = max(1, _PIECE // (TILE * w.in_features))
        for first in range(0, len(matrices), tiles):
            u = matrices[first : first + tiles]
            outputs = (first * TILE, (first + len(u)) * TILE)
            piece = slice_weight(w, outputs, (0, w.in_features))
            rotated = level_weight(aligned_codes(piece), piece.tile_bits, piece.tile_scale, LEVELS[-1]).contiguous()
            yield rotated, restore_weight(rotated, u.float()), f[slice(*outputs)]


def search_all(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    groups: Sequence[Group],
    weights: dict[str, PackedWeight],
    transforms: Tensor,
    mean_squares: dict[str, Tensor],
    output_weights: dict[str, Tensor],
    batches: Sequence[Batch],
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Smoothing by group, as stored, and the errors of all candidates by group.

    groups: whose inputs are not rotated; weights: by linear; transforms: [n, 64, 64]; mean_squares: E[x^2] by group;
    output_weights: by linear, as in `search`; batches: of text to take rows from; the model's own weights make them
    """
    samples: dict[str, list[Tensor]] = {g.name: [] for g in groups}
    share = -(-ROWS // max(1, len(batches)))

    def keep(name: str, x: Tensor) -> None:  # all groups' rows wait: in 16 bits, and not where the model is
        samples[name].append(x[:: max(1, x.shape[0] // share)][:share].bfloat16().cpu())

    watch_inputs(model, {name: linears[name] for name in samples}, batches, keep)
    found, errors = {}, {}
    for group in groups:
        device = device_of(linears[group.name])
        x = torch.cat(samples.pop(group.name)).to(device)
        members = []
        for name in group.members:
            w = to_device(weights[name], device)
            members.append((w, transforms.to(device)[w.output_transform.long()]))
        sensitivities = [output_weights[name].to(device) for name in group.members]
        found[group.name], errors[group.name] = search(x, members, mean_squares[group.name], sensitivities)
    return found, errors

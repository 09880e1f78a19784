"""GRINQH's own way to a precision distribution: draw about 15 at random, keep the one with the lowest calibration perplexity.

Candidates run side by side as rows of one batch, each with its own thresholds, under the graded product of the finished codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, Group, records, token_loss
from vllm_tilequant.calibrate.decode import replaced_products
from vllm_tilequant.calibrate.placing import device_of, input_device, moved
from vllm_tilequant.calibrate.sensitivity import Seen, as_they_are
from vllm_tilequant.calibrate.thresholds import GroupStatistics, percentile_thresholds
from vllm_tilequant.kernels.layout import restore_outputs
from vllm_tilequant.kernels.portable import PortableWeight, fake_quantize, level_weight
from vllm_tilequant.schema import LEVELS, TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 0.05  # loaded bits around the target (GRINQH, A.3)
_SPARSITY = (0.15, 0.30)  # bounds of the share at 0 bits (GRINQH, Table 3)
_DRAWS, _ROUNDS = 1 << 14, 64
_LOGIT_BYTES = 1 << 30  # of the candidates that run at once

Thresholds = dict[str, Tensor]  # group -> [4] float32


def sample_distributions(cost: Tensor, target: float, n: int, generator: torch.Generator) -> list[list[float]]:
    """n precision distributions P, uniform on the simplex (a Dirichlet with all ones) within the constraints.

    cost: [5] float64, loaded bits per weight when every channel is at that level (0, 2, 4, 6, 8 where all tiles have 8 bits)
    The average of loaded bits is within 0.05 of `target`, and 15 to 30 % of the channels are left out where the target is not
    at either end. Levels that read no more than the one below get no share. Raises `ValueError` for a target out of reach.
    """
    used = torch.cat((torch.tensor([True]), cost[1:] > cost[:-1]))
    if not 0 < target <= float(cost[-1]):
        raise ValueError(f"a profile of {target} loaded bits cannot be reached: the codes have {float(cost[-1]):.2f}")
    inside = 0.25 * cost[-1] <= target <= 0.75 * cost[-1]
    low, high = _SPARSITY if inside else (0.0, 1.0)
    found: list[list[float]] = []
    for _ in range(_ROUNDS):
        draws = -torch.rand(_DRAWS, len(LEVELS), generator=generator, dtype=torch.float64).clamp_min(1e-300).log() * used
        p = draws / draws.sum(1, keepdim=True)
        if inside:  # the share at 0 bits between its bounds, the rest in the drawn proportions
            p[:, 0] = low + (high - low) * torch.rand(_DRAWS, generator=generator, dtype=torch.float64)
            p[:, 1:] *= ((1 - p[:, 0]) / p[:, 1:].sum(1))[:, None]
        good = (p @ cost - target).abs() <= _TOLERANCE
        found += p[good].tolist()
        if len(found) >= n:
            return found[:n]
    if found:
        return found
    raise ValueError(f"no precision distribution averages {target} loaded bits of at most {float(cost[-1]):.2f}")


def graded_candidates(x: Tensor, w: PortableWeight, bias: Tensor | None, thresholds: Tensor) -> Tensor:
    """The graded product of many rows as one dense float32 product per level, each candidate with its own thresholds.

    x: [C, L, K] any float; thresholds: [C, 4] float32 ascending -> [C, L, N] float32
    """
    c, rows, k = x.shape
    size = x.float().abs()
    index = torch.zeros_like(size, dtype=torch.uint8)
    for threshold in thresholds.T:
        index += size > threshold[:, None, None]
    a = fake_quantize(x.reshape(-1, k)).view(x.shape)
    y = torch.zeros(c * rows, w.codes.shape[1], device=x.device)
    for i, level in enumerate(LEVELS[1:], 1):
        part = a.where(index == i, 0.0).view(-1, k)
        y += part @ level_weight(w.codes, w.tile_bits, w.tile_scale, level).T
    y = restore_outputs(y, w.matrices)
    return (y if bias is None else y + bias.float()).view(c, rows, -1)


@torch.no_grad()
def perplexities(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    batches: Iterable[Batch],
    weights: dict[str, PortableWeight],
    thresholds: dict[str, Tensor],
    seen: Seen,
) -> list[float]:
    """Perplexity of the text under each candidate's thresholds, graded at every position. thresholds: module -> [C, 4]."""
    device = input_device(model)
    candidates = len(next(iter(thresholds.values())))
    vocabulary = model.get_output_embeddings().weight.shape[0]
    losses, predicted = torch.zeros(candidates, dtype=torch.float64), 0
    part = slice(0, 0)

    def product(name: str, x: Tensor) -> Tensor:
        own = thresholds[name][part].to(x.device)
        y = graded_candidates(seen(name, x).view(len(own), -1, x.shape[1]), weights[name], linears[name].bias, own)
        return y.view(-1, y.shape[2])

    with replaced_products(linears, product):
        for batch in batches:
            for ids in records(batch):
                ids = ids.to(device)
                length = ids.shape[1]
                step = max(1, _LOGIT_BYTES // (4 * length * vocabulary))
                for start in range(0, candidates, step):
                    part = slice(start, min(start + step, candidates))
                    rows = ids.expand(part.stop - start, -1)
                    logits = model(input_ids=rows, use_cache=False).logits
                    losses[part] += torch.tensor([float(token_loss(r[:-1], ids[0, 1:])) for r in logits], dtype=torch.float64)
                predicted += length - 1
    if predicted == 0:
        raise ValueError("the calibration text has no token to predict")
    return [math.exp(loss / predicted) for loss in losses.tolist()]


def search_thresholds(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    batches: Iterable[Batch],
    groups: list[Group],
    weights: dict[str, PortableWeight],
    statistics: dict[str, GroupStatistics],
    targets: dict[str, float],
    *,
    candidates: int,
    seed: int,
    seen: Seen = as_they_are,
) -> tuple[dict[str, Thresholds], dict]:
    """Thresholds of every profile by GRINQH's search, and what was tried. seen: see `sensitivity.Seen`.

    targets: profile -> average of loaded bits -> profile -> group -> [4] float32; a report of every profile
    """
    total = sum(s.weights for s in statistics.values())
    cost = torch.stack([s.cost.sum(1) for s in statistics.values()]).sum(0) * TILE / total
    generator = torch.Generator().manual_seed(seed)
    tried = {name: sample_distributions(cost, target, candidates, generator) for name, target in targets.items()}
    made = {name: [percentile_thresholds(statistics, shares) for shares in tried[name]] for name in targets}
    every = [thresholds for name in targets for thresholds in made[name]]
    by_module = {member: torch.stack([t[g.name] for t in every]) for g in groups for member in g.members}
    device_weights = {n: moved(w, device_of(linears[n])) for n, w in weights.items()}
    found = perplexities(model, linears, batches, device_weights, by_module, seen)
    chosen: dict[str, Thresholds] = {}
    report = {}
    start = 0
    for name in targets:
        own = found[start : start + len(made[name])]
        start += len(own)
        best = min(range(len(own)), key=own.__getitem__)
        chosen[name] = made[name][best]
        report[name] = {"shares": tried[name][best], "perplexity": own[best], "perplexities": own}
    return chosen, report

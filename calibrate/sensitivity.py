"""Which tiles the loss feels: scores from loss gradients, computed with batched matrix products.

R_jk = sum over rows of 1/2 sum_o ( (g_j U_j)_o (D_jk x_k)_o )^2 (AlignQuant, its second-order risk of a tile), with D the
difference between the tile's 4-bit and wide reconstructions, x the activations that inference sees, and g the gradient of the
summed token loss at the linear's output. Scores of several phases are normalised to a sum of one, and a tile's risk is the
greatest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, token_mask, watch_gradients
from vllm_tilequant.calibrate.decode import watch_decode
from vllm_tilequant.kernels.layout import rotate_outputs
from vllm_tilequant.kernels.portable import PortableWeight, fake_quantize, graded_linear
from vllm_tilequant.schema import TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_ELEMENTS = 1 << 26  # of the intermediate [input tiles, rows, outputs]: 256 MiB in float32
Scores = dict[str, Tensor]  # module -> [N/64, K/64] float64
#: (module, inputs [M, K]) -> the inputs that the module's codes belong to: rotated, or as they are.
Seen = Callable[[str, Tensor], Tensor]


def as_they_are(name: str, x: Tensor) -> Tensor:
    return x


def tile_scores(x: Tensor, gradient: Tensor, delta: Tensor, lowest: Tensor | None = None) -> Tensor:
    """Scores of all tiles of one linear from some rows.

    x: [M, K] inputs; gradient: [M, N] loss gradients in the rotated basis; delta: [N, K] W4 - wide, rotated
    lowest: scalar, the threshold below which a decode step leaves a channel out; None in prefill
    -> [N/64, K/64] float64
    """
    m, n = gradient.shape
    k_tiles = x.shape[1] // TILE
    seen = fake_quantize(x)
    if lowest is not None:
        seen = seen.where(x.abs() > lowest, 0.0)
    xs = seen.view(m, k_tiles, TILE).transpose(0, 1)  # [K/64, M, 64]
    ds = delta.view(n, k_tiles, TILE).permute(1, 2, 0)  # [K/64, 64, N]
    step = max(1, CHUNK_ELEMENTS // (m * n))
    scores = []
    for k in range(0, k_tiles, step):
        change = torch.bmm(xs[k : k + step], ds[k : k + step]).mul_(gradient)  # [step, M, N]
        scores.append(change.square_().sum(1).view(-1, n // TILE, TILE).sum(2))
    return 0.5 * torch.cat(scores).T.double()


def rotate_gradient(gradient: Tensor, matrices: Tensor) -> Tensor:
    """Loss gradients in the rotated basis: g U per output tile. gradient: [M, N]; matrices: [N/64, 64, 64] or [64, 64]."""
    return rotate_outputs(gradient.T.contiguous(), matrices).T.contiguous()


def prefill_scores(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    batches: Iterable[Batch],
    matrices: dict[str, Tensor],
    deltas: Mapping[str, Tensor],
    seen: Seen = as_they_are,
    layers: Sequence[nn.Module] = (),
) -> tuple[Scores, dict[str, Tensor]]:
    """Tile scores of causal passes, and E[g^2] per output in the rotated basis ([N] float64), the Fisher weights.

    matrices: U of every output tile, [N/64, 64, 64] float32; deltas: [N, K] W4 - wide, rotated, both on the weight's device, of
    the linears that are scored
    layers: see `watch_gradients`
    """
    scores = _no_scores(linears, deltas)
    fisher = {n: torch.zeros(m.out_features, dtype=torch.float64) for n, m in linears.items()}
    tokens = 0

    def counted() -> Iterable[Batch]:
        nonlocal tokens
        for batch in batches:
            tokens += int(token_mask(batch).sum())
            yield batch

    def use(name: str, x: Tensor, gradient: Tensor) -> None:
        with torch.no_grad():
            g = rotate_gradient(gradient.float(), matrices[name])
            fisher[name] += g.square().sum(0).double().cpu()
            if name in deltas:
                scores[name] += tile_scores(seen(name, x).float(), g, deltas[name].float()).cpu()

    watch_gradients(model, linears, counted(), use, layers)
    return scores, {n: f / tokens for n, f in fisher.items()}


def decode_scores(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    batches: Iterable[Batch],
    deltas: Mapping[str, Tensor],
    weights: Mapping[str, PortableWeight],
    thresholds: dict[str, Tensor],
    *,
    scored: int,
    seen: Seen = as_they_are,
    layers: Sequence[nn.Module] = (),
) -> Scores:
    """Tile scores of decode steps under the graded product of `weights` (all tiles wide).

    deltas as in `prefill_scores`; thresholds: module -> [4] float32, both on the weight's device
    scored: steps of a record; layers: see `watch_decode`
    """
    scores = _no_scores(linears, deltas)

    def product(name: str, x: Tensor) -> Tensor:
        bias = linears[name].bias
        return graded_linear(seen(name, x), weights[name], bias, thresholds[name], activation="group64", in_order=False)

    def use(name: str, x: Tensor, gradient: Tensor) -> None:
        with torch.no_grad():
            if name not in deltas:
                return
            g = rotate_gradient(gradient.float(), weights[name].matrices)
            scores[name] += tile_scores(seen(name, x).float(), g, deltas[name].float(), thresholds[name][0]).cpu()

    watch_decode(model, linears, batches, product, use, scored=scored, layers=layers)
    return scores


def activation_scores(deltas: Mapping[str, Tensor], squares: Callable[[str], Tensor]) -> Scores:
    """What a map without gradients knows: R_jk = sum over the tile of D^2 E[x^2].

    deltas: [N, K]; squares: module -> [K] E[x_i^2]
    """
    scores = {}
    for name, delta in deltas.items():
        n, k = delta.shape
        weighted = delta.float().square() * squares(name).to(delta.device).float()
        scores[name] = weighted.view(n // TILE, TILE, k // TILE, TILE).sum((1, 3)).double().cpu()
    return scores


def check_scores(scores: Scores) -> None:
    """Raises `ValueError` naming modules with non-finite, negative or all-zero scores."""
    bad = [name for name, r in scores.items() if not bool((r.isfinite() & (r >= 0)).all()) or not bool(r.any())]
    if bad:
        raise ValueError(f"tile scores are not finite, negative or all zero in {bad}: the loss gradients never reached them")


def combine(phases: Iterable[Scores]) -> Scores:
    """Every phase normalised to a model-wide sum of one, then the greatest of them per tile (AlignQuant, D.3)."""
    risk: Scores = {}
    for scores in phases:
        check_scores(scores)
        total = sum(float(r.double().sum()) for r in scores.values())
        for name, r in scores.items():
            share = r.double() / total
            risk[name] = torch.maximum(risk[name], share) if name in risk else share
    return risk


def _no_scores(linears: dict[str, nn.Linear], deltas: Mapping[str, Tensor]) -> Scores:
    """Of the linears whose tiles are to be chosen: those with a delta."""
    return {
        n: torch.zeros(m.out_features // TILE, m.in_features // TILE, dtype=torch.float64)
        for n, m in linears.items()
        if n in deltas
    }

"""The order of work of a calibration, each step feeding the next.

statistics of the inputs -> scales for 4 and 8 bits -> tile scores from loss gradients -> map under the model-wide budget ->
codes by GPTQ under the map -> thresholds of every profile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from loguru import logger
from torch import Tensor, nn
from tqdm import tqdm

from vllm_tilequant.calibrate import quantize
from vllm_tilequant.calibrate.allocation import allocate, random_scores
from vllm_tilequant.calibrate.capture import Batch, Group, find_groups, token_mask, watch_gradients, watch_inputs
from vllm_tilequant.calibrate.sensitivity import rotate_gradient, tile_scores
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.thresholds import GroupStatistics, Histogram, optimal_thresholds, percentile_thresholds
from vllm_tilequant.kernels import layout
from vllm_tilequant.schema import TILE, Transform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Memory for the Hessians that are alive at once; more layers than fit take another pass over the text.
HESSIAN_BYTES = 4 << 30
#: Rows of a record whose magnitudes enter the threshold histograms.
_HISTOGRAM_ROWS = 128


@dataclass(frozen=True)
class Result:
    """A finished calibration: packed weights by module, thresholds [profiles, 4] by group, and what was measured."""

    groups: list[Group]
    weights: dict[str, layout.PackedWeight]
    thresholds: dict[str, Tensor]
    transforms: list[Transform]
    report: dict


class Calibration:
    """One run over one model. `linears` are the targets by name, in model order; `batches` the calibration records."""

    def __init__(self, model: PreTrainedModel, linears: dict[str, nn.Linear], batches: list[Batch], settings: Settings):
        self.model, self.linears, self.batches, self.settings = model, linears, batches, settings
        self.transform = (
            Transform(kind="randomized_hadamard", seed=settings.output_seed)
            if settings.output_transform == "hadamard"
            else Transform(kind="identity")
        )
        self.matrix = layout.transform_matrix(self.transform)
        self.report: dict = {"seconds": {}}

    def run(self) -> Result:
        was_training = self.model.training
        self.model.eval()
        try:
            with self._step("inputs"):
                self.groups = find_groups(self.model, self.linears, self.batches[0])
                self._read_inputs()
            with self._step("scales"):
                self._search_scales()
            with self._step("scores"):
                self._score()
            with self._step("codes"):
                self._make_codes()
            with self._step("thresholds"):
                thresholds = self._make_thresholds()
        finally:
            self.model.train(was_training)
        return Result(self.groups, self.weights, thresholds, [self.transform], self.report)

    # ---- steps

    def _read_inputs(self) -> None:
        """E[x^2] per channel and magnitude histograms of every shared input."""
        self.squares = {g.name: torch.zeros(self._in_features(g), dtype=torch.float64) for g in self.groups}
        self.histograms = {g.name: Histogram(self._in_features(g)) for g in self.groups}
        self.tokens = sum(int(token_mask(b).sum()) for b in self.batches)
        self.report |= {"calibration_tokens": self.tokens, "calibration_records": len(self.batches)}

        def use(name: str, x: Tensor) -> None:
            self.squares[name] += x.float().square().sum(0).double().cpu()
            self.histograms[name].add_record(x[:: max(1, x.shape[0] // _HISTOGRAM_ROWS)])

        watch_inputs(self.model, self._first_members(self.groups), self._progress(self.batches, "inputs"), use)

    @torch.no_grad()
    def _search_scales(self) -> None:
        self.scales: dict[str, dict[int, Tensor]] = {}
        self.deltas: dict[str, Tensor] = {}
        for group in self._progress(self.groups, "scales"):
            squares = (self.squares[group.name] / self.tokens).float()
            for name in group.members:
                w = self._rotated(name)
                h = squares.to(w.device) if self.settings.scales == "activation" else None
                if self.settings.scales == "absmax":
                    found = {b: quantize.absmax_scale(w, b) for b in (4, 8)}
                else:
                    found = {b: quantize.search_scale(w, b, h, nested=b == 8) for b in (4, 8)}
                self.scales[name] = {b: s.cpu() for b, s in found.items()}
                # W4 - W8, needed once per record: 2 bytes a weight cost less than rounding anew every time.
                reads = [quantize.read_uniform(w, scale, bits) for bits, scale in found.items()]
                self.deltas[name] = (reads[0] - reads[1]).bfloat16()

    def _score(self) -> None:
        """Tile scores, and E[g^2] per output (rotated), which weighs the level errors of the thresholds."""
        self.output_weight = {n: torch.zeros(m.out_features, dtype=torch.float64) for n, m in self.linears.items()}
        scores = {
            n: torch.zeros(m.out_features // TILE, m.in_features // TILE, dtype=torch.float64) for n, m in self.linears.items()
        }
        batches = self.batches[: self.settings.score_samples]

        def use(name: str, x: Tensor, gradient: Tensor) -> None:
            with torch.no_grad():
                g = rotate_gradient(gradient.float(), self.matrix.to(gradient.device).float())
                self.output_weight[name] += g.square().sum(0).double().cpu()
                scores[name] += tile_scores(x.float(), g, self.deltas[name].float()).cpu()

        watch_gradients(self.model, self.linears, self._progress(batches, "scores"), use)
        self.deltas.clear()
        tokens = sum(int(token_mask(b).sum()) for b in batches)
        self.output_weight = {n: f / tokens for n, f in self.output_weight.items()}
        if self.settings.scores == "random":
            scores = random_scores({n: (s.shape[0], s.shape[1]) for n, s in scores.items()}, self.settings.seed)
        self.tile_bits = allocate(scores, self.settings.w4_fraction)
        self.report["score_mass"] = {n: float(s.sum()) for n, s in scores.items()}

    def _make_codes(self) -> None:
        self.weights: dict[str, layout.PackedWeight] = {}
        self.statistics: dict[str, GroupStatistics] = {}
        for chunk in self._chunks():
            hessians = self._hessians(chunk) if self.settings.codes == "gptq" else {}
            for group in self._progress(chunk, "codes"):
                self._quantize_group(group, hessians.pop(group.name, None))

    @torch.no_grad()
    def _quantize_group(self, group: Group, hessian: Tensor | None) -> None:
        w = torch.cat([self._rotated(n) for n in group.members])
        bits = torch.cat([self.tile_bits[n] for n in group.members]).to(w.device)
        scale4, scale8 = (torch.cat([self.scales[n][b] for n in group.members]).to(w.device) for b in (4, 8))
        scale = torch.where(bits == 4, scale4, scale8)
        if hessian is None:
            q = quantize.round_to_nearest(w, scale, bits)
        else:
            q = quantize.gptq(w, scale, bits, hessian.to(w.device), self.settings.damping)
        output_weight = torch.cat([self.output_weight[n] for n in group.members]).to(w.device)
        self.statistics[group.name] = GroupStatistics(
            self.histograms[group.name],
            quantize.level_errors(w, q, scale, bits, output_weight).cpu(),
            layout.level_cost(bits).cpu(),
            w.numel(),
        )
        index = torch.zeros(bits.shape[0], dtype=torch.uint8, device=w.device)
        packed = layout.to_device(layout.pack(quantize.to_unsigned(q, bits), bits, scale.float(), index), "cpu")
        start = 0
        for name in group.members:
            end = start + self.linears[name].out_features
            self.weights[name] = layout.slice_weight(packed, (start, end), (0, packed.in_features))
            start = end

    def _make_thresholds(self) -> dict[str, Tensor]:
        rows = [
            percentile_thresholds(self.statistics, target)
            if isinstance(target, list)
            else optimal_thresholds(self.statistics, target)
            for target in self.settings.profiles.values()
        ]
        return {g.name: torch.stack([row[g.name] for row in rows]) for g in self.groups}

    # ---- helpers

    def _hessians(self, groups: list[Group]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}

        def use(name: str, x: Tensor) -> None:
            if name not in out:
                out[name] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            rows = x.float()
            out[name].addmm_(rows.T, rows)

        watch_inputs(self.model, self._first_members(groups), self._progress(self.batches, "Hessians"), use)
        return out

    def _chunks(self) -> Iterator[list[Group]]:
        """Groups whose Hessians fit together, in model order."""
        chunk: list[Group] = []
        size = 0
        for group in self.groups:
            needed = 4 * self._in_features(group) ** 2
            if chunk and size + needed > HESSIAN_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(group)
            size += needed
        yield chunk

    def _rotated(self, name: str) -> Tensor:
        w = self.linears[name].weight.detach().float()
        return layout.rotate_outputs(w, self.matrix.to(w.device).float())

    def _first_members(self, groups: list[Group]) -> dict[str, nn.Linear]:
        return {g.name: self.linears[g.name] for g in groups}

    def _in_features(self, group: Group) -> int:
        return self.linears[group.name].in_features

    def _progress(self, items: Iterable, what: str) -> tqdm:
        return tqdm(items, desc=f"tilequant {what}", dynamic_ncols=True)

    def _step(self, name: str) -> _Step:
        return _Step(name, self.report["seconds"])


class _Step:
    """Times a step into the report and says when it is done."""

    def __init__(self, name: str, seconds: dict[str, float]):
        self.name, self.seconds = name, seconds

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.start, 2)
        logger.info(f"tilequant {self.name}: {self.seconds[self.name]} s")

"""The order of work of a calibration, each step feeding the next.

statistics of the inputs -> output transforms and scales for narrow and wide tiles -> tile scores -> map under the model-wide
budget -> codes by GPTQ under the map -> thresholds of every profile. Scores need gradients of causal passes, and where decode
steps count, provisional thresholds with all tiles wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate import quantize, sensitivity
from vllm_tilequant.calibrate.allocation import NARROW, allocate, narrow_tiles, random_scores
from vllm_tilequant.calibrate.capture import Batch, Group, find_groups, token_mask, watch_inputs
from vllm_tilequant.calibrate.progress import Progress
from vllm_tilequant.calibrate.search import search_thresholds
from vllm_tilequant.calibrate.settings import Settings, Target
from vllm_tilequant.calibrate.table3 import distribution
from vllm_tilequant.calibrate.thresholds import (
    GroupStatistics,
    Histogram,
    optimal_thresholds,
    optimal_thresholds_per_group,
    percentile_thresholds,
)
from vllm_tilequant.calibrate.work import WorkFolder
from vllm_tilequant.kernels import layout
from vllm_tilequant.kernels.portable import PortableWeight, prepare
from vllm_tilequant.schema import TILE, Transform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Memory for the Hessians that are alive at once; more layers than fit take another pass over the text.
HESSIAN_BYTES = 4 << 30
#: Rows of a record whose magnitudes enter the threshold histograms.
HISTOGRAM_ROWS = 128
#: Average of loaded bits under which the decode phase is scored, before any profile is known.
_PROVISIONAL_BITS = 3.0
#: What a step leaves for the later ones, and so what a resumed run reads instead of doing the step again. Codes are kept by
#: layer.
_KEPT = {
    "inputs": ("groups", "squares", "histograms", "tokens"),
    "scales": ("scales", "transform_index"),
    "scores": ("output_weight", "tile_bits"),
}
#: The dataclasses among it.
STATE_TYPES = (Group, Histogram, layout.PackedWeight)


@dataclass(frozen=True)
class Result:
    """A finished calibration: packed weights by module, thresholds [profiles, 4] by group, and what was measured."""

    groups: list[Group]
    weights: dict[str, layout.PackedWeight]
    thresholds: dict[str, Tensor]
    transforms: list[Transform]
    max_bits: int
    report: dict


class Calibration:
    """One run over one model. `linears` are the targets by name, in model order; `batches` the calibration records.

    progress: the display; work: where finished steps and layers are kept, and read from if an earlier run has left some
    """

    def __init__(
        self,
        model: PreTrainedModel,
        linears: dict[str, nn.Linear],
        batches: list[Batch],
        settings: Settings,
        *,
        progress: Progress | None = None,
        work: WorkFolder | None = None,
    ):
        self.progress, self.work = progress or Progress(), work
        self.model, self.linears, self.batches, self.settings = model, linears, batches, settings
        self.transforms = _transforms(settings)
        self.matrices = layout.transform_stack(self.transforms)
        self.report: dict = {}

    def run(self) -> Result:
        self._set_budget()
        was_training = self.model.training
        self.model.eval()
        try:
            self._step("inputs", self._read_inputs)
            self.group_of = {member: g for g in self.groups for member in g.members}
            self._step("scales", self._search_scales)
            self._step("scores", self._score)
            waiting, spent = self._restore_groups()
            with self.progress.phase("codes", spent):
                self._make_codes(waiting)
            with self.progress.phase("thresholds"):
                thresholds = self._make_thresholds()
        finally:
            self.model.train(was_training)
        self.report["seconds"] = dict(self.progress.seconds)
        return Result(self.groups, self.weights, thresholds, self.transforms, self.settings.max_bits, self.report)

    # ---- steps

    def _set_budget(self) -> None:
        """How many tiles become narrow. Raises `ValueError`, before any work, for what the budget cannot give."""
        s, shapes = self.settings, self._tile_shapes()
        self.narrow = narrow_tiles(shapes, s.w4_share, s.stored_bits, s.max_bits, len(s.profiles))
        code_bits = s.max_bits - (s.max_bits - NARROW) * self.narrow / sum(n * k for n, k in shapes.values())
        if over := [n for n, target in s.profiles.items() if isinstance(target, float) and target > code_bits]:
            raise ValueError(
                f"profiles {over} want more loaded bits than the codes have ({code_bits:.2f}): drop them or raise the budget"
            )

    def _read_inputs(self) -> None:
        """E[x^2] per channel and magnitude histograms of every shared input."""
        self.groups = find_groups(self.model, self.linears, self.batches[0])
        self.squares = {g.name: torch.zeros(self._in_features(g), dtype=torch.float64) for g in self.groups}
        self.histograms = {g.name: Histogram(self._in_features(g)) for g in self.groups}
        self.tokens = sum(int(token_mask(b).sum()) for b in self.batches)
        self.report |= {"calibration_tokens": self.tokens, "calibration_records": len(self.batches)}

        def use(name: str, x: Tensor) -> None:
            self.squares[name] += x.float().square().sum(0).double().cpu()
            self.histograms[name].add_record(x[:: max(1, x.shape[0] // HISTOGRAM_ROWS)])

        watch_inputs(self.model, self._first_members(self.groups), self._progress(self.batches, "inputs"), use)

    @torch.no_grad()
    def _search_scales(self) -> None:
        wide = self.settings.max_bits
        self.scales: dict[str, dict[int, Tensor]] = {}
        self.transform_index: dict[str, Tensor] = {}  # [N/64] uint8
        for group in self._progress(self.groups, "scales"):
            for name in group.members:
                self._choose_transforms(name)
                w = self._rotated(name)
                found = {b: self._scale(name, w, b) for b in {NARROW, wide}}
                self.scales[name] = {b: s.cpu() for b, s in found.items()}

    def _scale(self, name: str, w: Tensor, bits: int) -> Tensor:
        """[N/64, K/64] for the rotated weight w of a linear."""
        if self.settings.scales == "absmax":
            return quantize.absmax_scale(w, bits)
        h = self._channel_weight(name).to(w.device) if self.settings.scales == "activation" else None
        return quantize.search_scale(w, bits, h, nested=bits != NARROW)

    def _choose_transforms(self, name: str) -> None:
        """Per output tile the transform with the least activation-weighted 4-bit error, the first among equals."""
        linear = self.linears[name]
        index = torch.zeros(linear.out_features // TILE, dtype=torch.uint8)
        if len(self.transforms) > 1:
            weight = linear.weight.detach().float()
            h = self._channel_weight(name).to(weight.device)
            errors = []
            for matrix in self.matrices:
                w = layout.rotate_outputs(weight, matrix.to(weight.device).float())
                errors.append(quantize.output_tile_errors(w, self._scale(name, w, NARROW), NARROW, h))
            index = torch.stack(errors).argmin(0).to("cpu", torch.uint8)
        self.transform_index[name] = index

    def _score(self) -> None:
        """The map, and E[g^2] per output (rotated), which weighs the level errors of the thresholds."""
        kind = self.settings.scores
        batches = self.batches[: self.settings.score_samples]
        matrices = {n: self._matrices(n) for n in self.linears}
        self.deltas = {n: self._delta(n) for n in self.linears}
        prefill, self.output_weight = sensitivity.prefill_scores(
            self.model, self.linears, self._progress(batches, "prefill scores"), matrices, self.deltas
        )
        if self.settings.max_bits == NARROW:  # nothing to choose, and W4 - wide is zero
            self.tile_bits = {n: torch.full_like(s, NARROW, dtype=torch.uint8) for n, s in prefill.items()}
            return
        phases: dict[str, sensitivity.Scores] = {}
        if kind == "random":
            phases[kind] = random_scores(self._tile_shapes(), self.settings.seed)
        elif kind == "activation":
            phases[kind] = sensitivity.activation_scores(self.deltas, self._channel_weight)
        if kind in ("prefill", "joint"):
            phases["prefill"] = prefill
        if kind in ("decode", "joint"):
            phases["decode"] = self._decode_scores(batches)
        self.deltas.clear()
        scores = sensitivity.combine(phases.values())
        self.tile_bits = allocate(scores, self.narrow, self.settings.max_bits)
        self.report["score_mass"] = {n: float(s.sum()) for n, s in scores.items()}

    def _decode_scores(self, batches: list[Batch]) -> sensitivity.Scores:
        wide = self.settings.max_bits
        weights: dict[str, PortableWeight] = {}
        statistics: dict[str, GroupStatistics] = {}
        for group in self._progress(self.groups, "provisional thresholds"):
            w = torch.cat([self._rotated(n) for n in group.members])
            scale = torch.cat([self.scales[n][wide] for n in group.members]).to(w.device)
            bits = torch.full_like(scale, wide, dtype=torch.uint8)
            q = quantize.round_to_nearest(w, scale, bits)
            statistics[group.name] = self._group_statistics(group, w, q, scale, bits)
            aligned = layout.align_codes(quantize.to_unsigned(q, bits), bits)
            start = 0
            for name in group.members:
                rows = slice(start, start + self.linears[name].out_features)
                tiles = slice(rows.start // TILE, rows.stop // TILE)
                codes = aligned[rows].T.contiguous()
                weights[name] = PortableWeight(codes, bits[tiles], scale[tiles], self._matrices(name))
                start = rows.stop
        found = optimal_thresholds(statistics, _PROVISIONAL_BITS)
        thresholds = {n: found[g.name].to(weights[n].codes.device) for g in self.groups for n in g.members}
        return sensitivity.decode_scores(
            self.model, self.linears, self._progress(batches, "decode scores"), self.deltas, weights, thresholds,
            scored=self.settings.score_steps,
        )  # fmt: skip

    def _make_codes(self, groups: list[Group]) -> None:
        for chunk in self._chunks(groups):
            hessians = self._hessians(chunk) if self.settings.codes == "gptq" else {}
            for group in self._progress(chunk, "codes"):
                self._quantize_group(group, hessians.pop(group.name, None))
                self._keep_group(group)

    @torch.no_grad()
    def _quantize_group(self, group: Group, hessian: Tensor | None) -> None:
        w = torch.cat([self._rotated(n) for n in group.members])
        bits = torch.cat([self.tile_bits[n] for n in group.members]).to(w.device)
        wide = self.settings.max_bits
        narrow_scale, wide_scale = (torch.cat([self.scales[n][b] for n in group.members]).to(w.device) for b in (NARROW, wide))
        scale = torch.where(bits == NARROW, narrow_scale, wide_scale)
        if hessian is None:
            q = quantize.round_to_nearest(w, scale, bits)
        else:
            q = quantize.gptq(w, scale, bits, hessian.to(w.device), self.settings.damping)
        self.statistics[group.name] = self._group_statistics(group, w, q, scale, bits)
        index = torch.cat([self.transform_index[n] for n in group.members]).to(w.device)
        packed = layout.to_device(layout.pack(quantize.to_unsigned(q, bits), bits, scale.float(), index), "cpu")
        start = 0
        for name in group.members:
            end = start + self.linears[name].out_features
            self.weights[name] = layout.slice_weight(packed, (start, end), (0, packed.in_features))
            start = end

    def _make_thresholds(self) -> dict[str, Tensor]:
        """Group -> [profiles, 4] float32."""
        profiles = self.settings.profiles
        if self.settings.thresholds == "search":
            found, self.report["search"] = search_thresholds(
                self.model, self.linears, self._progress(self.batches[: self.settings.score_samples], "search"), self.groups,
                {n: prepare(w, self.matrices) for n, w in self.weights.items()}, self.statistics,
                {n: float(t) for n, t in profiles.items() if isinstance(t, float | int)},
                candidates=self.settings.search_candidates, seed=self.settings.seed,
            )  # fmt: skip
            rows = list(found.values())
        else:
            rows = [self._profile_thresholds(target) for target in profiles.values()]
        return {g.name: torch.stack([row[g.name] for row in rows]) for g in self.groups}

    def _profile_thresholds(self, target: Target) -> dict[str, Tensor]:
        """Group -> [4]."""
        if isinstance(target, str):
            target = distribution(target)
        if isinstance(target, list):
            return percentile_thresholds(self.statistics, target)
        optimal = optimal_thresholds if self.settings.thresholds == "optimal" else optimal_thresholds_per_group
        return optimal(self.statistics, target)

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

    def _chunks(self, groups: list[Group]) -> Iterator[list[Group]]:
        """Groups whose Hessians fit together, in model order."""
        chunk: list[Group] = []
        size = 0
        for group in groups:
            needed = 4 * self._in_features(group) ** 2
            if chunk and size + needed > HESSIAN_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(group)
            size += needed
        if chunk:
            yield chunk

    def _group_statistics(self, group: Group, w: Tensor, q: Tensor, scale: Tensor, bits: Tensor) -> GroupStatistics:
        """w, q: [N, K] rotated weight and signed codes of all members; scale, bits: [N/64, K/64]."""
        if self.settings.level_errors == "stored":
            w = quantize.read_at(q, scale, bits, self.settings.max_bits)
        output_weight = torch.cat([self.output_weight[n] for n in group.members]).to(w.device)
        return GroupStatistics(
            self.histograms[group.name],
            quantize.level_errors(w, q, scale, bits, output_weight).cpu(),
            layout.level_cost(bits).cpu(),
            w.numel(),
        )

    @torch.no_grad()
    def _delta(self, name: str) -> Tensor:
        """W4 - wide of a linear, needed once per record: 2 bytes a weight cost less than rounding anew every time."""
        w = self._rotated(name)
        reads = [quantize.read_uniform(w, self.scales[name][b].to(w.device), b) for b in (NARROW, self.settings.max_bits)]
        return (reads[0] - reads[1]).bfloat16()

    def _rotated(self, name: str) -> Tensor:
        return layout.rotate_outputs(self.linears[name].weight.detach().float(), self._matrices(name))

    def _matrices(self, name: str) -> Tensor:
        """U of every output tile of a linear: [N/64, 64, 64] float32 on its device."""
        matrices = self.matrices[self.transform_index[name].long()]
        return matrices.to(self.linears[name].weight.device).float()

    def _channel_weight(self, name: str) -> Tensor:
        """E[x_i^2] of a linear's input, [K] float32."""
        return (self.squares[self.group_of[name].name] / self.tokens).float()

    def _tile_shapes(self) -> dict[str, tuple[int, int]]:
        return {n: (m.out_features // TILE, m.in_features // TILE) for n, m in self.linears.items()}

    def _first_members(self, groups: list[Group]) -> dict[str, nn.Linear]:
        return {g.name: self.linears[g.name] for g in groups}

    def _in_features(self, group: Group) -> int:
        return self.linears[group.name].in_features

    def _progress(self, items: Iterable, what: str) -> Iterator:
        return self.progress.track(items, what)

    # ---- what a run that may end at any moment leaves behind

    def _step(self, name: str, work: Callable[[], None]) -> None:
        """One step: from the work folder if an earlier run has finished it, else done and kept there."""
        state = self.work.load(name) if self.work else None
        if state is not None:
            vars(self).update(state["kept"])
            self.report |= state["report"]
            self.progress.restored(name, state["seconds"])
            return
        with self.progress.phase(name):
            work()
        if self.work:
            kept = {a: getattr(self, a) for a in _KEPT[name]}
            self.work.save(name, {"kept": kept, "report": self.report, "seconds": self.progress.seconds[name]})

    def _keep_group(self, group: Group) -> None:
        if self.work:
            weights = {n: self.weights[n] for n in group.members}
            statistics = vars(self.statistics[group.name]) | {"histogram": None}  # the first step has kept it
            state = {"weights": weights, "statistics": statistics, "seconds": self.progress.elapsed}
            self.work.save(f"codes.{group.name}", state)

    def _restore_groups(self) -> tuple[list[Group], float]:
        """Read the layers that an earlier run has finished: those that are left, and the seconds spent so far."""
        self.weights: dict[str, layout.PackedWeight] = {}
        self.statistics: dict[str, GroupStatistics] = {}
        waiting, spent = [], 0.0
        for group in self.groups:
            state = self.work.load(f"codes.{group.name}") if self.work else None
            if state is None:
                waiting.append(group)
                continue
            self.weights |= state["weights"]
            self.statistics[group.name] = GroupStatistics(**(state["statistics"] | {"histogram": self.histograms[group.name]}))
            spent = max(spent, state["seconds"])
        if len(waiting) < len(self.groups):
            self.progress.say(f"codes: {len(self.groups) - len(waiting)} of {len(self.groups)} layers from the work folder")
        return waiting, spent


def _transforms(settings: Settings) -> list[Transform]:
    """The checkpoint's transforms, to be addressed per output tile."""
    if settings.output_transform == "none":
        return [Transform(kind="identity")]
    n = settings.output_seeds if settings.output_transform == "best" else 1
    return [Transform(kind="randomized_hadamard", seed=settings.output_seed + i) for i in range(n)]

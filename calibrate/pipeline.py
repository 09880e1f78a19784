"""The order of work of a calibration, each step feeding the next.

statistics of the inputs -> transforms and scales for narrow and wide tiles -> tile scores -> map under the model-wide budget ->
codes by GPTQ under the map, layer by layer -> thresholds of every profile. Scores need gradients of causal passes; decode steps
and graded propagation need provisional thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate import diagonal, quantize, sensitivity
from vllm_tilequant.calibrate.allocation import NARROW, allocate, narrow_tiles, pool, random_scores
from vllm_tilequant.calibrate.basis import Basis
from vllm_tilequant.calibrate.capture import Batch, Group, find_groups, token_mask, watch_inputs
from vllm_tilequant.calibrate.moments import Moments
from vllm_tilequant.calibrate.placing import Held, device_of, offloaded
from vllm_tilequant.calibrate.progress import Progress
from vllm_tilequant.calibrate.result import Result
from vllm_tilequant.calibrate.scales import FORMS, InputStatistics, ScaleSearch
from vllm_tilequant.calibrate.search import graded_candidates, search_thresholds
from vllm_tilequant.calibrate.settings import Settings, Target
from vllm_tilequant.calibrate.smoothing import RECORDS as SMOOTHING_RECORDS
from vllm_tilequant.calibrate.smoothing import search_all
from vllm_tilequant.calibrate.streams import Block, Streams, find_blocks
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
from vllm_tilequant.kernels.portable import PortableWeight, dequantize, prepare, static_linear
from vllm_tilequant.schema import TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Average of loaded bits under which the decode phase is scored, before any profile is known.
_PROVISIONAL_BITS = 3.0
#: Per logit of a pass with its gradient: the model's dtype and float32, twice each, and what a softmax holds.
_LOGIT_BYTES = 16


#: What a step leaves for the later ones, and so what a resumed run reads instead of doing the step again. Codes are kept by
#: layer.
_KEPT = {
    "inputs": ("groups", "inputs", "tokens"),
    "scales": ("inputs", "scales", "output_index", "rotated"),
    "scores": ("output_weight", "tile_bits"),
}
#: The dataclasses among it.
STATE_TYPES = (Group, Histogram, InputStatistics, layout.PackedWeight)


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
        self.columns = quantize.Columns()
        head = model.get_output_embeddings()
        #: The output head, where it is quantized too: all of its tiles are wide, beside the budget of the others.
        self.head = next((n for n, m in linears.items() if m is head), None)
        self.report: dict = {}

    def run(self) -> Result:
        self._set_budget()
        was_training = self.model.training
        self.model.eval()
        try:
            self.folded = self._fold()
            self._step("inputs", self._read_inputs)
            self.basis = Basis(self.linears, self.settings, {n: g.name for g in self.groups for n in g.members})
            self._step("scales", self._search_scales)
            self.basis.output_index, self.basis.rotated = self.output_index, set(self.rotated)
            self._step("scores", self._score)
            waiting, spent = self._restore_groups()
            with self.progress.phase("codes", spent):
                self._make_codes(waiting)
            with self.progress.phase("thresholds"):
                thresholds = self._make_thresholds()
                smoothing = self._search_smoothing()
        finally:
            self.model.train(was_training)
        self.report["seconds"] = dict(self.progress.seconds)
        transforms, rotated = self.basis.transforms, frozenset(self.rotated)
        bits, weights = self.settings.max_bits, self.weights
        return Result(self.groups, weights, thresholds, transforms, bits, self.report, rotated, smoothing, self.folded)

    # ---- steps

    def _set_budget(self) -> None:
        """How many tiles become narrow. Raises `ValueError`, before any work, for what the budget cannot give."""
        s, shapes = self.settings, self._tile_shapes()
        self.narrow = narrow_tiles(shapes, s.w4_share, s.stored_bits, s.max_bits, len(s.profiles), s.smooths)
        code_bits = s.max_bits - (s.max_bits - NARROW) * self.narrow / sum(n * k for n, k in shapes.values())
        if over := [n for n, target in s.profiles.items() if isinstance(target, float) and target > code_bits]:
            raise ValueError(
                f"profiles {over} want more loaded bits than the codes have ({code_bits:.2f}): drop them or raise the budget"
            )

    def _fold(self) -> frozenset[str]:
        """Groups whose inputs are scaled. Not a step that is kept: a resumed run has the source's weights again."""
        if self.settings.input_diagonal == "off":
            return frozenset()
        with self.progress.phase("diagonal"):
            groups = find_groups(self.model, self.linears, self.batches[0])
            folded = frozenset(g.name for g in diagonal.fold(self.model, self.linears, groups, self.batches[0]))
        self.report["folded_input_diagonal"] = {
            "groups": sorted(folded),
            "not_folded": [g.name for g in groups if g.name not in folded],
        }
        return folded

    def _read_inputs(self) -> None:
        """E[x^2] per channel and magnitude histograms of every shared input, as it comes, rotated, or both."""
        self.groups = find_groups(self.model, self.linears, self.batches[0])
        forms = FORMS[self.settings.input_rotation]
        self.inputs = {g.name: {f: InputStatistics.empty(self._in_features(g)) for f in forms} for g in self.groups}
        turned = Basis(self.linears, self.settings, {}).turned
        self.tokens = sum(int(token_mask(b).sum()) for b in self.batches)
        self.report |= {"calibration_tokens": self.tokens, "calibration_records": len(self.batches)}

        def use(name: str, x: Tensor) -> None:
            for rotated, statistics in self.inputs[name].items():
                statistics.add_record(turned(x) if rotated else x)

        first = {g.name: self.linears[g.name] for g in self.groups}
        watch_inputs(self.model, first, self._progress(self.batches, "inputs"), use)
        for forms_of in self.inputs.values():
            for statistics in forms_of.values():
                statistics.to_cpu()

    def _search_scales(self) -> None:
        """Scales of every linear for narrow and wide tiles, and the basis that they are for."""
        found = ScaleSearch(self.basis, self.inputs, self.tokens, self._narrow_share)
        for group in self._progress(self.groups, "scales"):
            found.search(group)
        self.scales, self.output_index, self.rotated = found.scales, self.basis.output_index, sorted(self.basis.rotated)
        if self.settings.input_rotation != "off":
            self.report["input_rotation"] = {"groups": self.rotated, "expected_error": found.errors}

    def _score(self) -> None:
        """The map, and E[g^2] per output (rotated), which weighs the level errors of the thresholds."""
        kind = self.settings.scores
        batches = self.batches[: self.settings.score_samples]
        matrices = {n: self.basis.outputs(n) for n in self.linears}
        self.deltas = self._deltas(batches)
        prefill, self.output_weight = sensitivity.prefill_scores(
            self.model, self.linears, self._progress(batches, "prefill scores"), matrices, self.deltas, self.basis.inputs,
            self._layers,
        )  # fmt: skip
        if self.settings.max_bits == NARROW:  # nothing to choose, and W4 - wide is zero
            self.tile_bits = self._wide_map()
            del self.deltas
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
        del self.deltas
        scores = sensitivity.combine(phases.values())
        self.tile_bits = self._wide_map() | allocate(pool(scores, self.settings.map_unit), self.narrow, self.settings.max_bits)
        self.report["score_mass"] = {n: float(s.sum()) for n, s in scores.items()}

    def _decode_scores(self, batches: list[Batch]) -> sensitivity.Scores:
        wide = self._wide_map()
        sizes = {n: m.out_features * m.in_features for n, m in self.linears.items()}
        weights: Held[PortableWeight] = Held(self.linears, sizes, spare=20 * self._largest_group)
        statistics: dict[str, GroupStatistics] = {}
        for group in self._progress(self.groups, "provisional thresholds"):
            statistics[group.name], rounded = self._round_to_nearest(group, wide)
            for name, weight in rounded.items():
                weights.put(name, weight)
        thresholds = self._thresholds_by_linear(optimal_thresholds(statistics, _PROVISIONAL_BITS))
        return sensitivity.decode_scores(
            self.model, self.linears, self._progress(batches, "decode scores"), self.deltas, weights, thresholds,
            scored=self.settings.score_steps, seen=self.basis.inputs,
            layers=self._layers if any(offloaded(m) for m in self.linears.values()) else (),
        )  # fmt: skip

    @torch.no_grad()
    def _round_to_nearest(
        self, group: Group, tile_bits: dict[str, Tensor]
    ) -> tuple[GroupStatistics, dict[str, PortableWeight]]:
        """A group under a map, before its codes are made: what thresholds need, and the weights of its linears."""
        w, scale, bits = self._under_map(group, tile_bits)
        q = quantize.round_to_nearest(w, scale, bits)
        aligned = layout.align_codes(quantize.to_unsigned(q, bits), bits)
        weights, start = {}, 0
        for name in group.members:
            rows = slice(start, start + self.linears[name].out_features)
            tiles = slice(rows.start // TILE, rows.stop // TILE)
            weights[name] = PortableWeight(aligned[rows].T.contiguous(), bits[tiles], scale[tiles], self.basis.outputs(name))
            start = rows.stop
        return self._group_statistics(group, w, q, scale, bits), weights

    def _under_map(self, group: Group, tile_bits: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated weight [N, K] of all members, their scales and widths [N/64, K/64] under a map."""
        w = torch.cat([self.basis.weight(n) for n in group.members])
        bits = torch.cat([tile_bits[n] for n in group.members]).to(w.device)
        narrow, wide = (
            torch.cat([self.scales[n][b] for n in group.members]).to(w.device) for b in (NARROW, self.settings.max_bits)
        )
        return w, torch.where(bits == NARROW, narrow, wide), bits

    def _make_codes(self, waiting: list[Group]) -> None:
        """Codes of the groups that no earlier run has finished, layer by layer."""
        if self.settings.codes == "rtn":
            for group in self._progress(waiting, "codes"):
                self._quantize_group(group, None)
            return
        blocks, outside = find_blocks(self.model, self.groups)
        names = {g.name for g in waiting}
        inside = [g for b in blocks for g in b.groups]
        todo = iter(self._progress([g for g in inside + outside if g.name in names], "codes"))
        thresholds = self._propagation_thresholds()
        follow = self.settings.propagation != "off" and self.settings.propagation_strength > 0
        if any(g.name in names for g in inside):
            streams = Streams(self.model, self.linears, blocks, self.batches, follow)
            for block in blocks:
                self._make_block(streams, block, names, todo, thresholds)
        for group in todo:
            moments = Moments.empty(self._in_features(group), device_of(self.linears[group.name]))

            def use(name: str, x: Tensor, group: Group = group, moments: Moments = moments) -> None:
                seen = self.basis.inputs(group.name, x)
                moments.add(seen, seen, None)

            watch_inputs(self.model, {group.name: self.linears[group.name]}, self.batches, use)
            self._quantize_group(group, moments)

    def _make_block(
        self, streams: Streams, block: Block, names: set[str], todo: Iterator[Group], thresholds: dict[str, Tensor] | None
    ) -> None:
        streams.enter(block, keep=any(g.name in names for g in block.groups))
        for group in block.groups:
            if group.name in names:
                next(todo)
                moments = Moments.empty(self._in_features(group), device_of(self.linears[group.name]))
                for x, received, lacking in streams.rows(group, block):
                    source = self.basis.inputs(group.name, x)
                    z = source if received is x else self.basis.inputs(group.name, received)
                    if thresholds is not None:
                        z = z.where(z.abs() > thresholds[group.name][0], 0.0)  # a channel at level 0 is left out
                    moments.add(source, z, lacking)
                self._quantize_group(group, moments)
            if streams.follow:
                for name in group.members:
                    streams.install(name, self._product(name, thresholds))
        streams.leave(block)

    def _propagation_thresholds(self) -> dict[str, Tensor] | None:
        """Of every linear, under the map with round-to-nearest codes; None where propagation is not graded."""
        if self.settings.propagation != "graded":
            return None
        statistics = {g.name: self._round_to_nearest(g, self.tile_bits)[0] for g in self.groups}
        return self._thresholds_by_linear(optimal_thresholds(statistics, self.settings.propagation_bits))

    def _thresholds_by_linear(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: found[g.name].to(device_of(self.linears[n])) for g in self.groups for n in g.members}

    def _product(self, name: str, thresholds: dict[str, Tensor] | None) -> Callable[[Tensor], Tensor]:
        """What a finished linear computes in the stream of the quantized model: [M, K] -> [M, N], as it will be served."""
        linear = self.linears[name]
        packed = layout.to_device(replace(self.weights[name], input_rotation=None), device_of(linear))
        if thresholds is None:
            dense = dequantize(packed, self.basis.matrices, linear.weight.dtype)
            return lambda x: static_linear(self.basis.inputs(name, x).to(x.dtype), dense, linear.bias, activation="group64")
        weight = prepare(packed, self.basis.matrices)
        return lambda x: graded_candidates(self.basis.inputs(name, x)[None], weight, linear.bias, thresholds[name][None])[0]

    @torch.no_grad()
    def _quantize_group(self, group: Group, moments: Moments | None) -> None:
        """Codes by GPTQ on the moments of its inputs, by rounding to nearest without; then kept."""
        w, scale, bits = self._under_map(group, self.tile_bits)
        if moments is None:
            q = quantize.round_to_nearest(w, scale, bits)
        else:
            lacking = moments.lacking
            if lacking is not None:
                lacking = layout.rotate_outputs(lacking, self.basis.outputs(group.name))
            target = moments.target(w, lacking, self.settings.propagation_strength, self.settings.damping)
            q = quantize.gptq(target, scale, bits, moments.hessian, self.settings.damping, self.columns)
        self.statistics[group.name] = self._group_statistics(group, w, q, scale, bits)
        index = torch.cat([self.output_index[n] for n in group.members]).to(w.device)
        packed = layout.pack(quantize.to_unsigned(q, bits), bits, scale.float(), index)
        packed = replace(packed, input_rotation=self.basis.input_rotation(group.name))
        start = 0
        for name in group.members:
            end = start + self.linears[name].out_features
            self.weights[name] = layout.to_device(layout.slice_weight(packed, (start, end), (0, packed.in_features)), "cpu")
            start = end
        self._keep_group(group)

    def _make_thresholds(self) -> dict[str, Tensor]:
        """Group -> [profiles, 4] float32."""
        profiles = self.settings.profiles
        if self.settings.thresholds == "search":
            found, self.report["search"] = search_thresholds(
                self.model, self.linears, self._progress(self.batches[: self.settings.score_samples], "search"), self.groups,
                {n: prepare(w, self.basis.matrices) for n, w in self.weights.items()}, self.statistics,
                {n: float(t) for n, t in profiles.items() if isinstance(t, float | int)},
                candidates=self.settings.search_candidates, seed=self.settings.seed, seen=self.basis.inputs,
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

    def _search_smoothing(self) -> dict[str, Tensor]:
        """Group -> [K] uint8; rotated inputs need none."""
        groups = [g for g in self.groups if g.name not in self.rotated]
        if self.settings.prefill_smoothing == "none" or not groups:
            return {}
        squares = {g.name: self._inputs(g).squares / self.tokens for g in groups}
        found, self.report["smoothing"] = search_all(
            self.model, self.linears, groups, self.weights, self.basis.matrices, squares, self.output_weight,
            self.batches[:SMOOTHING_RECORDS],
        )  # fmt: skip
        return found

    # ---- helpers

    def _inputs(self, group: Group) -> InputStatistics:
        """Of the form that is kept."""
        (statistics,) = self.inputs[group.name].values()
        return statistics

    def _group_statistics(self, group: Group, w: Tensor, q: Tensor, scale: Tensor, bits: Tensor) -> GroupStatistics:
        """w, q: [N, K] rotated weight and signed codes of all members; scale, bits: [N/64, K/64]."""
        if self.settings.level_errors == "stored":
            w = quantize.read_at(q, scale, bits, self.settings.max_bits)
        output_weight = torch.cat([self.output_weight[n] for n in group.members]).to(w.device)
        return GroupStatistics(
            self._inputs(group).histogram,
            quantize.level_errors(w, q, scale, bits, output_weight).cpu(),
            layout.level_cost(bits).cpu(),
            w.numel(),
        )

    def _deltas(self, batches: list[Batch]) -> Held[Tensor]:
        """W4 - wide of all linears but the head. A GPU keeps them beside the model where it has the room."""
        names = [n for n in self.linears if n != self.head]
        sizes = {n: 2 * self.linears[n].out_features * self.linears[n].in_features for n in names}
        vocabulary = self.model.config.get_text_config().vocab_size
        logits = max((b["input_ids"].numel() for b in batches), default=0) * vocabulary * _LOGIT_BYTES
        deltas: Held[Tensor] = Held(self.linears, sizes, spare=logits + 20 * self._largest_group)
        for name in names:
            deltas.put(name, self._delta(name))
        return deltas

    @property
    def _layers(self) -> list[nn.Module]:
        return [block.module for block in find_blocks(self.model, self.groups)[0]]

    @property
    def _largest_group(self) -> int:
        """Weights of the group that has most."""
        return max(sum(self.linears[n].out_features for n in g.members) * self._in_features(g) for g in self.groups)

    @torch.no_grad()
    def _delta(self, name: str) -> Tensor:
        """W4 - wide of a linear, needed once per record: 2 bytes a weight cost less than rounding anew every time."""
        w = self.basis.weight(name)
        reads = [quantize.read_uniform(w, self.scales[name][b].to(w.device), b) for b in (NARROW, self.settings.max_bits)]
        return (reads[0] - reads[1]).bfloat16()

    def _channel_weight(self, name: str) -> Tensor:
        """E[x_i^2] of a linear's input, [K] float32."""
        (statistics,) = self.inputs[self.basis.group_of[name]].values()
        return (statistics.squares / self.tokens).float()

    @property
    def _narrow_share(self) -> float:
        return 1.0 if self.settings.max_bits == NARROW else self.narrow / sum(n * k for n, k in self._tile_shapes().values())

    def _wide_map(self) -> dict[str, Tensor]:
        """Every tile at `max_bits`, the head's too."""
        return {
            n: torch.full((m.out_features // TILE, m.in_features // TILE), self.settings.max_bits, dtype=torch.uint8)
            for n, m in self.linears.items()
        }

    def _tile_shapes(self) -> dict[str, tuple[int, int]]:
        """Of the linears that share the budget."""
        return {n: (m.out_features // TILE, m.in_features // TILE) for n, m in self.linears.items() if n != self.head}

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
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the next step's tensors have other sizes
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
            self.statistics[group.name] = GroupStatistics(
                **(state["statistics"] | {"histogram": self._inputs(group).histogram})
            )
            spent = max(spent, state["seconds"])
        if len(waiting) < len(self.groups):
            self.progress.say(f"codes: {len(self.groups) - len(waiting)} of {len(self.groups)} layers from the work folder")
        return waiting, spent

"""`TileQuantModifier`: the llm-compressor modifier. Fields and lifecycle; the work is in `pipeline`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationMetadata
from compressed_tensors.utils import match_named_modules
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.factory import ModifierFactory
from loguru import logger
from pydantic import Field, PrivateAttr
from torch import nn

from vllm_tilequant.calibrate.capture import Batch
from vllm_tilequant.calibrate.checkpoint import build_schema, untie_head, wrap_save_pretrained, write_dense_back
from vllm_tilequant.calibrate.judging import Judge
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.progress import Progress
from vllm_tilequant.calibrate.report import complete, measured_bits
from vllm_tilequant.calibrate.result import Result
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.work import WorkFolder
from vllm_tilequant.schema import TILE, QuantizationSchema


class TileQuantModifier(Settings, Modifier):
    """Quantizes every targeted linear into 64 x 64 tiles of 4 or 8 bits and calibrates decode thresholds.

    Use it in `oneshot(..., recipe=[TileQuantModifier()])`; the fields beyond `targets` and `ignore` are described at
    `vllm_tilequant.calibrate.settings.Settings`. It makes its own passes over the calibration data before llm-compressor's, so
    that loss gradients are possible, and packs when the model is saved.

    targets: module names, `re:` patterns or class names
    ignore: the same, for what stays dense
    strict: an entry of either that matches nothing is an error, not a warning
    """

    targets: list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: list[str] = Field(default_factory=lambda: ["lm_head"])
    strict: bool = False

    _linears: dict[str, nn.Linear] = PrivateAttr(default_factory=dict)
    _schema: QuantizationSchema | None = PrivateAttr(default=None)
    _result: Result | None = PrivateAttr(default=None)
    _progress: Progress | None = PrivateAttr(default=None)
    _work: WorkFolder | None = PrivateAttr(default=None)
    _held_out: list[Batch] = PrivateAttr(default_factory=list)
    _facts: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def dense(self) -> list[str]:
        """`ignore`, without the output head where it is to be quantized."""
        return [entry for entry in self.ignore if self.lm_head == "off" or entry != "lm_head"]

    def attach(self, *, progress: Progress, work: WorkFolder, held_out: list[Batch], facts: dict[str, Any]) -> None:
        """Before `oneshot`: a display, a work folder, records to check the thresholds on, more entries for the report."""
        self._progress, self._work, self._held_out, self._facts = progress, work, held_out, facts

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        check_entries(state.model, self.targets, self.ignore, self.strict)
        self._linears = find_linears(state.model, self.targets, self.dense)
        untie_head(state.model, self._linears)
        wrap_save_pretrained(state.model, self._packed)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        if state.data is None or state.data.calib is None:
            raise ValueError("TileQuantModifier needs calibration data: pass dataset= to oneshot")
        batches = list(state.data.calib)
        if not batches:
            raise ValueError("the calibration data holds no record")
        take_over(state.model, self._linears)
        progress = self._progress or Progress()
        result = Calibration(state.model, self._linears, batches, self, progress=progress, work=self._work).run()
        measured = judge = None
        if self._held_out:
            with progress.phase("check"):
                judge = Judge(state.model, self._held_out)
                measured = measured_bits(state.model, self._linears, result, progress.track(self._held_out, "check"))
        dense = [n for n, m in state.model.named_modules() if isinstance(m, nn.Linear) and n not in self._linears]
        self._schema = build_schema(result, self._linears, list(self.profiles), self.default_profile, dense)
        write_dense_back(self._linears, result)
        quality = None
        if judge is not None:
            with progress.phase("check", progress.seconds["check"]):
                quality = judge.rows(self._linears, result, list(self.profiles), self.default_profile)
            result.report["seconds"] = dict(progress.seconds)
        facts = self._facts | {"settings": self.model_dump(include=set(Settings.model_fields)), "quality": quality}
        self._result = replace(result, report=complete(result, self.profiles, measured, facts))

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        return True

    def _packed(self) -> tuple[Result, QuantizationSchema]:
        if self._result is None or self._schema is None:
            raise RuntimeError("the model was not calibrated by this TileQuantModifier: nothing to pack")
        return self._result, self._schema


def check_entries(model: nn.Module, targets: list[str], ignore: list[str], strict: bool) -> None:
    """Warn of entries that match nothing, or raise `ValueError` when `strict`: a typing error would change the checkpoint."""
    idle = [
        f"{field} entry {entry!r}"
        for field, entries in (("targets", targets), ("ignore", ignore))
        for entry in entries
        if not any(field == "ignore" or isinstance(m, nn.Linear) for _, m in match_named_modules(model, [entry]))
    ]
    if idle:
        message = f"{' and '.join(idle)} match nothing in this model"
        if strict:
            raise ValueError(message)
        logger.warning(message)


def take_over(model: nn.Module, linears: dict[str, nn.Linear]) -> None:
    """Weights that an earlier modifier has quantized (GPTQ) are our source like any others: its scales and scheme go.

    Left there, they would quantize our weights once more, in memory and when saved. Raises `ValueError` naming modules that
    another modifier has quantized and that are not ours: one checkpoint has one format.
    """
    quantized = [n for n, m in model.named_modules() if getattr(m, "quantization_scheme", None) is not None]
    if foreign := [n for n in quantized if n not in linears]:
        raise ValueError(
            f"another modifier of the recipe has quantized {foreign}, which TileQuantModifier leaves alone: one checkpoint has "
            "one format, so take these out of that modifier's targets, or make them ours"
        )
    for name in quantized:
        QuantizationMetadata.clear_quantization(linears[name])
        del linears[name].quantization_status


def find_linears(model: nn.Module, targets: list[str], ignore: list[str]) -> dict[str, nn.Linear]:
    """The linears to quantize, in model order.

    Raises `ValueError` when nothing matches, or naming every linear whose shape is not a multiple of 64 (with the ignore
    entries that would skip them) or whose weight is not finite.
    """
    linears = {n: m for n, m in match_named_modules(model, targets, ignore) if isinstance(m, nn.Linear)}
    if not linears:
        raise ValueError(f"no linear matches targets {targets} without ignore {ignore}")
    ragged = {n: list(m.weight.shape) for n, m in linears.items() if any(d % TILE for d in m.weight.shape)}
    if ragged:
        lines = "\n  ".join(f"{n}: {shape}" for n, shape in ragged.items())
        raise ValueError(
            f"{len(ragged)} linears have dimensions that are not multiples of {TILE}:\n  {lines}\n"
            f"leave them dense with ignore: {[*ignore, *sorted({_pattern(n) for n in ragged})]}"
        )
    broken = [n for n, m in linears.items() if not m.weight.is_meta and not bool(torch.isfinite(m.weight).all())]
    if broken:
        raise ValueError(f"weights are not finite in {broken}")
    return linears


def _pattern(name: str) -> str:
    """An ignore entry for a module and those of the same name in other layers. Without a backslash, to be copied as it is."""
    parent, _, last = name.rpartition(".")
    return f"re:.*[.]{last}$" if parent else last


if "TileQuantModifier" not in ModifierFactory._registered_registry:
    ModifierFactory.register("TileQuantModifier", TileQuantModifier)

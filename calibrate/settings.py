"""What a user may choose, validated. The fields are those of `TileQuantModifier`, and so of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_tilequant.calibrate.table3 import distribution
from vllm_tilequant.schema import PROFILE_FULL, PROFILE_OFF, Profiles

#: What a profile is made from: loaded bits, five shares, or a row of GRINQH's Table 3.
Target = float | list[float] | str
DEFAULT_PROFILES: dict[str, Target] = {"2.5": 2.5, "3.0": 3.0, "3.5": 3.5, "4.0": 4.0, "5.0": 5.0}


class Settings(BaseModel):
    """Choices of one calibration; every default is the measured best on the sample model.

    w4_fraction: share of all tiles that get 4 bits instead of `max_bits`; 0.6 where no budget is given
    stored_bits: the budget said the other way: everything stored per weight (codes, scales, maps, transforms, thresholds) stays
        within it. Give one of the two
    max_bits: bits of the other tiles, 8, 6 or 4 (4: every tile is narrow, and no budget is to be given)
    output_transform: `hadamard` (one randomised 64-point Hadamard on the outputs of every tile), `best` (per output tile the
        one of `output_seeds` with the least activation-weighted 4-bit error) or `none`
    output_seed: seed of that Hadamard, or the first of the seeds to choose from
    output_seeds: how many there are to choose from
    scales: `activation` (squared error weighted with E[x^2]), `mse` or `absmax`
    nested_scales: weigh the error of a wide tile's scale with that of the same codes read at 4 bits (0.9 and 0.1), as most of
        its channels are in decode steps; not with `absmax`
    codes: `gptq` (error feedback under the finished map) or `rtn` (round to nearest)
    propagation: what GPTQ takes for a linear's inputs: those behind the layers quantized before it, at stored precision
        (`static`) or graded at `propagation_bits` (`graded`: better at few loaded bits, worse at stored precision), so that its
        codes make up for what these layers get wrong; or the source model's (`off`)
    propagation_strength: how much of the earlier layers' error the codes are asked to make up for, 0 to 1. All of it would fit
        the calibration text; the more text, the more
    propagation_bits: loaded bits of `propagation: graded`
    input_diagonal: `folded` scales input channels by powers of two, by the size of their weights, and folds the inverse into
        the norm or linear before: the model computes the same, levels see |x| times the weight. Such a checkpoint takes no LoRA
        adapter of the original model. `off` where nothing is gained, as on the sample model
    input_rotation: rotate every 64 inputs before levels and quantization: `off`, `on`, or `auto`: where it lowers the expected
        error of a group at `default_profile`. It flattens activations, which helps stored precision and hurts grading
    input_seed: seed of that rotation
    scores: `prefill` (loss gradients of causal passes), `decode` (of decode steps, graded at a provisional 3 loaded bits),
        `joint` (a tile's greater share of the two), `activation` (squared error weighted with E[x^2]) or `random` (controls)
    map_unit: what gets its width together: a `tile`, or for comparisons a `row` of tiles (one output tile of a linear), a
        `column` (one input tile) or a whole `module`, by the mean score; the budget may end inside one
    lm_head: quantize the output head as well: `wide` gives all its tiles `max_bits` (beside the budget of the others), and
        unties it from the embeddings, which stay as they are; `off` leaves it dense
    score_samples: records used for the gradients, the first ones of the calibration set
    score_steps: decode steps of each record that are scored, evenly spaced over its last 32 tokens
    level_errors: what the error of a level is measured against when thresholds are set: the `source` weight or the `stored` one
    thresholds: `optimal` (least sensitivity-weighted error at the wanted loaded bits, one price of a bit for the whole model),
        `optimal_per_layer` (one price per group of linears with one input), `search` (GRINQH's: percentile thresholds for
        `search_candidates` random distributions, the one with the lowest calibration perplexity), `percentile` or `table3`
    search_candidates: distributions that `search` tries for each profile, on the first `score_samples` records
    profiles: name -> wanted average of loaded bits (with both kinds of `optimal`, and `search`), name -> five shares of
        channels at 0, 2, 4, 6 and 8 bits (with `percentile`), or name -> a row of GRINQH's Table 3 (with `table3`): "8-17" is
        row 17 of the columns for 8 bits. By default 2.5, 3.0, 3.5, 4.0 and 5.0 as far as the budget has so many bits
    prefill_smoothing: `search` (which input channels long prompts scale down before INT8, for each shared input that is not
        rotated, by the error of its outputs) or `none`
    default_profile: what a server takes when nothing else is said
    damping: share of the Hessian's mean diagonal that GPTQ adds to it
    seed: of everything random
    """

    model_config = ConfigDict(extra="forbid")

    w4_fraction: float | None = Field(None, ge=0, le=1)
    stored_bits: float | None = Field(None, gt=0)
    max_bits: Literal[4, 6, 8] = 8
    output_transform: Literal["hadamard", "best", "none"] = "hadamard"
    output_seed: int = 1
    output_seeds: int = Field(8, ge=1, le=256)
    scales: Literal["activation", "mse", "absmax"] = "activation"
    nested_scales: bool = True
    codes: Literal["gptq", "rtn"] = "gptq"
    propagation: Literal["static", "graded", "off"] = "static"
    propagation_strength: float = Field(0.5, ge=0, le=1)
    propagation_bits: float = Field(3.0, gt=0)
    input_diagonal: Literal["off", "folded"] = "off"
    input_rotation: Literal["off", "on", "auto"] = "off"
    input_seed: int = Field(101, ge=0)
    scores: Literal["joint", "prefill", "decode", "activation", "random"] = "prefill"
    lm_head: Literal["off", "wide"] = "off"
    map_unit: Literal["tile", "row", "column", "module"] = "tile"
    score_samples: int = Field(8, gt=0)
    score_steps: int = Field(4, gt=0, le=32)
    level_errors: Literal["source", "stored"] = "source"
    thresholds: Literal["optimal", "optimal_per_layer", "search", "percentile", "table3"] = "optimal"
    search_candidates: int = Field(15, gt=0)
    profiles: dict[str, Target] = Field(default_factory=lambda: dict(DEFAULT_PROFILES))
    prefill_smoothing: Literal["search", "none"] = "search"
    default_profile: str = "3.0"
    damping: float = Field(0.01, gt=0)
    seed: int = 0

    @property
    def smooths(self) -> bool:
        """Whether modules may store a smoothing."""
        return self.prefill_smoothing == "search" and self.input_rotation != "on"

    @property
    def w4_share(self) -> float:
        """Share of narrow tiles where `stored_bits` does not decide."""
        if self.max_bits == 4:
            return 1.0
        return 0.6 if self.w4_fraction is None else self.w4_fraction

    @field_validator("profiles")
    @classmethod
    def _named(cls, profiles: Mapping[str, Target]) -> Mapping[str, Target]:
        if not profiles or {PROFILE_FULL, PROFILE_OFF} & set(profiles):
            raise ValueError("give at least one profile, none of them called 'full' or 'off'")
        return profiles

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.w4_fraction is not None and self.stored_bits is not None:
            raise ValueError("w4_fraction and stored_bits are two ways to say one budget: give one of them")
        if self.max_bits == 4 and self.w4_fraction not in (None, 1.0):
            raise ValueError(f"max_bits 4 makes every tile 4-bit: leave out w4_fraction {self.w4_fraction}")
        if self.default_profile not in (*self.profiles, PROFILE_FULL, PROFILE_OFF):
            raise ValueError(f"default_profile {self.default_profile!r} is not one of {[*self.profiles, 'full', 'off']}")
        Profiles(names=list(self.profiles), default=self.default_profile)  # refuses what the format would, before work
        if "profiles" not in self.model_fields_set:
            self.__dict__["profiles"] = {n: t for n, t in self.profiles.items() if self._within_budget(t)}
        for name, target in self.profiles.items():
            if fault := self._fault(target):
                raise ValueError(f"profile {name!r}: thresholds {self.thresholds!r} want {fault}, got {target}")
        return self

    def _within_budget(self, target: Target) -> bool:
        """Whether the stored codes have so many bits, with some to spare. Of the default profiles, the others are left out."""
        mean = self.stored_bits or 4 * self.w4_share + self.max_bits * (1 - self.w4_share)
        return not isinstance(target, float) or target <= mean - 0.2

    def _fault(self, target: Target) -> str | None:
        """What a profile should have been, None where it is that."""
        if self.thresholds == "percentile":
            good = isinstance(target, list) and len(target) == 5 and min(target) >= 0 and abs(sum(target) - 1) <= 1e-6
            return None if good else "five shares >= 0 that sum to 1"
        if self.thresholds == "table3":
            if not isinstance(target, str):
                return "the name of a distribution such as '8-17'"
            distribution(target)  # says what is wrong with a name
            return None
        good = isinstance(target, float | int) and 0 < target <= self.max_bits
        return None if good else f"an average of loaded bits in (0, {self.max_bits}]"

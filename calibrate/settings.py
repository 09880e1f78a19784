"""What a user may choose, validated. The fields are those of `TileQuantModifier`, and so of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_tilequant.schema import PROFILE_FULL, PROFILE_OFF

DEFAULT_PROFILES: dict[str, float | list[float]] = {"2.5": 2.5, "3.0": 3.0, "3.5": 3.5, "4.0": 4.0, "5.0": 5.0}


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
    codes: `gptq` (error feedback under the finished map) or `rtn` (round to nearest)
    scores: `prefill` (loss gradients of causal passes), `decode` (of decode steps, graded at a provisional 3 loaded bits),
        `joint` (a tile's greater share of the two), `activation` (squared error weighted with E[x^2]) or `random` (controls)
    score_samples: records used for the gradients, the first ones of the calibration set
    score_steps: decode steps of each record that are scored, evenly spaced over its last 32 tokens
    level_errors: what the error of a level is measured against when thresholds are set: the `source` weight or the `stored` one
    profiles: name -> wanted average of loaded bits (with `thresholds: optimal`), or name -> five shares of channels at 0, 2, 4,
        6 and 8 bits (with `percentile`)
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
    codes: Literal["gptq", "rtn"] = "gptq"
    scores: Literal["joint", "prefill", "decode", "activation", "random"] = "prefill"
    score_samples: int = Field(8, gt=0)
    score_steps: int = Field(4, gt=0, le=32)
    level_errors: Literal["source", "stored"] = "source"
    thresholds: Literal["optimal", "percentile"] = "optimal"
    profiles: dict[str, float | list[float]] = Field(default_factory=lambda: dict(DEFAULT_PROFILES))
    default_profile: str = "3.0"
    damping: float = Field(0.01, gt=0)
    seed: int = 0

    @property
    def w4_share(self) -> float:
        """Share of narrow tiles where `stored_bits` does not decide."""
        if self.max_bits == 4:
            return 1.0
        return 0.6 if self.w4_fraction is None else self.w4_fraction

    @field_validator("profiles")
    @classmethod
    def _named(cls, profiles: Mapping[str, float | list[float]]) -> Mapping[str, float | list[float]]:
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
        for name, target in self.profiles.items():
            if self.thresholds == "optimal":
                if not isinstance(target, float | int) or not 0 < target <= 8:
                    raise ValueError(
                        f"profile {name!r}: thresholds 'optimal' want an average of loaded bits in (0, 8], got {target}"
                    )
            elif not isinstance(target, list) or len(target) != 5 or min(target) < 0 or abs(sum(target) - 1) > 1e-6:
                raise ValueError(f"profile {name!r}: thresholds 'percentile' want five shares >= 0 that sum to 1, got {target}")
        return self

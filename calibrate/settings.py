"""What a user may choose, validated. The fields are those of `TileQuantModifier`, and so of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_tilequant.schema import PROFILE_FULL, PROFILE_OFF

DEFAULT_PROFILES: dict[str, float | list[float]] = {"2.5": 2.5, "3.0": 3.0, "3.5": 3.5, "4.0": 4.0, "5.0": 5.0}


class Settings(BaseModel):
    """Choices of one calibration; every default is the measured best on the sample model.

    w4_fraction: share of all tiles that get 4 bits instead of 8
    output_transform: `hadamard` (one randomised 64-point Hadamard on the outputs of every tile) or `none`
    output_seed: seed of that Hadamard
    scales: `activation` (squared error weighted with E[x^2]), `mse` or `absmax`
    codes: `gptq` (error feedback under the finished map) or `rtn` (round to nearest)
    scores: `prefill` (loss gradients of causal passes) or `random` (a control)
    score_samples: records used for the gradients, the first ones of the calibration set
    profiles: name -> wanted average of loaded bits (with `thresholds: optimal`), or name -> five shares of channels at 0, 2, 4,
        6 and 8 bits (with `percentile`)
    default_profile: what a server takes when nothing else is said
    damping: share of the Hessian's mean diagonal that GPTQ adds to it
    seed: of everything random
    """

    model_config = ConfigDict(extra="forbid")

    w4_fraction: float = Field(0.6, ge=0, le=1)
    output_transform: Literal["hadamard", "none"] = "hadamard"
    output_seed: int = 1
    scales: Literal["activation", "mse", "absmax"] = "activation"
    codes: Literal["gptq", "rtn"] = "gptq"
    scores: Literal["prefill", "random"] = "prefill"
    score_samples: int = Field(8, gt=0)
    thresholds: Literal["optimal", "percentile"] = "optimal"
    profiles: dict[str, float | list[float]] = Field(default_factory=lambda: dict(DEFAULT_PROFILES))
    default_profile: str = "3.0"
    damping: float = Field(0.01, gt=0)
    seed: int = 0

    @field_validator("profiles")
    @classmethod
    def _named(cls, profiles: Mapping[str, float | list[float]]) -> Mapping[str, float | list[float]]:
        if not profiles or {PROFILE_FULL, PROFILE_OFF} & set(profiles):
            raise ValueError("give at least one profile, none of them called 'full' or 'off'")
        return profiles

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
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

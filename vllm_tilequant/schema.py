"""The checkpoint format: names, version, fields and their validation. `docs/format.md` is the prose of this file.

Imports neither torch nor vLLM, so that every part of the project (calibration, kernels, plugin, command line) can meet here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

QUANT_METHOD = "tilequant"
FORMAT_VERSION = 1
#: Some module's inputs are rotated before levels and quantization: `Module.input_transform`.
INPUT_TRANSFORM = "input_transform"
#: Some inputs were scaled, and the inverse folded into what produces them: no adapter of the source model fits.
FOLDED_INPUT_DIAGONAL = "folded_input_diagonal"
#: Features of format version 1 that a reader must know by name. A checkpoint that lists another one is refused.
KNOWN_FEATURES: frozenset[str] = frozenset({INPUT_TRANSFORM, FOLDED_INPUT_DIAGONAL})

TILE = 64
#: Bits a tile may be stored with, and the levels at which a decode step may read an input channel.
TILE_BITS = (2, 4, 6, 8)
LEVELS = (0, 2, 4, 6, 8)
#: One int32 plane word holds two bits of 16 consecutive outputs of one input channel.
OUTPUTS_PER_WORD = 16
#: One row of the extension tensor: one plane of one tile, 64 channels x 4 words.
WORDS_PER_TILE_PLANE = TILE * TILE // OUTPUTS_PER_WORD

PLANE0 = "weight_plane0"
PLANE1 = "weight_plane1"
EXTENSION = "weight_extension"
MAP = "weight_tile_bits"
SCALE = "weight_tile_scale"
OUTPUT_TRANSFORM = "output_transform"
THRESHOLDS = "thresholds"
SMOOTHING = "smoothing"
BIAS = "bias"

#: Every tensor a linear must store in this format (a bias keeps its usual name; `SMOOTHING` may be there).
TENSORS = (PLANE0, PLANE1, EXTENSION, MAP, SCALE, OUTPUT_TRANSFORM, THRESHOLDS)

#: Names a user may give instead of a stored profile: every stored plane through the graded path; no grading at all.
PROFILE_FULL = "full"
PROFILE_OFF = "off"
#: A threshold no finite float32 activation exceeds: the level above it is never taken.
NEVER = 3.4028234663852886e38
#: A larger tile scale is no weight's: it would leave float32 on the way through the rotation and the products.
MAX_SCALE = 2.0**64
#: A smoothing is stored as a byte c and means 2^((c - 128) / 8).
SMOOTHING_ONE, SMOOTHING_STEPS = 128, 8
ACTIVATIONS = ("none", "group64")
#: How activations of the long prefill become INT8: per row after the smoothing, for speed, or per row and 64 inputs.
PREFILL_ACTIVATIONS = ("token_smooth", "group64")


#: Larger numbers are refused before anything is computed from them.
MAX_FEATURES = 1 << 22
MAX_PROFILES = 64
_NAME = re.compile(r"[\w.:/-]{1,512}", re.ASCII)
_PROFILE_NAME = re.compile(r"[\w.+-]{1,64}", re.ASCII)
#: A quantified group can make a pattern take exponential time; so can many branches, and many repeats a high power.
_QUANTIFIED_GROUP = re.compile(r"\)[*+{]")
_MAX_PATTERN_STEPS = 1_000_000
_SHOWN = 12


class FormatError(ValueError):
    """A checkpoint or its `quantization_config` does not say what the format demands."""


#: Unknown fields are tolerated, other JSON types are not: "1", 1.0 and true are no integers.
_STRICT = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of a module must look like; `dtype` is the safetensors name ("I32", "U8", "F32", ...)."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


class Transform(BaseModel):
    """One entry of the checkpoint's transform list, addressed by the bytes of `output_transform` and by `input_transform`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    kind: str
    generator: int = 1
    seed: int = Field(default=0, ge=0, lt=1 << 64)

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind not in ("identity", "randomized_hadamard"):
            raise ValueError(f"unknown transform kind {kind!r}; this version reads 'identity', 'randomized_hadamard'")
        return kind

    @model_validator(mode="after")
    def _known_generator(self) -> Transform:
        if self.kind == "randomized_hadamard" and self.generator != 1:
            raise ValueError(f"unknown generator version {self.generator} of a randomized_hadamard; this version reads 1")
        return self


class Module(BaseModel):
    """One quantized linear under its name in the source checkpoint (never fused)."""

    model_config = _STRICT

    out_features: int = Field(gt=0, le=MAX_FEATURES)
    in_features: int = Field(gt=0, le=MAX_FEATURES)
    tile_counts: dict[int, int]
    bias: bool = False
    input_group: str = Field(max_length=512)
    #: Index of the transform of every 64 inputs; None where they are taken as they come.
    input_transform: int | None = Field(default=None, ge=0, lt=256)
    #: Whether a tensor `smoothing` says what prompts divide their inputs by before INT8 with one scale per row.
    smoothing: bool = False

    @field_validator("tile_counts", mode="before")
    @classmethod
    def _json_keys(cls, counts: Any) -> Any:
        """JSON has only strings for keys."""
        if not isinstance(counts, dict):
            return counts
        return {int(k) if isinstance(k, str) and re.fullmatch("[0-9]{1,3}", k, re.ASCII) else k: v for k, v in counts.items()}

    @model_validator(mode="after")
    def _consistent(self) -> Module:
        if self.out_features % TILE or self.in_features % TILE:
            raise ValueError(f"shape [{self.out_features}, {self.in_features}] is not a multiple of {TILE} on both axes")
        for bits, count in self.tile_counts.items():
            if bits not in TILE_BITS or count < 0:
                raise ValueError(f"tile_counts holds {bits}: {count}; bits must be one of {TILE_BITS}, counts >= 0")
        if sum(self.tile_counts.values()) != self.n_tiles * self.k_tiles:
            raise ValueError(
                f"tile_counts sum to {sum(self.tile_counts.values())}, "
                f"the shape has {self.n_tiles} x {self.k_tiles} = {self.n_tiles * self.k_tiles} tiles"
            )
        if self.smoothing and self.input_transform is not None:
            raise ValueError("smoothing beside input_transform: rotated inputs take none")
        return self

    @property
    def n_tiles(self) -> int:
        return self.out_features // TILE

    @property
    def k_tiles(self) -> int:
        return self.in_features // TILE

    @property
    def extension_rows(self) -> int:
        return sum(extension_planes(bits) * count for bits, count in self.tile_counts.items())


class Profiles(BaseModel):
    """Named sets of thresholds, in the row order of every module's `thresholds` tensor."""

    model_config = _STRICT

    names: list[str]
    default: str

    @model_validator(mode="after")
    def _consistent(self) -> Profiles:
        if len(self.names) > MAX_PROFILES or not all(_PROFILE_NAME.fullmatch(name) for name in self.names):
            raise ValueError(f"wanted at most {MAX_PROFILES} profile names of 1 to 64 letters, digits and . + - _")
        reserved = {PROFILE_FULL, PROFILE_OFF} & set(self.names)
        if not self.names or len(set(self.names)) != len(self.names) or reserved:
            raise ValueError(f"profile names must be distinct, at least one, none of 'full' and 'off'; got {self.names}")
        if self.default not in self.choices:
            raise ValueError(f"default profile {self.default!r} is not one of {self.choices}")
        return self

    @property
    def choices(self) -> list[str]:
        return [*self.names, PROFILE_FULL, PROFILE_OFF]


class QuantizationSchema(BaseModel):
    """`quantization_config` of `config.json`. Unknown optional fields are tolerated, unknown required features are not."""

    model_config = _STRICT

    quant_method: str
    format_version: int
    required_features: list[str] = Field(default_factory=list)
    tile: int
    max_bits: int
    transforms: list[Transform] = Field(min_length=1, max_length=256)
    profiles: Profiles
    threshold_measure: str = "abs_input"
    ignore: list[str] = Field(default_factory=list)
    folded_input_diagonal: list[str] = Field(default_factory=list)
    modules: dict[str, Module] = Field(min_length=1)
    producer: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, data: Any) -> Any:
        """What makes the rest unreadable comes first, so that its message is not lost among field errors."""
        if not isinstance(data, dict):
            raise ValueError(f"quantization_config is {type(data).__name__}, wanted an object")
        if data.get("quant_method") != QUANT_METHOD:
            raise ValueError(f"quant_method is {data.get('quant_method')!r}, wanted {QUANT_METHOD!r}")
        version = data.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {version!r}; this vllm-tilequant reads {FORMAT_VERSION}"
                + (f": {_upgrade(data)}" if isinstance(version, int) and version > FORMAT_VERSION else "")
            )
        features = data.get("required_features", [])
        if not isinstance(features, list) or not all(isinstance(f, str) for f in features):
            raise ValueError(f"required_features is {features!r}, wanted a list of names")
        if unknown := sorted(set(features) - KNOWN_FEATURES):
            raise ValueError(f"the checkpoint needs features {unknown} unknown to this vllm-tilequant: {_upgrade(data)}")
        return data

    @field_validator("ignore")
    @classmethod
    def _harmless(cls, ignore: list[str]) -> list[str]:
        """A loader runs these patterns: they must compile, and may not take longer than the names they meet are worth."""
        for entry in ignore:
            if not entry.startswith("re:"):
                continue
            try:
                re.compile(entry.removeprefix("re:"))
            except (re.error, RecursionError, OverflowError) as e:
                raise ValueError(f"{entry!r} is no regular expression: {e}") from None
            if _QUANTIFIED_GROUP.search(entry) or _steps(entry) > _MAX_PATTERN_STEPS:
                raise ValueError(f"{entry!r} repeats a group, or repeats and branches too often: name modules instead")
        return ignore

    @field_validator("modules")
    @classmethod
    def _sane_names(cls, modules: dict[str, Module]) -> dict[str, Module]:
        if bad := [name for name in modules if not _NAME.fullmatch(name)]:
            raise ValueError(f"wanted names of letters, digits and . : / - _, got {bad[:3]!r}")
        if bad := [m.input_group for m in modules.values() if not m.input_group.isprintable()]:
            raise ValueError(f"wanted printable names of input groups, got {bad[:3]!r}")
        return modules

    @model_validator(mode="after")
    def _consistent(self) -> QuantizationSchema:
        if self.tile != TILE:
            raise ValueError(f"tile is {self.tile}, wanted {TILE}")
        if self.max_bits not in (4, 6, 8):
            raise ValueError(f"max_bits is {self.max_bits}, wanted 4, 6 or 8")
        if self.threshold_measure != "abs_input":
            raise ValueError(f"threshold_measure is {self.threshold_measure!r}, wanted 'abs_input'")
        over = [name for name, m in self.modules.items() if max(m.tile_counts) > self.max_bits]
        if over:
            raise ValueError(f"tiles wider than max_bits {self.max_bits} in {over[:_SHOWN]}")
        rotated = [name for name, m in self.modules.items() if m.input_transform is not None]
        if rotated and INPUT_TRANSFORM not in self.required_features:
            raise ValueError(f"required_features lacks {INPUT_TRANSFORM!r}, which {rotated[:_SHOWN]} need")
        if far := [name for name in rotated if self.modules[name].input_transform >= len(self.transforms)]:  # type: ignore[operator]
            raise ValueError(f"input_transform beyond the {len(self.transforms)} transforms in {far[:_SHOWN]}")
        if self.folded_input_diagonal and FOLDED_INPUT_DIAGONAL not in self.required_features:
            raise ValueError(f"required_features lacks {FOLDED_INPUT_DIAGONAL!r}, which folded_input_diagonal needs")
        if strange := sorted(set(self.folded_input_diagonal) - set(self.groups)):
            raise ValueError(f"folded_input_diagonal names what is no input group: {strange[:_SHOWN]!r}")
        if mixed := [g for g, names in self.groups.items() if len({self.modules[n].input_transform for n in names}) > 1]:
            raise ValueError(f"modules with one input differ in input_transform: input groups {mixed[:_SHOWN]}")
        if mixed := [g for g, names in self.groups.items() if len({self.modules[n].smoothing for n in names}) > 1]:
            raise ValueError(f"modules with one input differ in smoothing: input groups {mixed[:_SHOWN]}")
        return self

    @classmethod
    def parse(cls, data: Any) -> QuantizationSchema:
        """Validate a `quantization_config`; raises `FormatError` with every fault on its own line."""
        try:
            return cls.model_validate(data)
        except ValidationError as e:
            lines = [f"{_place(err['loc'])}: {err['msg'].removeprefix('Value error, ')}" for err in e.errors()]
            shown = [line if len(line) <= 400 else f"{line[:400]}..." for line in lines[:_SHOWN]]
            more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise FormatError("invalid tilequant quantization_config:\n  " + "\n  ".join(shown + more)) from None

    def dump(self) -> dict[str, Any]:
        """The JSON object that `parse` reads back, with `tile_counts` keyed by strings as JSON has them."""
        data = self.model_dump(mode="json")
        if not self.folded_input_diagonal:
            del data["folded_input_diagonal"]
        for module in data["modules"].values():
            if module["input_transform"] is None:
                del module["input_transform"]
            if not module["smoothing"]:
                del module["smoothing"]
        return data

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Shared-input groups: group name -> module names, in checkpoint order."""
        out: dict[str, list[str]] = {}
        for name, module in self.modules.items():
            out.setdefault(module.input_group, []).append(name)
        return out

    def input_transform(self, name: str) -> Transform | None:
        """What rotates the inputs of module `name`, None where nothing does."""
        index = self.modules[name].input_transform
        return None if index is None else self.transforms[index]

    def profile_row(self, profile: str) -> int:
        """Row of `thresholds` for a stored profile; raises `FormatError` listing the legal values."""
        if profile not in self.profiles.names:
            raise FormatError(f"unknown profile {profile!r}; this checkpoint has {self.profiles.choices}")
        return self.profiles.names.index(profile)

    def tensor_specs(self, name: str) -> dict[str, TensorSpec]:
        """Tensor suffix -> dtype and shape promised for module `name`."""
        m = self.modules[name]
        specs = {
            PLANE0: TensorSpec(("I32",), (m.in_features, m.out_features // OUTPUTS_PER_WORD)),
            PLANE1: TensorSpec(("I32",), (m.in_features, m.out_features // OUTPUTS_PER_WORD)),
            EXTENSION: TensorSpec(("I32",), (m.extension_rows, WORDS_PER_TILE_PLANE)),
            MAP: TensorSpec(("U8",), (m.n_tiles, m.k_tiles)),
            SCALE: TensorSpec(("F32",), (m.n_tiles, m.k_tiles)),
            OUTPUT_TRANSFORM: TensorSpec(("U8",), (m.n_tiles, 1)),
            THRESHOLDS: TensorSpec(("F32",), (len(self.profiles.names), len(LEVELS) - 1)),
        }
        if m.smoothing:
            specs[SMOOTHING] = TensorSpec(("U8",), (m.in_features,))
        if m.bias:
            specs[BIAS] = TensorSpec(("BF16", "F16", "F32"), (m.out_features,))
        return specs


def _upgrade(data: dict[str, Any]) -> str:
    """What to do about a newer format: the version that wrote a checkpoint reads it."""
    producer = data.get("producer")
    version = producer.get("vllm-tilequant") if isinstance(producer, dict) else None
    if isinstance(version, str) and re.fullmatch(r"[\w.+!-]{1,40}", version, re.ASCII):
        return f"vllm-tilequant {version} wrote it and reads it; upgrade to that version or a newer one"
    return "upgrade vllm-tilequant"


def _steps(pattern: str) -> int:
    """Rough bound of what a backtracking matcher takes on a name of 60 characters: 60 for a repeat, 2 for a branch."""
    repeats, branches = len(re.findall(r"[*+{]", pattern)), len(re.findall(r"(?<!\()\?|\|", pattern))
    return 60 ** min(repeats, 10) * 2 ** min(branches, 40)


def _place(location: tuple[int | str, ...]) -> str:
    """Where in the config a fault lies, in characters that every terminal takes."""
    return ascii(".".join(map(str, location)))[1:-1] or "quantization_config"


def ignored_by(ignore: list[str], name: str) -> str | None:
    """The entry of `ignore` that names the module, literally or by a pattern `re:...` that matches from its start."""
    for entry in ignore:
        if re.match(entry.removeprefix("re:"), name) if entry.startswith("re:") else entry == name:
            return entry
    return None


def extension_planes(bits: int) -> int:
    """Planes a tile of `bits` keeps beyond the two dense ones."""
    return max(bits // 2 - 2, 0)


_MASK64 = (1 << 64) - 1


def _splitmix64(state: int) -> tuple[int, int]:
    """One step of the SplitMix64 generator (Steele, Lea and Flood 2014): (next state, 64 random bits)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state, z ^ (z >> 31)


def rotation_v1(seed: int) -> tuple[list[int], list[int], list[int]]:
    """Generator version 1 of the randomised Hadamard R = diag(left) H[permutation, :] diag(right).

    Returns (permutation of 0..63, 64 left signs, 64 right signs). Written out here instead of using a library's generator,
    whose stream may change between releases: a checkpoint stores only the seed. Test vectors are in the tests.
    """
    state = seed & _MASK64
    permutation = list(range(TILE))
    for i in range(TILE - 1, 0, -1):  # Fisher-Yates; the modulo bias of 64 bits over 64 values is far below one in 2^57
        state, r = _splitmix64(state)
        j = r % (i + 1)
        permutation[i], permutation[j] = permutation[j], permutation[i]
    state, left = _splitmix64(state)
    state, right = _splitmix64(state)
    return (
        permutation,
        [1 - 2 * ((left >> i) & 1) for i in range(TILE)],
        [1 - 2 * ((right >> i) & 1) for i in range(TILE)],
    )

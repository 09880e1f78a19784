"""A checkpoint in transformers: the independent reference for quality numbers and for comparing with a server.

`TileLinear` multiplies with dense float32 weights, one per level, in the basis of the source model. That is on purpose not the
arithmetic of the serving path (`kernels.portable.graded_linear`: integer sums per tile, rotated basis), so that an agreement of
the two says something. It also works on thousands of rows at once, which the serving path does not need.

Importing this module makes `AutoModelForCausalLM.from_pretrained` load a tilequant folder as a dense model, where transformers
alone would warn, skip the quantization and return random weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from vllm_tilequant.checkpoint.files import CheckpointError, printable
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.hf_quantizer import check_shapes, refuse
from vllm_tilequant.hf_quantizer import replace as replace_module
from vllm_tilequant.kernels import layout, portable
from vllm_tilequant.kernels.dispatch import GRADED_ROWS, takes_graded
from vllm_tilequant.kernels.reference import activation_token_ref, requantize_block_ref, requantize_ref
from vllm_tilequant.schema import (
    ACTIVATIONS,
    LEVELS,
    PREFILL_ACTIVATIONS,
    PROFILE_FULL,
    PROFILE_OFF,
    TILE,
    QuantizationSchema,
)

Graded = Literal["rows", "always", "never"]
#: Thresholds of profile `full`: every |x| is greater, so that every channel is read at all its stored bits.
FULL_THRESHOLDS = (-1.0, -1.0, -1.0, -1.0)


#: `token_block` is what `token_smooth` stands for up to some rows: one scale per rotated output instead of one per output.
STATIC_ACTIVATIONS = tuple(dict.fromkeys((*ACTIVATIONS, *PREFILL_ACTIVATIONS, "token_block")))


@dataclass(frozen=True)
class Mode:
    """How every `TileLinear` of a model computes.

    profile: a stored profile, `full` or `off` (no grading, whatever `graded` says)
    activation: `none`, `group64` (INT8 per row and 64 inputs), or for products at stored precision the arithmetic of a GPU with
        INT8 per row after the smoothing: of prompts `token_smooth`, weights requantized per output, of batches `token_block`,
        weights requantized per rotated output
    graded: `never`; `always`, at every position; `rows`, as a server does: graded up to `graded_rows` rows of one call
    """

    profile: str
    activation: str
    graded: Graded
    graded_rows: int = GRADED_ROWS

    def check(self, schema: QuantizationSchema) -> Mode:
        """Return self; raises `FormatError` on an unknown profile, `ValueError` on an unknown activation or `graded`."""
        if self.profile not in (PROFILE_FULL, PROFILE_OFF):
            schema.profile_row(self.profile)
        for name, value, choices in (
            ("activation", self.activation, STATIC_ACTIVATIONS if self.graded == "never" else ACTIVATIONS),
            ("graded", self.graded, ("rows", "always", "never")),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}, wanted one of {choices}")
        return self

    def takes_graded(self, rows: int) -> bool:
        if self.profile == PROFILE_OFF or self.graded == "never":
            return False
        return self.graded == "always" or takes_graded(rows, self.graded_rows)


@dataclass
class ReadCounts:
    """What the linears read since the last reset, over all modules, positions and calls."""

    loaded_bits: float = 0.0  #: code bits
    weights: float = 0.0  #: rows x N x K
    channels: tuple[float, ...] = (0.0,) * len(LEVELS)  #: weights read at each level, as `LEVELS`; stays 0 in static products

    def __add__(self, other: ReadCounts) -> ReadCounts:
        channels = tuple(a + b for a, b in zip(self.channels, other.channels, strict=True))
        return ReadCounts(self.loaded_bits + other.loaded_bits, self.weights + other.weights, channels)

    @property
    def bits_per_weight(self) -> float:
        return self.loaded_bits / self.weights if self.weights else float("nan")

    @property
    def level_shares(self) -> list[float] | None:
        """Share of channels at 0, 2, 4, 6, 8 bits, each channel weighted by its module's outputs; None without grading."""
        total = sum(self.channels)
        return [c / total for c in self.channels] if total else None


class Shared:
    """What all `TileLinear` modules of one model have in common; lies at `model.tilequant`."""

    def __init__(self, schema: QuantizationSchema, mode: Mode, cache_levels: bool):
        self.schema = schema
        self.mode = mode.check(schema)
        self.cache_levels = cache_levels
        self.layers: dict[str, TileLinear] = {}


def fast_levels(x: Tensor, thresholds: Tensor) -> Tensor:
    """`reference.levels_ref` without its fifth dimension: [M, K] float, [4] float32 ascending -> [M, K] uint8."""
    return (2 * torch.bucketize(x.float().abs(), thresholds, out_int32=True)).to(torch.uint8)


class TileLinear(nn.Module):
    """One quantized linear with dense arithmetic. forward: [..., K] float -> [..., N] in the input's dtype.

    Nothing in it is a parameter or in the state dict: it computes, it is not trained or saved.
    """

    def __init__(
        self,
        weight: layout.PackedWeight,
        transforms: Tensor,
        thresholds: Tensor,
        bias: Tensor | None,
        *,
        shared: Shared,
        dtype: torch.dtype,
        smoothing: Tensor | None = None,
    ):
        """transforms: [n, 64, 64] float64; thresholds: [P, 4] float32 as the schema's profiles; bias: [N] float or None;
        smoothing: [K] float32 or None."""
        super().__init__()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.shared = shared
        self.transforms = transforms
        self.rotation = weight.input_rotation
        self.packed = weight = replace(weight, input_rotation=None)  # rows are rotated before every product
        self.weight = portable.dequantize(weight, transforms, dtype)  # [N, K] dtype, at stored precision
        device = self.weight.device
        self.bias = None if bias is None else bias.to(device, dtype)
        rows = [*thresholds.tolist(), FULL_THRESHOLDS]
        names = [*shared.schema.profiles.names, PROFILE_FULL]
        self.thresholds = {  # [4] float32 each
            n: torch.tensor(r, dtype=torch.float32, device=device) for n, r in zip(names, rows, strict=True)
        }
        self.cost = layout.level_cost(weight.tile_bits)  # [5, K/64] float64
        self.stored_code_bits = layout.tile_code_bits(weight.tile_bits)
        self.smoothing = None if smoothing is None else smoothing.to(device)
        self._requantized: dict[str, Tensor] = {}  # [N, K] float32, codes times scales, per activation
        self._levels: dict[int, Tensor] = {}
        self._static_rows = 0
        self._graded_rows = 0
        self._counts = torch.zeros(len(LEVELS), self.in_features // TILE, dtype=torch.float64, device=device)

    def extra_repr(self) -> str:
        bits = self.packed.tile_bits.float().mean()
        return f"in_features={self.in_features}, out_features={self.out_features}, mean tile bits={bits:.2f}"

    def level_weight(self, level: int) -> Tensor:
        """[N, K] float32, every channel read at `level` > 0 bits: for the source's outputs and rotated inputs."""
        if level == LEVELS[-1] and self.weight.dtype == torch.float32:
            return self.weight
        cached = self._levels.get(level)
        if cached is None:
            cached = portable.dequantize(self.packed, self.transforms, torch.float32, level)
            if self.shared.cache_levels:
                self._levels[level] = cached
        return cached

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.rotation is not None:
            rows = layout.rotate_inputs(rows, self.rotation)
        mode = self.shared.mode
        if mode.takes_graded(rows.shape[0]):
            y = self._graded(rows, self.thresholds[mode.profile], mode.activation)
        else:
            self._static_rows += rows.shape[0]
            if mode.activation in ("token_smooth", "token_block"):
                y = self._requantized_linear(rows, mode.activation)
                return y.to(x.dtype).view(*x.shape[:-1], self.out_features)
            if mode.activation == "group64":
                rows = portable.fake_quantize(rows)
            y = F.linear(rows.to(x.dtype), self.weight, self.bias)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _requantized_linear(self, x: Tensor, activation: str) -> Tensor:
        """`reference.prefill_int8_ref` or `prefill_block_ref` in float32: [M, K] -> [M, N]."""
        weight = self._requantized.get(activation)
        if weight is None:
            matrices = self.transforms[self.packed.output_transform.long()]
            if activation == "token_smooth":
                codes, unit = requantize_ref(self.packed, matrices, self.smoothing)
                weight = codes.float() * unit[:, None]
            else:
                codes, unit = requantize_block_ref(self.packed, self.smoothing)
                rotated = (codes.float() * unit[:, None]).view(-1, TILE, self.in_features)
                weight = (matrices.float() @ rotated).view(self.out_features, self.in_features)
            self._requantized[activation] = weight
        q, scale = activation_token_ref(x, self.smoothing)
        return F.linear(q.float() * scale[:, None], weight, None if self.bias is None else self.bias.float())

    def _graded(self, x: Tensor, thresholds: Tensor, activation: str) -> Tensor:
        """[M, K] -> [M, N]: one dense float32 product per level, with the channels of the other levels at zero."""
        levels = fast_levels(x, thresholds)
        a = portable.fake_quantize(x) if activation == "group64" else x.float()
        y = torch.zeros(x.shape[0], self.out_features, device=x.device)
        for i, level in enumerate(LEVELS):
            mask = levels == level
            count = mask.sum(0).view(-1, TILE).sum(1)  # [K/64]
            self._counts[i] += count
            if level and bool(count.any()):
                y += F.linear(a.where(mask, 0.0), self.level_weight(level))
        self._graded_rows += x.shape[0]
        if self.bias is not None:
            y += self.bias.float()
        return y.to(x.dtype)

    def take_counts(self) -> ReadCounts:
        """What was read since the last call, which also resets it."""
        n, k = self.out_features, self.in_features
        loaded = float((self.cost.to(self._counts.device) * self._counts).sum()) + self._static_rows * self.stored_code_bits
        channels = tuple((self._counts.sum(1) * n).tolist())
        counts = ReadCounts(loaded, float(self._static_rows + self._graded_rows) * n * k, channels)
        self._static_rows = self._graded_rows = 0
        self._counts.zero_()
        return counts


def set_mode(model: nn.Module, **changes: Any) -> None:
    """Change `profile`, `activation`, `graded` or `graded_rows` of a loaded model, from the next call on."""
    shared = _shared(model)
    shared.mode = replace(shared.mode, **changes).check(shared.schema)


def set_profile(model: nn.Module, profile: str) -> None:
    """Switch a loaded model to a stored profile, `full` or `off`; raises `FormatError` listing the legal values."""
    set_mode(model, profile=profile)


def take_counts(model: nn.Module) -> ReadCounts:
    """Sum of what all linears read since the last call, which also resets it."""
    return sum((layer.take_counts() for layer in _shared(model).layers.values()), ReadCounts())


def _shared(model: nn.Module) -> Shared:
    shared = getattr(model, "tilequant", None)
    if not isinstance(shared, Shared):
        raise TypeError(f"{type(model).__name__} was not loaded by vllm_tilequant.hf.load_reference")
    return shared


def load_reference(
    folder: str | Path,
    *,
    profile: str | None = None,
    activation: str = "group64",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    graded: Graded = "rows",
    graded_rows: int = GRADED_ROWS,
    cache_levels: bool | None = None,
) -> PreTrainedModel:
    """The checkpoint as a transformers model whose quantized linears are `TileLinear`.

    profile: None takes the checkpoint's default. cache_levels: keep the dense float32 weights of all levels (12 more bytes a
    weight, 16 where `dtype` is not float32) instead of building them in every call; None decides by the free memory.
    Raises `FormatError` where the checkpoint is not one or does not fit the model, `ValueError` where a mode is unknown.
    """
    checkpoint = Checkpoint.open(Path(folder))
    schema = checkpoint.schema
    mode = Mode(profile or schema.profiles.default, activation, graded, graded_rows).check(schema)
    device = torch.device(device)
    if cache_levels is None:
        weights = sum(m.out_features * m.in_features for m in schema.modules.values())
        cache_levels = weights * (12 if dtype == torch.float32 else 16) < _free_bytes(device) // 2
    model = _empty_model(checkpoint, dtype)
    shared = Shared(schema, mode, cache_levels)
    transforms = checkpoint.transforms.to(device)
    for name in schema.modules:
        m = checkpoint.module(name)
        weight = layout.to_device(m.weight, device)
        layer = TileLinear(weight, transforms, m.thresholds, m.bias, shared=shared, dtype=dtype, smoothing=m.smoothing)
        shared.layers[name] = layer
        replace_module(model, name, layer)
    _load_dense(model, checkpoint, ())
    model.tilequant = shared  # type: ignore[assignment]
    return _ready(model, device)


def load_dense(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> PreTrainedModel:
    """The checkpoint as a plain transformers model: every quantized linear dequantized at stored precision.

    Equals profile `off` with activation `none`. Raises as `load_reference` does.
    """
    checkpoint = Checkpoint.open(Path(folder))
    model = _empty_model(checkpoint, dtype)
    loaded = []
    for name in checkpoint.schema.modules:
        m, linear = checkpoint.module(name), cast(nn.Linear, model.get_submodule(name))
        with torch.no_grad():
            linear.weight.copy_(portable.dequantize(m.weight, checkpoint.transforms, dtype))
            loaded.append(f"{name}.weight")
            if m.bias is not None:
                linear.bias.copy_(m.bias)
                loaded.append(f"{name}.bias")
    _load_dense(model, checkpoint, loaded)
    return _ready(model, torch.device(device))


def _empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture of config.json in memory nobody has written to; each quantized module an `nn.Linear` of its shape.

    It is built without memory first: a size that the files do not back is refused before it is allocated.
    """
    with _words(checkpoint):
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"), no_init_weights():
            shapes = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    check_shapes(shapes, checkpoint)
    # untouched pages cost nothing; buffers such as rotary frequencies are computed as always
    with _words(checkpoint), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()  # part of the initialization that was left out
    return model


@contextmanager
def _words(checkpoint: Checkpoint) -> Iterator[None]:
    """A config that transformers cannot build fails in it in many ways, few of them readable: all become one sentence."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 - foreign code run on a stranger's numbers
        why = printable(f"{type(e).__name__}: {e}")
        raise CheckpointError(f"transformers cannot build the model that {checkpoint.folder} describes: {why}") from e


def _load_dense(model: PreTrainedModel, checkpoint: Checkpoint, already: Iterable[str]) -> None:
    """Copy every tensor that is not quantized; `CheckpointError` names tensors without a place and places without a tensor."""
    places = model.state_dict(keep_vars=True)
    filled = {places[name].data_ptr() for name in already}
    faults = []
    for name in checkpoint.dense_names:
        place = places.get(name)
        if place is None:
            faults.append(f"{name}: in the checkpoint, not in the model")
            continue
        with torch.no_grad():
            place.copy_(checkpoint.dense(name))  # its shape was compared already
        filled.add(place.data_ptr())  # a tied weight has two names and one address
    faults += [f"{name}: in the model, not in the checkpoint" for name, p in places.items() if p.data_ptr() not in filled]
    refuse(model, checkpoint, faults)


def _ready(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """For inference on `device`; the linears of `load_reference` lie there already."""
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

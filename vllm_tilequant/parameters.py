"""Loading: from the checkpoint's tensors to this rank's packed weight of a layer, fused or not.

Everything uniform is a vLLM parameter that vLLM's own loader slices, fuses and replicates. The extension is not uniform: how
many rows a tile owns depends on its bits. So a map of int64 codes (member, first row in that member's extension) goes through
the same loader under the same rules as the precision map; what arrives in it says which rows this rank needs. No arithmetic of
ranks, heads or replicas is done here. A rank that holds as many tiles as the members have needs all rows, and no such map.

Weights may arrive again while an engine runs. vLLM then puts parameters without memory (meta) in place of the layer's, calls
every loader with one of them only to count how many elements it copies, and keeps its arguments. When the counts have reached
the size of all parameters, it makes real ones, calls the loaders again, and has the layer processed. So what is counted must
reach that size with the last tensor of a layer and not before, even where a tensor's elements are not placed, or several times.
A reload that fails leaves vLLM's books half filled: it takes a restart.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    RowvLLMParameter,
)

from vllm_tilequant import schema as s
from vllm_tilequant.kernels import layout

_DTYPES = {
    "I32": torch.int32,
    "U8": torch.uint8,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_FLOATS = ("BF16", "F16", "F32")
#: A start code is member << _SHIFT | first row; -1 where nothing was loaded.
_SHIFT = 40
_ROW_MASK = (1 << _SHIFT) - 1
#: Bytes from which a copy by all threads is worth its memory.
_STAGED = 1 << 20


@dataclass(frozen=True)
class Member:
    """One module of the checkpoint inside a layer of vLLM. name: as in the checkpoint; specs: its tensors by suffix."""

    name: str
    module: s.Module
    specs: dict[str, s.TensorSpec]


@dataclass(frozen=True)
class LoadedLayer:
    """This rank's part of a layer. thresholds: [P, 4] float32, a row per stored profile; smoothing: [K] uint8 or None."""

    weight: layout.PackedWeight
    thresholds: Tensor
    smoothing: Tensor | None


@dataclass
class LayerLoading:
    """What a layer keeps between `create_weights` and `process_weights_after_loading`.

    layer: the vLLM layer; prefix: its name in vLLM; members: in the order of its outputs
    load: vLLM's loader of this layer, `load(param, tensor)` or `load(param, tensor, shard_id)`
    before_reload: called when a tensor arrives while an engine runs; raises where that cannot be

    Held as long as the layer, and weakly refers to it: vLLM keeps loaders in a table of its own, with the layer as a weak key.
    """

    layer: Any
    prefix: str
    members: list[Member]
    load: Callable[..., None]
    n_transforms: int
    before_reload: Callable[[], None] = lambda: None
    arrived: set[tuple[int, str]] = field(default_factory=set)
    stash: dict[int, Tensor] = field(default_factory=dict)  # member -> its whole extension, until its map is here
    extensions: dict[int, Tensor] = field(default_factory=dict)  # member -> rows of the extension that this rank needs
    first: dict[str, int] = field(default_factory=dict)  # suffix that all members share -> the member it came from
    inside_bias: bool = False
    counted: set[tuple[int, str]] = field(default_factory=set)  # like `arrived`, before a reload

    def __post_init__(self) -> None:
        self.layer, self.load = weakref.proxy(self.layer), _weakly(self.load)

    def create(self, n: int, k: int, profiles: int, extension_rows: int = 1) -> None:
        """Register this rank's parameters for [n, k] weights. All have two dimensions at most.

        extension_rows: as many as a saved state of this rank has; one is enough where a checkpoint is loaded.
        """
        tiles = (n // s.TILE, k // s.TILE)
        words = dict(input_dim=0, output_dim=1, packed_dim=1, packed_factor=s.OUTPUTS_PER_WORD)
        by_tile = dict(input_dim=1, output_dim=0, packed_dim=0, packed_factor=s.TILE)
        by_row = dict(output_dim=0, packed_dim=0, packed_factor=s.TILE)

        def register(suffix: str, kind: type, data: Tensor, **dims: Any) -> None:
            self.layer.register_parameter(suffix, kind(data=data, weight_loader=self.loader(suffix), **dims))

        for plane in (s.PLANE0, s.PLANE1):
            data = torch.empty(k, n // s.OUTPUTS_PER_WORD, dtype=torch.int32)
            register(plane, PackedvLLMParameter, data, **words)
        # float32 whatever the model: vLLM sets the default dtype to the model's while it builds layers.
        unset = torch.full((profiles, len(s.LEVELS) - 1), float("nan"), dtype=torch.float32)
        register(s.MAP, PackedvLLMParameter, torch.zeros(tiles, dtype=torch.uint8), **by_tile)
        register(s.SCALE, PackedvLLMParameter, torch.full(tiles, float("nan"), dtype=torch.float32), **by_tile)
        register(s.OUTPUT_TRANSFORM, PackedColumnParameter, torch.zeros(tiles[0], 1, dtype=torch.uint8), **by_row)
        register(s.THRESHOLDS, BasevLLMParameter, unset)
        if any(m.module.smoothing != self.smoothed for m in self.members):
            names = [m.name for m in self.members]
            raise ValueError(f"{self.prefix} fuses {names}, of which only some have a smoothing of their shared input")
        if self.smoothed:
            register(s.SMOOTHING, RowvLLMParameter, torch.zeros(k, dtype=torch.uint8), input_dim=0)
        # A place for the loader to find, and to count by; what arrives is kept beside it, whatever its length.
        register(s.EXTENSION, BasevLLMParameter, torch.empty(extension_rows, s.WORDS_PER_TILE_PLANE, dtype=torch.int32))
        self._starts_of = lambda codes: PackedvLLMParameter(data=codes, weight_loader=self.load, **by_tile)
        self._tiles = tiles
        held = sum(m.module.n_tiles for m in self.members), self.members[0].module.k_tiles
        self._whole = tiles == held  # then members lie in their order, each with all of its tiles
        self.reset()
        # vLLM creates the bias after us, with whatever `layer.weight_loader` then is.
        self._load_bias = _weakly(self.layer.weight_loader)
        self.layer.weight_loader = self.bias_loader

    def reset(self) -> None:
        """Nothing has arrived, nothing is kept."""
        for kept in (self.arrived, self.stash, self.extensions, self.first, self.counted):
            kept.clear()
        # Not registered: the checkpoint has no tensor of this name, and vLLM can be told to demand one for every parameter.
        tiles = (0, 0) if self._whole else self._tiles
        self.starts = self._starts_of(torch.full(tiles, -1, dtype=torch.int64, device="cpu"))

    @property
    def smoothed(self) -> bool:
        """Whether every member brings the smoothing of their input."""
        return all(m.module.smoothing for m in self.members)

    def loader(self, suffix: str) -> Callable[..., None]:
        """The `weight_loader` of one parameter: check what arrives, then let vLLM place it."""

        def load(param: Tensor, loaded_weight: Tensor, shard_id: Any = None) -> None:
            if self.counting:
                return self._count(suffix, param, loaded_weight, shard_id)
            part = self._arrive(suffix, loaded_weight, shard_id)
            if suffix == s.EXTENSION:
                self.stash[part] = loaded_weight
            elif self._is_shared(suffix):
                self._set_shared(suffix, param, loaded_weight, part)
            else:
                self._place(param, _staged(loaded_weight, param.device) if self._whole else loaded_weight, shard_id)
                if suffix == s.MAP and not self._whole:
                    self._place_starts(param, loaded_weight.cpu(), shard_id, part)
            self._cut(part)

        return load

    def _place_starts(self, param: Tensor, bits: Tensor, shard_id: Any, part: int) -> None:
        """Where the rows of a member's tiles start, by the way its map takes (bits: the map; param: its parameter)."""
        for name in ("tp_rank", "tp_size"):  # the layer stamps its registered parameters, some with its own
            if hasattr(param, name):
                setattr(self.starts, name, getattr(param, name))
        self._place(self.starts, layout.extension_starts(bits) | part << _SHIFT, shard_id)

    def bias_loader(self, param: Tensor, loaded_weight: Tensor, shard_id: Any = None) -> None:
        """vLLM's plain loader with our check before it. Where a bias is fused in the checkpoint, it calls itself by part."""
        if self.inside_bias:
            return self._place_bias(param, loaded_weight, shard_id)
        if self.counting:
            self._check(s.BIAS, loaded_weight, shard_id)
        else:
            self._arrive(s.BIAS, loaded_weight, shard_id)
        self.inside_bias = True
        try:
            self._place_bias(param, loaded_weight, shard_id)
        finally:
            self.inside_bias = False

    @property
    def counting(self) -> bool:
        """Whether vLLM calls loaders only to count, ahead of a reload."""
        return self.layer.get_parameter(s.PLANE0).is_meta

    def _count(self, suffix: str, param: Tensor, tensor: Tensor, shard_id: Any) -> None:
        """Copy as many elements as this tensor counts for, to parameters without memory."""
        if not self.counted:
            self.before_reload()
        part = self._check(suffix, tensor, shard_id)
        self.counted.add((part, suffix))
        if not self._is_shared(suffix):
            return self._place(param, tensor, shard_id)
        # One parameter for all members: the last one counts for what the others have left of it.
        before = sum(name == suffix for _, name in self.counted) - 1
        left = max(param.numel() - before, 0)
        size = left if before + 1 == len(self.members) else 1
        param.data.flatten()[:size].copy_(torch.empty(size, dtype=param.dtype, device="meta"))

    def _is_shared(self, suffix: str) -> bool:
        """Whether the members of a layer have one parameter for this tensor, rather than each its part."""
        return suffix in (s.EXTENSION, s.THRESHOLDS) or (suffix == s.SMOOTHING and len(self.members) > 1)

    def finish(self) -> LoadedLayer:
        """Check that everything came, and join the members. Raises `ValueError` listing every missing tensor."""
        biased = getattr(self.layer, "bias", None) is not None
        missing = [
            f"{m.name}.{suffix}"
            for part, m in enumerate(self.members)
            for suffix in {**m.specs, **({s.BIAS: None} if biased else {})}
            if (part, suffix) not in self.arrived
        ]
        if missing:
            raise ValueError(
                f"{self.prefix}: {len(missing)} tensors of the checkpoint did not arrive:\n  " + "\n  ".join(missing)
            )
        bits, starts = self.layer.get_parameter(s.MAP).data, self.starts.data
        if bool((starts < 0).any()):
            raise ValueError(
                f"{self.prefix}: {int((starts < 0).sum())} tiles of the layer belong to no module of the checkpoint"
            )
        parts = [self.extensions[part].to(bits.device) for part in range(len(self.members))]
        if len(parts) == 1:
            return self._loaded(parts[0])  # `_cut` left it in the order of its map
        if self._whole:
            of_members = bits.split([m.module.n_tiles for m in self.members])
            rows = torch.stack([layout.extension_rows_per_tile(own).sum() for own in of_members])
            before = rows.cumsum(0) - rows  # of the members in front
            starts = torch.cat([layout.extension_starts(own) + skip for own, skip in zip(of_members, before, strict=True)])
        else:
            rows = torch.tensor([e.shape[0] for e in parts], dtype=torch.int64, device="cpu")
            before = rows.cumsum(0) - rows
            starts = (starts & _ROW_MASK) + before[starts >> _SHIFT]
        return self._loaded(layout.gather_extension(torch.cat(parts), starts.to(bits.device), bits))

    def finish_saved(self, where: str) -> LoadedLayer:
        """What vLLM has copied straight into the parameters from a sharded state, judged as what comes through the loaders is.

        where: the file, for messages. Raises `ValueError` listing every fault; names and shapes were compared before.
        """
        layer, values = self.layer, {suffix: self.layer.get_parameter(suffix).data for suffix in s.TENSORS}
        if (bias := getattr(self.layer, "bias", None)) is not None:
            values[s.BIAS] = bias.data
        bits, plane1 = values.pop(s.MAP), values.pop(s.PLANE1)
        whole = bits.numel() == sum(m.module.n_tiles * m.module.k_tiles for m in self.members)
        if whole:  # this rank holds all of the layer: each member's map must be the one that is promised
            sections = [(m.name, m.module.tile_counts, m.module.n_tiles) for m in self.members]
        else:
            counts = {b: sum(m.module.tile_counts.get(b, 0) for m in self.members) for b in s.TILE_BITS}
            sections = [(self.prefix, counts, bits.shape[0])]
        faults, begin = [], 0
        for name, counts, n_tiles in sections:
            words = slice(begin * s.TILE // s.OUTPUTS_PER_WORD, (begin + n_tiles) * s.TILE // s.OUTPUTS_PER_WORD)
            own = {s.MAP: bits[begin : begin + n_tiles], s.PLANE1: plane1[:, words]}
            found = layout.payload_faults(own, counts, self.n_transforms, part=not whole)
            faults += [f"{name}.{fault}" for fault in found]
            begin += n_tiles
        faults += [f"{self.prefix}.{fault}" for fault in layout.payload_faults(values, {}, self.n_transforms)]
        rows, wanted = values[s.EXTENSION].shape[0], int(layout.extension_rows_per_tile(bits).sum())
        if rows != wanted:
            faults.append(f"{self.prefix}.{s.EXTENSION} has {rows} rows, its map wants {wanted}")
        if faults:
            raise ValueError(f"{where} is no sound sharded state:\n  " + "\n  ".join(faults))
        return self._loaded(layer.get_parameter(s.EXTENSION).data)

    def _loaded(self, extension: Tensor) -> LoadedLayer:
        layer = self.layer
        weight = layout.PackedWeight(
            layer.get_parameter(s.PLANE0).data,
            layer.get_parameter(s.PLANE1).data,
            extension,
            layer.get_parameter(s.MAP).data,
            layer.get_parameter(s.SCALE).data,
            layer.get_parameter(s.OUTPUT_TRANSFORM).data[:, 0].contiguous(),
        )
        smoothing = layer.get_parameter(s.SMOOTHING).data if self.smoothed else None
        return LoadedLayer(weight, layer.get_parameter(s.THRESHOLDS).data, smoothing)

    @property
    def names(self) -> list[str]:
        """The parameters of ours."""
        return [*s.TENSORS, *([s.SMOOTHING] if self.smoothed else [])]

    def release(self) -> None:
        """Take every parameter and loader of ours off the layer again."""
        for suffix in self.names:
            delattr(self.layer, suffix)
        self.layer.__dict__.pop("weight_loader", None)  # the class's own shows again
        self.reset()

    def fill_dummy(self) -> None:
        """Legal made-up tensors for `--load-format dummy`, with the checkpoint's share of every width."""
        layer, g = self.layer, torch.Generator().manual_seed(0)
        for plane in (s.PLANE0, s.PLANE1):
            layer.get_parameter(plane).data.zero_()
        bits = layer.get_parameter(s.MAP).data
        counts: dict[int, int] = {}
        for m in self.members:
            for width, count in m.module.tile_counts.items():
                counts[width] = counts.get(width, 0) + count
        widths = torch.tensor([w for w, c in sorted(counts.items()) for _ in range(c)], dtype=torch.uint8, device="cpu")
        chosen = widths[(torch.randperm(bits.numel(), generator=g, device="cpu") * len(widths)) // bits.numel()].view(
            bits.shape
        )
        bits.copy_(chosen)
        if not self._whole:
            self.starts.data = layout.extension_starts(chosen)
        rows = int(layout.extension_rows_per_tile(chosen).sum())
        empty = torch.zeros(0, s.WORDS_PER_TILE_PLANE, dtype=torch.int32, device="cpu")
        self.extensions = {part: empty for part in range(len(self.members))}
        self.extensions[0] = empty.new_zeros(rows, s.WORDS_PER_TILE_PLANE)
        layer.get_parameter(s.SCALE).data.fill_(1e-4)
        layer.get_parameter(s.OUTPUT_TRANSFORM).data.zero_()
        thresholds = layer.get_parameter(s.THRESHOLDS).data
        thresholds.copy_(torch.arange(1.0, thresholds.shape[1] + 1).expand_as(thresholds))
        if self.smoothed:
            layer.get_parameter(s.SMOOTHING).data.fill_(s.SMOOTHING_ONE)
        suffixes = [suffix for m in self.members for suffix in m.specs] + [s.BIAS]
        self.arrived = {(part, suffix) for part in range(len(self.members)) for suffix in suffixes}

    def _arrive(self, suffix: str, tensor: Tensor, shard_id: Any) -> int:
        """Check a tensor and note it; returns its member. Raises `ValueError` naming the tensor."""
        part = self._check(suffix, tensor, shard_id)
        if (part, suffix) in self.arrived:
            raise ValueError(f"{self.members[part].name}.{suffix} arrived twice: the checkpoint holds it in two files")
        self.arrived.add((part, suffix))
        return part

    def _check(self, suffix: str, tensor: Tensor, shard_id: Any) -> int:
        """Judge a tensor by the format; returns its member. Raises `ValueError` naming the tensor."""
        part = self._part(shard_id)
        member = self.members[part]
        name = f"{member.name}.{suffix}"
        spec = member.specs.get(suffix)
        if spec is None:  # only a bias can be: the model has one that the checkpoint's config does not announce
            spec = s.TensorSpec(_FLOATS, (member.module.out_features,))
        if tensor.dtype not in [_DTYPES[d] for d in spec.dtypes] or tuple(tensor.shape) != spec.shape:
            raise ValueError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, "
                f"wanted {' or '.join(str(_DTYPES[d]).removeprefix('torch.') for d in spec.dtypes)} {list(spec.shape)}"
            )
        if faults := layout.payload_faults({suffix: tensor}, member.module.tile_counts, self.n_transforms):
            raise ValueError("; ".join(f"{member.name}.{fault}" for fault in faults))
        return part

    def _part(self, shard_id: Any) -> int:
        """Which member a shard is. vLLM says "q", "k", "v", an index or several among the layer's outputs, or nothing."""
        if len(self.members) == 1:
            return 0
        if isinstance(shard_id, str):
            order = ("q", "k", "v", "index_q", "index_k")[: len(self.members)]
            if shard_id in order:
                return order.index(shard_id)
        elif shard_id is not None:
            first = shard_id[0] if isinstance(shard_id, tuple) else shard_id
            begin, want = 0, sum(self.layer.output_sizes[:first])
            for part, member in enumerate(self.members):
                if begin == want:
                    return part
                begin += member.module.out_features
        raise ValueError(
            f"{self.prefix}: vLLM loads shard {shard_id!r}, which is none of the modules {[m.name for m in self.members]}"
        )

    def _place(self, param: Tensor, tensor: Tensor, shard_id: Any) -> None:
        # Loaders of unfused layers take no shard; those of fused ones default to None.
        self.load(param, tensor) if shard_id is None else self.load(param, tensor, shard_id)

    def _place_bias(self, param: Tensor, tensor: Tensor, shard_id: Any) -> None:
        self._load_bias(param, tensor) if shard_id is None else self._load_bias(param, tensor, shard_id)

    def _set_shared(self, suffix: str, param: Tensor, tensor: Tensor, part: int) -> None:
        """The members of a layer read the same input once, hence at one set of thresholds and with one smoothing."""
        if suffix not in self.first:
            self.first[suffix] = part
            param.data.copy_(tensor)
        elif not torch.equal(param.data.cpu(), tensor.cpu()):
            a, b = self.members[self.first[suffix]].name, self.members[part].name
            raise ValueError(
                f"{self.prefix}: {a}.{suffix} and {b}.{suffix} differ, though the two share their input; "
                f"modules of one input group need identical {suffix}"
            )

    def _cut(self, part: int) -> None:
        """Keep of a member's extension what this rank needs, once its map tells, so that no rank holds all of the rest."""
        if part not in self.stash or not (self._whole or (part, s.MAP) in self.arrived):
            return
        param, full = self.layer.get_parameter(s.MAP), self.stash.pop(part)
        if not self._whole:
            codes = self.starts.data
            rows = (codes[:, 0] >> _SHIFT) == part  # a row of tiles belongs to one member
            bits = param.data.cpu()[rows]
            full = layout.gather_extension(full.cpu(), codes[rows] & _ROW_MASK, bits)
            codes[rows] = layout.extension_starts(bits) | part << _SHIFT
        # Where it will be wanted: on the host its next copies would take longer than reading it.
        staged = _staged(full, param.device)
        self.extensions[part] = staged if staged is not full else full.to(param.device, copy=True)


def _staged(tensor: Tensor, device: torch.device) -> Tensor:
    """A large tensor of a mapped file on its way to a GPU: by pinned memory, where all threads copy it (and map the file's
    pages), and from where it goes while the next one is copied.

    The driver's own copy of memory that is not pinned is one thread's, and nobody may ask the driver for anything meanwhile.
    """
    worth = device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes >= _STAGED and torch.get_num_threads() > 1
    return tensor.pin_memory().to(device, non_blocking=True) if worth else tensor


def _weakly(call: Callable[..., None]) -> Callable[..., None]:
    """A layer's method that does not keep the layer alive."""
    if not inspect.ismethod(call):
        return call
    method = weakref.WeakMethod(call)

    def called(*args: Any) -> None:
        found = method()
        assert found is not None, "called after its layer"
        found(*args)

    return called

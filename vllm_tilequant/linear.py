"""The method of one quantized linear in vLLM: its parameters, what becomes of them, and the call."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_tilequant import ops
from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.dispatch import check_ahead, prepare
from vllm_tilequant.kernels.layout import rotation_table, smoothing_values
from vllm_tilequant.kernels.portable import PortableWeight
from vllm_tilequant.parameters import LayerLoading, Member
from vllm_tilequant.schema import NEVER, PLANE0, PROFILE_FULL, PROFILE_OFF, TILE
from vllm_tilequant.state import state_hook

if TYPE_CHECKING:
    from vllm_tilequant.config import TileQuantConfig

_LARGEST_TP = 64


@register_weight_loader_v2_supported_method
class TileQuantLinearMethod(LinearMethodBase):
    """Serves one layer. members: the checkpoint's modules in the order of its outputs; one, unless vLLM fuses."""

    def __init__(self, config: TileQuantConfig, prefix: str, members: list[Member]):
        self.config = config
        self.prefix = prefix
        self.members = members
        self.settings = config.settings  # plain attributes: `apply` is traced

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register what the checkpoint will fill. Raises `ValueError` on sizes that do not fit or do not fall on tiles."""
        self._check_sizes(layer, input_size_per_partition, output_partition_sizes, input_size)
        load = _load_outputs if isinstance(layer, ParallelLMHead) else extra_weight_attrs["weight_loader"]
        loading = LayerLoading(
            layer, self.prefix, self.members, load, len(self.config.schema.transforms), self.config.check_reload
        )
        n, k, profiles = sum(output_partition_sizes), input_size_per_partition, len(self.config.schema.profiles.names)
        saved = self.config.saved_state
        loading.create(n, k, profiles, 1 if saved is None else saved.extension_rows(self.prefix))
        if saved is not None:
            saved.check(layer, self.prefix, loading.names)
        layer.register_state_dict_post_hook(state_hook)
        layer.tilequant_loading = loading
        layer.tilequant_dtype = params_dtype
        check_ahead(layer.get_parameter(PLANE0).device)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn what was loaded into what `apply` reads. Raises `ValueError` listing every tensor that did not arrive.

        Weights that arrive again go where the first ones lie: graphs are captured with those addresses.
        """
        loading: LayerLoading = layer.tilequant_loading
        held: dict[str, torch.Tensor] | None = getattr(layer, "tilequant_held", None)
        if held is not None and not loading.arrived:
            return  # done already
        if not loading.arrived and self.config.dummy_weights:
            loading.fill_dummy()
        saved = None if loading.arrived else self.config.saved_state
        loaded = loading.finish() if saved is None else loading.finish_saved(saved.where)
        smoothing = None if loaded.smoothing is None else smoothing_values(loaded.smoothing)
        packed = replace(loaded.weight, input_rotation=self._input_rotation(loaded.weight.plane0.device))
        weight = prepare(
            packed, self.config.transforms, layer.tilequant_dtype, self.settings.activation,
            smoothing=smoothing, int8_copy=self.settings.int8_copy,
        )  # fmt: skip
        static = {"weight_dense": weight.static} if isinstance(weight.static, torch.Tensor) else _tensors(weight.static)
        parameters = {n if n == "weight_dense" else f"prefill_{n}": t for n, t in static.items()}
        layer.tilequant_static = list(parameters)
        # vLLM's LoRA and MLA look for a tensor called `weight_packed` to learn a layer's device.
        graded = {"weight_packed" if n == "codes" else f"graded_{n}": t for n, t in _tensors(weight.graded).items()}
        layer.tilequant_graded = list(graded)
        layer.tilequant_kernel = isinstance(weight.graded, DecodeWeight)
        layer.tilequant_outputs, layer.tilequant_inputs = weight.out_features, packed.in_features
        # A weight like the others: a sleeping engine throws it away and makes it again, where buffers are kept on the host.
        copy = {} if weight.copy is None else {"int8_copy": weight.copy}
        parameters = {n: Parameter(t, requires_grad=False) for n, t in (parameters | graded | copy).items()}
        buffers = {"profile_thresholds": loaded.thresholds, "active_thresholds": torch.empty_like(loaded.thresholds[0])}
        if weight.input_rotation is not None:
            buffers["input_rotation"] = weight.input_rotation
        if loaded.smoothing is not None:
            buffers["stored_smoothing"] = loaded.smoothing  # what is served may hold none of it: `state_hook` does
        if layer.tilequant_kernel:
            # How long the codes are depends on the map. A traced model sees only where they start: otherwise vLLM would
            # compile every layer by itself, and a cached graph would not fit what is quantized again into the same folder.
            layer.tilequant_graded[layer.tilequant_graded.index("weight_packed")] = "codes_start"
            buffers["codes_start"] = parameters["weight_packed"].data[:1]
        loading.release()
        held = layer.tilequant_held = self._into(held, parameters | buffers)
        for name in ("int8_copy", *parameters):
            layer.register_parameter(name, held.get(name))
        for name in ("input_rotation", "stored_smoothing", *buffers):
            layer.register_buffer(name, held.get(name), persistent=False)
        self.set_profile(layer, self.settings.profile)

    def _into(self, held: dict[str, torch.Tensor] | None, new: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors into those that a layer has, if it has any. Raises `ValueError` where one does not fit."""
        if held is None:
            return new
        sizes = {n: (list(held[n].shape) if n in held else None, list(new[n].shape) if n in new else None) for n in held | new}
        if faults := [f"{n}: {old}, reloaded {now}" for n, (old, now) in sizes.items() if old != now]:
            raise ValueError(
                f"{self.prefix}: the reloaded weights do not have the sizes of the running ones, to which captured graphs "
                f"point (another precision map): {'; '.join(faults)}. Start a server with the new checkpoint"
            )
        for name, tensor in new.items():
            held[name].data.copy_(tensor.data)
        return held

    def _input_rotation(self, device: torch.device) -> torch.Tensor | None:
        """[64] uint8. Raises `ValueError` where vLLM fuses modules whose inputs the checkpoint rotates differently."""
        found = {self.config.schema.input_transform(m.name) for m in self.members}
        if len(found) > 1:
            raise ValueError(f"{self.prefix} fuses {[m.name for m in self.members]}, which differ in input_transform")
        transform = found.pop()
        table = None if transform is None else rotation_table(transform)
        return None if table is None else table.to(device)

    def set_profile(self, layer: Any, profile: str) -> None:
        """Write a profile's thresholds into the buffer that `apply` reads: takes effect in the next call, captured or not.

        `off` also needs a row limit of zero, which is fixed when a model is built: it can be left or entered only by a restart.
        """
        active = layer.active_thresholds
        if profile == PROFILE_FULL:
            active.fill_(-1.0)  # every |x| is greater
        elif profile == PROFILE_OFF:
            active.fill_(NEVER)  # not read
        else:
            active.copy_(layer.profile_thresholds[self.config.schema.profile_row(profile)])

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y = x W^T + bias; x: [..., K] -> [..., N], both of this rank."""
        return ops.tile_linear(
            x,
            [getattr(layer, name) for name in layer.tilequant_static],
            [getattr(layer, name) for name in layer.tilequant_graded],
            layer.tilequant_kernel,
            layer.tilequant_outputs,
            layer.input_rotation,
            bias,
            layer.active_thresholds,
            self.settings.graded_rows,
            self.settings.activation,
            self.settings.prefill_activation,
            layer.int8_copy,
        )

    def graded(self, layer: Any) -> DecodeWeight | PortableWeight:
        """The form of a processed layer's weight that the graded product reads."""

        def tensors(kind: type) -> dict[str, Any]:
            names = {f.name: "weight_packed" if f.name == "codes" else f"graded_{f.name}" for f in fields(kind)}
            return {field: getattr(layer, name) for field, name in names.items() if hasattr(layer, name)}

        if layer.tilequant_kernel:
            n, k = layer.tilequant_outputs, layer.tilequant_inputs
            return DecodeWeight(**tensors(DecodeWeight), out_features=n, in_features=k)
        return PortableWeight(**tensors(PortableWeight))

    def _check_sizes(self, layer: Any, k_part: int, n_parts: list[int], k: int) -> None:
        for member in self.members:
            if member.module.in_features != k:
                raise ValueError(
                    f"{member.name} has {member.module.in_features} inputs in quantization_config, {k} in the model: "
                    "the two parts of config.json do not belong together"
                )
        wanted, stored = sum(_full_outputs(layer, n_parts)), sum(m.module.out_features for m in self.members)
        if wanted != stored:
            names = ", ".join(m.name for m in self.members)
            raise ValueError(
                f"{names} have {stored} outputs in quantization_config, {wanted} in the model: "
                "the two parts of config.json do not belong together"
            )
        if k_part % TILE or any(n % TILE for n in n_parts):
            row = k_part != k
            shards = f"{k} inputs give {k_part}" if row else f"{_full_outputs(layer, n_parts)} outputs give {n_parts}"
            raise ValueError(
                f"{self.prefix}: with tensor parallel size {layer.tp_size}, {shards} a rank, which does not fall on borders of "
                f"{TILE}-wide tiles. Legal tensor parallel sizes for this layer: {_legal_tp_sizes(layer, k if row else None)}"
            )


def _tensors(form: Any) -> dict[str, torch.Tensor]:
    """The tensors of a dataclass by field, in order."""
    found = {f.name: getattr(form, f.name) for f in fields(form)}
    return {name: t for name, t in found.items() if isinstance(t, torch.Tensor)}


def _load_outputs(param: Any, tensor: torch.Tensor) -> None:
    """An output head's loader: vLLM's own knows embeddings, which it pads; whole tiles need no padding."""
    param.load_column_parallel_weight(tensor)


def _full_outputs(layer: Any, n_parts: list[int]) -> list[int]:
    """Outputs of every part over all ranks, each counted once where vLLM replicates KV heads."""
    if hasattr(layer, "total_num_kv_heads") and len(n_parts) == 3:
        heads, kv_heads, size = layer.total_num_heads, layer.total_num_kv_heads, layer.head_size
        return [heads * size, kv_heads * size, kv_heads * getattr(layer, "v_head_size", size)]
    if isinstance(layer, ParallelLMHead):
        return [layer.num_embeddings_padded]  # `output_size` only in newer releases
    return list(getattr(layer, "output_sizes", None) or [layer.output_size])


def _legal_tp_sizes(layer: Any, sharded_inputs: int | None) -> list[int]:
    """Sizes up to 64 at which every shard of this layer is whole tiles. sharded_inputs: K of a layer split along its inputs."""
    if sharded_inputs is not None:
        return [t for t in range(1, _LARGEST_TP + 1) if sharded_inputs % (TILE * t) == 0]
    if not hasattr(layer, "total_num_kv_heads"):
        sizes = _full_outputs(layer, [])
        return [t for t in range(1, _LARGEST_TP + 1) if all(n % (TILE * t) == 0 for n in sizes)]
    heads, kv_heads, size = layer.total_num_heads, layer.total_num_kv_heads, layer.head_size
    return [
        t
        for t in range(1, min(_LARGEST_TP, heads) + 1)
        if heads % t == 0
        and (kv_heads % t == 0 or t % kv_heads == 0)
        and heads // t * size % TILE == 0
        and max(kv_heads // t, 1) * size % TILE == 0
        and max(kv_heads // t, 1) * getattr(layer, "v_head_size", size) % TILE == 0
    ]

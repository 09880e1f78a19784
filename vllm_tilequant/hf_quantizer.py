"""What transformers' own `from_pretrained` needs to load a tilequant folder as a dense model.

Importing it registers the quantizer; without that transformers warns, skips the quantization and returns random weights. The
folder passes the same validator as everywhere, and every quantized linear becomes an ordinary one at its stored precision: what
comes back is a plain model, the same that `vllm_tilequant.hf.load_dense` makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.files import CheckpointError, printable
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.kernels import portable


def check_shapes(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` unless each quantized module has its place and each dense tensor the shape that the model has."""
    found = dict(model.named_modules())
    faults = []
    for name, m in checkpoint.schema.modules.items():
        linear = found.get(name)
        if not isinstance(linear, nn.Linear):
            faults.append(f"{name}: the model has {type(linear).__name__ if linear else 'no such module'}, wanted Linear")
        elif (linear.out_features, linear.in_features) != (m.out_features, m.in_features):
            shape = [linear.out_features, linear.in_features]
            faults.append(f"{name}: the model has {shape}, the checkpoint [{m.out_features}, {m.in_features}]")
        elif (linear.bias is not None) != m.bias:
            faults.append(f"{name}: bias is {linear.bias is not None} in the model, {m.bias} in the checkpoint")
    places = model.state_dict(keep_vars=True)
    for name in checkpoint.dense_names:
        stored, place = list(checkpoint.headers[name].shape), places.get(name)
        if place is not None and list(place.shape) != stored:
            faults.append(f"{name}: {stored} in the checkpoint, {list(place.shape)} in the model")
    refuse(model, checkpoint, faults)


def refuse(model: nn.Module, checkpoint: Checkpoint, faults: list[str]) -> None:
    """Raise one `CheckpointError` for all misfits; nothing when there is none."""
    if faults:
        shown = "\n  ".join(map(printable, faults[:20]))
        raise CheckpointError(f"{checkpoint.folder} does not fit {type(model).__name__}:\n  {shown}")


class TileQuantHfConfig(QuantizationConfigMixin):
    """What transformers makes of `quantization_config`; holds its fields as they are."""

    def __init__(self, **fields: Any):
        self.__dict__.update(fields)
        self.quant_method = s.QUANT_METHOD  # type: ignore[assignment]
        self.dequantize = True  # what is loaded is dense: transformers then forgets the quantization


class _Pending(nn.Module):
    """In the place of a quantized linear while transformers loads the rest: it has no weight that could be missed."""


class TileQuantHfQuantizer(HfQuantizer):
    """Lets transformers load what is dense, and puts dequantized linears beside."""

    checkpoint: Checkpoint

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        files, device_map = kwargs.get("checkpoint_files") or [], kwargs.get("device_map")
        if not files:
            raise CheckpointError("a tilequant model loads from a folder or hub id with safetensors files, from nothing else")
        if isinstance(device_map, dict) and len({str(d) for d in device_map.values()}) > 1 or device_map == "auto":
            raise NotImplementedError(
                f"device_map={device_map!r}: a tilequant checkpoint loads onto one device here; "
                "serve it with vLLM, or spread the folder that `tilequant convert --to dense` writes"
            )
        self.checkpoint = Checkpoint.open(Path(files[0]).parent)
        check_shapes(model, self.checkpoint)
        modules = self.checkpoint.schema.modules
        own = {f"{name}.{leaf}" for name in modules for leaf in ("weight", "bias")}
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        dense = set(self.checkpoint.dense_names)
        refuse(
            model,
            self.checkpoint,
            [f"{n}: in the model, not in the checkpoint" for n in model.state_dict() if n not in dense | own | tied]
            + [f"{n}: in the checkpoint, not in the model" for n in dense - model.state_dict().keys()],
        )
        for name in dense:
            self.checkpoint.dense(name)  # raises on what is not finite
        for name in modules:
            replace(model, name, _Pending())
        ignored = {rf"\.({'|'.join((*s.TENSORS, s.SMOOTHING))})$"} | {
            rf"^{name}\.bias$" for name, m in modules.items() if m.bias
        }
        model._keys_to_ignore_on_load_unexpected = ignored | set(model._keys_to_ignore_on_load_unexpected or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name, m in self.checkpoint.schema.modules.items():
            stored = self.checkpoint.module(name)
            linear = nn.Linear(m.in_features, m.out_features, bias=m.bias, device="meta")
            weight = portable.dequantize(stored.weight, self.checkpoint.transforms, model.dtype)
            linear.weight = nn.Parameter(weight.to(model.device), requires_grad=False)
            if stored.bias is not None:
                linear.bias = nn.Parameter(stored.bias.to(model.device, model.dtype), requires_grad=False)
            replace(model, name, linear.eval())

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where the model has the module `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


if s.QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantizer(s.QUANT_METHOD)(TileQuantHfQuantizer)
if s.QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(s.QUANT_METHOD)(TileQuantHfConfig)

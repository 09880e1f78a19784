"""Sharded state: what a layer gives to vLLM's `save_sharded_state`, and what it takes with `--load-format sharded_state`.

What a kernel reads is not stored: that is one kernel's on one device, and holds offsets that are followed without looking. A
saved layer holds the tensors of docs/format.md instead, as this rank serves them: cut for it, and fused members joined. They
come back as any checkpoint's do, into parameters of these names, and are judged and prepared anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.files import INDEX, SINGLE, Header, raise_faults
from vllm_tilequant.checkpoint.sharded import (
    ONE_STAGE,
    STAGES,
    default_files,
    holds_checkpoint,
    rank_headers,
    saved_files,
    sizes,
    value_faults,
)
from vllm_tilequant.kernels import dispatch, layout

_FORMATS = ("sharded_state", "runai_streamer_sharded")
_DTYPES = {torch.int32: "I32", torch.uint8: "U8", torch.float32: "F32"}


@dataclass(frozen=True)
class SavedState:
    """Headers of this rank's files, by vLLM's names. where: the folder and its files, for messages."""

    where: str
    headers: dict[str, Header]

    def extension_rows(self, prefix: str) -> int:
        """Of a layer's extension, whose length follows from a map that is not read yet; vLLM stores no empty tensor."""
        header = self.headers.get(f"{prefix}.{s.EXTENSION}")
        return header.shape[0] if header is not None and header.shape else 0

    def check(self, layer: Any, prefix: str, names: list[str]) -> None:
        """Raise `ValueError` listing every tensor of a layer that is missing or does not fit its parameter."""
        faults = []
        for name in names:
            param, header = layer.get_parameter(name), self.headers.get(f"{prefix}.{name}")
            if header is None:
                if param.numel():
                    faults.append(f"{prefix}.{name}: missing")
            elif header.dtype != _DTYPES[param.dtype] or header.shape != tuple(param.shape):
                wanted = f"{_DTYPES[param.dtype]} {list(param.shape)}"
                faults.append(f"{prefix}.{name}: {header.dtype} {list(header.shape)}, this rank wants {wanted}")
        if faults:
            raise ValueError(
                f"{self.where} is not what this rank of this model saves: either another parallel size saved it, or "
                "another release of vLLM, whose names differ. Save it again from the checkpoint:\n  " + "\n  ".join(faults)
            )


def open_state(current: Any, given: str, folder: Path) -> SavedState | None:
    """This rank's part of a sharded state, where vLLM loads one; None where it loads a checkpoint, or nothing.

    current: vLLM's config; given: its load format. Raises `NotImplementedError` for a saved state under another load format and
    `ValueError` for one of other parallel sizes, each with the remedy.
    """
    if given not in _FORMATS:
        if given != "dummy" and (found := default_files(folder)):
            raise NotImplementedError(
                f"{folder} holds {found[0].name}: the sharded state of an engine of {sizes(found)}, not a checkpoint. Serve it "
                "with --load-format sharded_state and the same sizes, or serve the checkpoint that it was saved from"
            )
        if given != "dummy" and any(folder.glob("*.safetensors")) and not holds_checkpoint(folder):
            raise NotImplementedError(
                f"{folder} holds weights that neither {SINGLE} nor {INDEX} names. If they are a sharded state, serve it with "
                "--load-format sharded_state and, in --model-loader-extra-config, the pattern of its names"
            )
        return None
    extra = current.load_config.model_loader_extra_config
    stages = current.parallel_config.pipeline_parallel_size
    pattern = extra.get("pattern") if isinstance(extra, dict) else None
    pattern = pattern or (STAGES if stages > 1 else ONE_STAGE)
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    stage = get_pp_group().rank_in_group if stages > 1 else 0
    found = saved_files(folder, pattern)
    own = [file for file in found if (file.tp, file.pp) == (rank, stage)]
    if {(file.tp, file.pp) for file in found} != {(t, p) for t in range(ranks) for p in range(stages)}:
        other = found or default_files(folder)
        saved = f"which holds files of {sizes(other)}" if other else "which holds no saved state"
        raise ValueError(
            f"--load-format {given} with tensor parallel size {ranks}, pipeline parallel size {stages} and file names "
            f"{pattern!r} does not fit {folder}, {saved}. Serve with the sizes that it was saved with, or save it again with "
            "these; a checkpoint is served without this option"
        )
    headers = rank_headers(folder, own)
    if pattern not in (ONE_STAGE, STAGES):  # which the first process cannot tell from no state at all, and has not judged
        raise_faults(folder, value_faults(folder, headers), "sharded state")
    return SavedState(f"{folder}/{own[0].name}", headers)


def state_hook(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """In a state dict of the whole model put the format's tensors, on the CPU, in the place of what a kernel reads.

    A layer after the other is packed again where it lies, which takes as much memory there as its packed tensors and some half
    of it more, and moved; in the end the host holds the packed tensors of this rank once. State dicts of parts of a model are
    left alone: vLLM's offloading makes some while it serves, to compute with. So are those before weights are loaded, whose
    parameters are the format's already.
    """
    method = module.quant_method
    if prefix == f"{method.prefix}.base_layer.":
        raise NotImplementedError(
            f"the state of {method.prefix} inside an engine with --enable-lora: vLLM saves it under names that it cannot load. "
            "Save from an engine without; what it saved can be served with adapters"
        )
    if prefix != f"{method.prefix}." or f"{prefix}weight_packed" not in state:
        return
    for name in module.tilequant_held:
        state.pop(f"{prefix}{name}", None)
    packed = dispatch.packed(method.graded(module), method.config.transforms)
    tensors = layout.to_tensors(packed, module.profile_thresholds, module.stored_smoothing)
    state.update({f"{prefix}{name}": tensor.cpu() for name, tensor in tensors.items()})

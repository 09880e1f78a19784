"""Hold a checkpoint against the model it was made from: how far each weight is off, and whether the rest is untouched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.files import CheckpointError, Header, Tensors, read_headers
from vllm_tilequant.checkpoint.model_config import EMBEDDING
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.kernels import portable

#: Beyond this relative error a weight is no quantization of its source: 4 bits are off by about 0.1, 2 bits by 0.5. Codes that
#: make up for earlier layers' errors move further with little text: with 1,024 tokens up to 1.3 on the sample model, with
#: 8,192 up to 0.28.
MAX_ERROR = 0.7


@dataclass(frozen=True)
class Deep:
    """errors: module -> |W^ - W| / |W| (Frobenius norms); equal: dense tensors that are bit for bit the source's."""

    errors: dict[str, float]
    equal: int
    faults: list[str]


def compare(checkpoint: Checkpoint, source: str | Path, max_error: float = MAX_ERROR) -> Deep:
    """Unpack every linear and compare; raises `CheckpointError` when the source folder cannot be read."""
    if checkpoint.schema.folded_input_diagonal:
        raise CheckpointError(
            f"{checkpoint.folder}: its input diagonal is folded into norms and weights, which differ from the source's by "
            "factors that are not stored: there is nothing to compare with --deep; `tilequant evaluate --reference` judges it"
        )
    folder = Path(source)
    original = Tensors(folder, read_headers(folder, strangers=True))
    errors: dict[str, float] = {}
    faults: list[str] = []
    equal = 0
    seen = set()
    for name, m in checkpoint.schema.modules.items():
        seen |= {f"{name}.weight", f"{name}.bias"}
        source_name = f"{name}.weight"
        if source_name not in original.headers and name.endswith("lm_head"):  # a tied head has the embeddings' weight
            source_name = next((n for n in original.headers if n.endswith(EMBEDDING)), source_name)
        header = original.headers.get(source_name)
        if (wrong := _misfit(header, (m.out_features, m.in_features))) is not None:
            faults.append(f"{name}.weight: {wrong}")
            continue
        stored = checkpoint.module(name)
        weight = original.tensor(source_name).float()
        error = float((portable.dequantize(stored.weight, checkpoint.transforms, torch.float32) - weight).norm())
        errors[name] = error / max(float(weight.norm()), torch.finfo(torch.float32).tiny)
        if not errors[name] <= max_error:
            why = "no quantization of this source, or one calibrated on too little text"
            faults.append(f"{name}: relative error {errors[name]:.3g}, {why} (limit {max_error:g})")
        if stored.bias is not None:
            equal += _compare(f"{name}.{s.BIAS}", stored.bias, original, faults)
    for name in checkpoint.dense_names:
        seen.add(name)
        equal += _compare(name, checkpoint.tensor(name), original, faults)
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    for name in sorted(original.headers.keys() - seen):
        if not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq"):
            faults.append(f"{name}: in the source, not in the checkpoint")
    return Deep(errors, equal, faults)


def _misfit(header: Header | None, shape: tuple[int, ...]) -> str | None:
    if header is None:
        return "not in the source"
    return None if header.shape == shape else f"{list(header.shape)} in the source, {list(shape)} in the checkpoint"


def _compare(name: str, ours: Tensor, original: Tensors, faults: list[str]) -> bool:
    """Whether a dense tensor is the source's, cast to our dtype where they differ; appends a fault if not."""
    wrong = _misfit(original.headers.get(name), tuple(ours.shape))
    if wrong is None:
        theirs = original.tensor(name).to(ours.dtype)
        if torch.equal(theirs, ours):
            return True
        wrong = f"differs from the source in {int((theirs != ours).sum())} of {ours.numel()} entries"
    faults.append(f"{name}: {wrong}")
    return False

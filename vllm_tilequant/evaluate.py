"""How far a checkpoint's next-token distributions are from its source model's: KL, same top-1, perplexity, bits really loaded.

One pass over the text serves every configuration: the reference's logits of a batch are computed once, then each configuration
runs on the same batch. Needs torch and transformers, neither vLLM nor llm-compressor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_tilequant import hf
from vllm_tilequant.checkpoint.files import read_config
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.schema import ACTIVATIONS, LEVELS, PROFILE_FULL, PROFILE_OFF, QUANT_METHOD, QuantizationSchema

PHASES = ("static", "graded")
#: Rows of logits compared at once, so that the float32 copies stay small whatever the vocabulary.
CHUNK_ROWS = 512
#: Bytes of one model's float32 logits that the default batch may take.
LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**32}

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Configuration:
    """One row of a table. phase `static`: every product at stored precision (profile `off`); `graded`: at every position."""

    profile: str
    phase: str
    activation: str


def configurations(
    schema: QuantizationSchema, profiles: Sequence[str], activations: Sequence[str], phases: Sequence[str]
) -> list[Configuration]:
    """All rows asked for: static ones once per activation, graded ones per profile and activation (but `token_smooth`).

    profiles: names, or `all` for every stored one and `full`. Raises `FormatError` / `ValueError` on unknown names.
    """
    if "all" in profiles:
        profiles = [*schema.profiles.names, PROFILE_FULL]
    for phase in phases:
        if phase not in PHASES:
            raise ValueError(f"phase is {phase!r}, wanted one of {PHASES}")
    for activation in activations:
        if activation not in hf.STATIC_ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}, wanted one of {hf.STATIC_ACTIVATIONS}")
    rows = []
    if "static" in phases:
        rows += [Configuration(PROFILE_OFF, "static", a) for a in activations]
    if "graded" in phases:
        graded = [p for p in profiles if p != PROFILE_OFF]
        for p in graded:
            if p != PROFILE_FULL:
                schema.profile_row(p)
        rows += [Configuration(p, "graded", a) for p in graded for a in activations if a in ACTIVATIONS]
    if not rows:
        raise ValueError("nothing to evaluate: no static phase, and no profile but 'off' for the graded one")
    return rows


def windows(folder: str | Path, text: str | Path, tokens: int, window: int) -> Tensor:
    """The first `tokens` tokens of a text file in windows: [tokens // window, window] int64, fewer where the text is shorter.

    Plain tokenization of the whole text, no special tokens. Raises `ValueError` where not even one window fills.
    """
    if window < 2 or tokens < window:
        raise ValueError(f"tokens is {tokens}, window {window}; wanted tokens >= window >= 2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = Path(text).read_text(encoding="utf-8")[: tokens * 16]  # far more text than the tokens asked for
    ids = tokenizer(words, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    n = min(tokens, len(ids)) // window
    if n == 0:
        raise ValueError(f"{text} has {len(ids)} tokens, fewer than one window of {window}")
    return ids[: n * window].view(n, window)


def compare(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) in nats and whether the most likely tokens agree. p, q: [T, V] logits -> [T] float64, [T] bool."""
    kl, same = [], []
    for a, b in zip(p.split(CHUNK_ROWS), q.split(CHUNK_ROWS), strict=True):
        lp, lq = F.log_softmax(a.float(), -1), F.log_softmax(b.float(), -1)
        kl.append((lp.exp() * (lp - lq)).sum(-1, dtype=torch.float64))
        same.append(lp.argmax(-1) == lq.argmax(-1))
    return torch.cat(kl), torch.cat(same)


def negative_log_likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    """Sum over all predicted tokens. logits: [B, T, V]; ids: [B, T] -> float64 scalar; the first token of a window is given."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for row, labels in zip(logits, ids, strict=True):
        for a, b in zip(row[:-1].split(CHUNK_ROWS), labels[1:].split(CHUNK_ROWS), strict=True):
            total += F.cross_entropy(a.float(), b, reduction="none").double().sum()
    return total


@dataclass
class _Sums:
    kl: list[Tensor] = field(default_factory=list)
    same: int = 0
    nll: float = 0.0
    counts: hf.ReadCounts = field(default_factory=hf.ReadCounts)


@torch.inference_mode()
def evaluate(
    folder: str | Path,
    reference: str | Path | nn.Module,
    ids: Tensor,
    rows: Sequence[Configuration],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Compare a checkpoint with its source model under every configuration.

    reference: folder or hub id of the source model, or the model itself (on `device`, in `dtype`)
    ids: [windows, window] int64; batch: windows at once (None: by the size of the logits)
    progress: called with (configurations done, of, seconds) counted over all batches
    Returns one "quality row" per configuration, in the order given; `kl_milli`, `kl_se` and `kl_p99` in milli-nats, taken over
    all positions; `kl_over_static` and `kl_over_static_se` the same of the difference to the first static row with activation
    `none`, position by position (None where there is none); `ppl` over the predicted tokens of each window; `loaded_bits`
    counted while running.
    """
    device = torch.device(device)
    checkpoint = Checkpoint.open(folder)
    model = hf.load_reference(folder, dtype=dtype, device=device, graded="always")
    if isinstance(reference, nn.Module):
        source, source_name = reference, getattr(getattr(reference, "config", None), "name_or_path", "") or "reference"
    else:
        source_name = str(reference)
        if Path(reference).is_dir() and _is_tilequant(read_config(Path(reference))):
            raise ValueError(f"{reference} is a tilequant checkpoint: the reference is the source model it was made from")
        source = nn.Module.to(AutoModelForCausalLM.from_pretrained(reference, dtype=dtype), device).eval()
    if batch is None:
        vocabulary = model.get_output_embeddings().weight.shape[0]
        batch = max(1, LOGIT_BYTES[device.type] // (ids.shape[1] * vocabulary * 4))
    sums = [_Sums() for _ in rows]
    reference_nll, start, done = 0.0, time.monotonic(), 0
    total = len(rows) * math.ceil(len(ids) / batch)
    for part in ids.split(batch):
        part = part.to(device)
        p = source(part, use_cache=False).logits
        reference_nll += float(negative_log_likelihood(p, part))
        for row, s in zip(rows, sums, strict=True):
            graded: hf.Graded = "always" if row.phase == "graded" else "never"
            hf.set_mode(model, profile=row.profile, activation=row.activation, graded=graded)
            q = model(part, use_cache=False).logits
            if q.shape != p.shape:
                raise ValueError(f"the reference's logits are {list(p.shape)}, the checkpoint's {list(q.shape)}")
            kl, same = compare(p.flatten(0, 1), q.flatten(0, 1))
            s.kl.append(kl.cpu())
            s.same += int(same.sum())
            s.nll += float(negative_log_likelihood(q, part))
            s.counts += hf.take_counts(model)
            done += 1
            if progress:
                progress(done, total, time.monotonic() - start)
    predicted = ids.shape[0] * (ids.shape[1] - 1)
    common = {
        "name": name or checkpoint.folder.resolve().name,
        "model": Path(source_name).name,
        "recipe": checkpoint.schema.producer.get("recipe_name"),
        "map": describe_map(checkpoint.schema),
    }
    plain = (torch.cat(s.kl) for row, s in zip(rows, sums, strict=True) if (row.phase, row.activation) == ("static", "none"))
    static = next(plain, None)
    return [
        common
        | {"profile": row.profile, "phase": row.phase, "activation": row.activation}
        | {"stored_bits": checkpoint.stored_bits(), "loaded_bits": s.counts.bits_per_weight}
        | statistics(torch.cat(s.kl))
        | _over(torch.cat(s.kl), static)
        | {
            "top1": s.same / ids.numel(),
            "ppl": math.exp(s.nll / predicted),
            "ppl_reference": math.exp(reference_nll / predicted),
            "level_shares": _shares(s.counts),
            "tokens": ids.numel(),
            "window": ids.shape[1],
            "dtype": str(dtype).removeprefix("torch."),
            "device": device.type,
        }
        for row, s in zip(rows, sums, strict=True)
    ]


def describe_map(schema: QuantizationSchema) -> str:
    """Share of tiles at each stored width, such as "4: 60.0%, 8: 40.0%"."""
    counts: dict[int, int] = {}
    for module in schema.modules.values():
        for bits, n in module.tile_counts.items():
            counts[bits] = counts.get(bits, 0) + n
    total = sum(counts.values())
    return ", ".join(f"{bits}: {counts[bits] / total:.1%}" for bits in sorted(counts) if counts[bits])


def statistics(kl: Tensor) -> dict[str, float]:
    """[T] float64 nats -> mean, its standard error and 99th percentile in milli-nats."""
    rank = max(1, math.ceil(0.99 * kl.numel()))  # not torch.quantile: it refuses more than 2^24 values
    return {
        "kl_milli": 1e3 * float(kl.mean()),
        "kl_se": 1e3 * float(kl.std()) / math.sqrt(kl.numel()),
        "kl_p99": 1e3 * float(kl.kthvalue(rank).values),
    }


def _over(kl: Tensor, static: Tensor | None) -> dict[str, float | None]:
    """What a row adds to another of the same positions, in milli-nats: much surer than the difference of two means."""
    if static is None:
        return {"kl_over_static": None, "kl_over_static_se": None}
    added = statistics(kl - static)
    return {"kl_over_static": added["kl_milli"], "kl_over_static_se": added["kl_se"]}


def _shares(counts: hf.ReadCounts) -> dict[str, float] | None:
    shares = counts.level_shares
    return None if shares is None else {str(level): s for level, s in zip(LEVELS, shares, strict=True)}


def _is_tilequant(config: dict[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD

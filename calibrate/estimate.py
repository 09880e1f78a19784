"""Before a calibration: what it will need. Memory and output size follow from shapes, time from shapes and two measured rates.

The formulas name what each phase holds at its peak. They were fitted to the process's memory on small models on a CPU, where
the test holds them to within 30 %; times are rougher. On a GPU they are not checked yet.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from vllm_tilequant.calibrate import smoothing
from vllm_tilequant.calibrate.allocation import narrow_tiles
from vllm_tilequant.calibrate.capture import Group, find_groups
from vllm_tilequant.calibrate.decode import DECODE_TOKENS
from vllm_tilequant.calibrate.judging import TOKENS as JUDGED_TOKENS
from vllm_tilequant.calibrate.progress import clock
from vllm_tilequant.calibrate.scales import HISTOGRAM_ROWS
from vllm_tilequant.calibrate.sensitivity import CHUNK_ELEMENTS
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.thresholds import BINS
from vllm_tilequant.schema import TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What the allocator and the libraries hold beside our tensors once a run is under way.
_BESIDE_BYTES = 64 << 20
#: Copies of a layer's weight in float32 while its scales are searched, and while its codes are made.
_SCALE_COPIES, _CODE_COPIES = 6, 8
#: K x K matrices in float64 while a Hessian is inverted.
_INVERSE_COPIES = 4
#: Elementwise passes per weight: the scale search of one transform, and level errors.
_SCALE_PASSES, _LEVEL_PASSES = 1500, 60
#: Seconds that do not shrink with the layer: of one linear in one scored record, of one input channel in GPTQ's loop.
_SCORE_OVERHEAD, _CHANNEL_OVERHEAD = 3e-3, 5e-5
_HEADER_BYTES = 128  # of one tensor in a safetensors file


@dataclass(frozen=True)
class Estimate:
    """What a calibration needs.

    memory: peak bytes by phase, the model included; seconds: by phase
    working: the most that a GPU must hold beside the model, where all that can be is on the host
    """

    memory: dict[str, int]
    working: int
    seconds: dict[str, float]
    output_bytes: int
    stored_bits: float
    narrow: int
    tiles: int
    groups: int

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most, and how much."""
        return max(self.memory.items(), key=lambda item: item[1])


def estimate(
    skeleton: PreTrainedModel,
    linears: dict[str, nn.Linear],
    settings: Settings,
    *,
    records: int,
    length: int,
    held_out: int,
    rates: Rates,
) -> Estimate:
    """skeleton: the model on the meta device; linears: its targets; records, length, held_out: of the calibration text."""
    groups = _groups(skeleton, linears)
    width = skeleton.dtype.itemsize
    sizes = {n: (m.out_features, m.in_features) for n, m in linears.items()}
    ks = [sizes[g.name][1] for g in groups]
    ns = [sum(sizes[n][0] for n in g.members) for g in groups]
    weights = sum(n * k for n, k in sizes.values())
    tiles = weights // TILE**2
    shapes = {name: (n // TILE, k // TILE) for name, (n, k) in sizes.items()}
    narrow = narrow_tiles(
        shapes, settings.w4_share, settings.stored_bits, settings.max_bits, len(settings.profiles), settings.smooths
    )
    if settings.max_bits == 4:
        narrow = tiles
    packed = weights // 2 + (tiles - narrow) * TILE**2 * (settings.max_bits - 4) // 8
    packed += 5 * tiles + sum(n // TILE + 16 * len(settings.profiles) for n, _ in sizes.values())
    packed += sum(k for _, k in sizes.values()) if settings.smooths else 0
    model = sum(p.numel() * p.element_size() for p in skeleton.parameters())
    output = (
        model
        - weights * width
        + packed
        + _HEADER_BYTES * ((7 + settings.smooths) * len(linears) + len(list(skeleton.parameters())))
    )

    hidden, vocabulary = skeleton.config.get_text_config().hidden_size, skeleton.config.get_text_config().vocab_size
    scored = min(settings.score_samples, records)
    largest = max(n * k for n, k in zip(ns, ks, strict=True))
    kept = 8 * sum(ks) + 8 * BINS * (sum(ks) // TILE + records * len(groups))
    rows = min(length, 2 * HISTOGRAM_ROWS)
    depth = max(len(groups) // 4, 1)  # decoder layers
    activations = width * (sum(ks) + sum(ns)) + 5 * hidden * len(groups)  # of one token, were all held for a backward pass
    held = activations // depth + 2 * width * hidden * depth  # those of one layer, and every layer's input and output
    logits = length * vocabulary * (4 * width + 16)
    products = max(min(CHUNK_ELEMENTS, length * n * k // TILE) for n, k in sizes.values())
    follows = settings.codes == "gptq" and settings.propagation != "off"
    hessians = (8 if follows else 4) * max(ks) ** 2 if settings.codes == "gptq" else 0
    # inputs of one layer, and two streams of hidden states, of all records
    hessians += records * length * width * (sum(ks) // depth + 4 * hidden) if settings.codes == "gptq" else 0
    inverse = 8 * _INVERSE_COPIES * max(ks) ** 2 if settings.codes == "gptq" else 0
    decode = scored and settings.scores in ("joint", "decode")
    beside = {
        "inputs": max(ks) * (rows * 40 + length * 8) + length * (activations // len(groups)),
        "scales": 4 * _SCALE_COPIES * largest,
        "scores": 2 * weights + length * held + logits + 8 * products + 4 * largest + (weights if decode else 0),
        "codes": packed + hessians + inverse + 4 * _CODE_COPIES * largest,
        "saving": 2 * packed,
        "check": packed + 12 * min(JUDGED_TOKENS, held_out * length) * vocabulary + 4 * _SCALE_COPIES * largest,
    }
    seen = min(smoothing.ROWS, records * length)
    if settings.prefill_smoothing == "search":  # rows of all inputs wait on the host, those of one are looked at
        beside["thresholds"] = packed + seen * (2 * sum(ks) + 24 * max(ks)) + length * (activations // len(groups))
    # On a GPU, what stays on the host or may go there: packed weights, and what scores need of all weights at once.
    away = {"scores": (3 if decode else 2) * weights, "codes": packed, "saving": 2 * packed, "check": packed}
    away["thresholds"] = packed + 2 * seen * sum(ks)
    working = max(need - away.get(phase, 0) for phase, need in beside.items())
    memory = {phase: model + kept + need + _BESIDE_BYTES for phase, need in beside.items()}

    forward = 2 * weights * length / rates.model  # seconds of one record
    head = 6 * hidden * vocabulary * length / rates.model
    passes = (4.5 if follows else 2) if settings.codes == "gptq" else 0  # of a whole model, layer by layer
    transforms = 1 + (settings.output_seeds if settings.output_transform == "best" else 0)
    pairs = list(zip(ns, ks, strict=True))
    seconds = {
        "inputs": records * (forward + 20 * rows * sum(ks) / rates.passes),
        "scales": (0.05 if settings.scales == "absmax" else 1.0) * transforms * _SCALE_PASSES * weights / rates.passes,
        "scores": scored
        * (4 * forward + head + 2 * weights * length / rates.float32 + 6 * weights * length / TILE / rates.passes),
        "codes": passes * records * forward
        + (2 * records * length * sum(k * k for k in ks) / rates.float32 if passes else 0)
        + (sum(4 * k**3 + n * k * k for n, k in pairs) / rates.float32 + 40 * weights / rates.passes if passes else 0)
        + _LEVEL_PASSES * weights / rates.passes,
        "thresholds": 0.01 * len(groups) * len(settings.profiles) / 5,
        "check": held_out * (forward + 10 * len(settings.profiles) * length * sum(ks) / rates.passes),
    }
    judged = min(JUDGED_TOKENS, held_out * length)  # at stored precision, and at four levels
    seconds["check"] += judged * (3 * forward / length + 8 * weights / rates.float32)
    seconds["check"] += math.ceil(judged / length) * 60 * weights / rates.passes
    seconds["scores"] += scored * len(linears) * _SCORE_OVERHEAD
    seconds["codes"] += sum(ks) * _CHANNEL_OVERHEAD if passes else 0
    if decode:
        seconds["scores"] += scored * (forward + DECODE_TOKENS * 8 * weights / rates.passes)
    if settings.prefill_smoothing == "search":
        tried = len(smoothing.CANDIDATES) + 2
        seconds["thresholds"] += min(records, smoothing.RECORDS) * forward + 2 * seen * weights / rates.float32
        seconds["thresholds"] += tried * (8 * weights + 10 * seen * sum(ks)) / rates.passes
    if settings.thresholds == "search":
        steps = settings.search_candidates * len(settings.profiles) * scored
        seconds["thresholds"] += steps * DECODE_TOKENS * 8 * weights / rates.passes
    stored = 8 * packed / weights
    return Estimate(memory, working, seconds, output, stored, narrow, tiles, len(groups))


@dataclass(frozen=True)
class Rates:
    """Of this machine, now: flops per second of matrix products in the model's dtype and in float32, elements per second."""

    model: float
    float32: float
    passes: float


def measure_rates(dtype: torch.dtype) -> Rates:
    """A tenth of a second of what calibrations spend their time on, on the device where they run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = 512 if device == "cpu" else 4096

    def product(kind: torch.dtype) -> float:
        a = torch.ones(n, n, dtype=kind, device=device)
        return 2 * n**3 / _seconds(lambda: a @ a)

    x = torch.ones(1 << 20 if device == "cpu" else 1 << 26, device=device)
    return Rates(product(dtype), product(torch.float32), x.numel() / _seconds(lambda: (x / 3).round_()) * 2)


def _seconds(work: Callable[[], Any], at_least: float = 0.03) -> float:
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < at_least:
        work()
        n += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / n


def _groups(skeleton: PreTrainedModel, linears: dict[str, nn.Linear]) -> list[Group]:
    """Which targets share an input; where the model cannot run without weights, none do, which over-estimates."""
    ids = torch.zeros(1, 8, dtype=torch.int64)
    mask = torch.zeros(
        1, 1, 8, 8, dtype=skeleton.dtype
    )  # a finished one: what makes masks looks at values, which are not there
    try:
        return find_groups(skeleton, linears, {"input_ids": ids, "attention_mask": mask})
    except (RuntimeError, NotImplementedError, ValueError):
        return [Group(n, (n,)) for n in linears]


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the machine has, or a container's limit leaves."""
    free = psutil.virtual_memory().available
    try:
        limit = int((root / "memory.max").read_text())  # "max" where there is none
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))  # that is given back
    except (OSError, ValueError):
        return free
    return min(free, limit - used)


def check_memory(need: Estimate) -> None:
    """Refuse what cannot fit, before the model is read. Raises `OSError` with the figures and what would help."""
    phase, peak = need.peak
    free = free_memory()
    where = "memory"
    if torch.cuda.is_available():
        on_gpu = torch.cuda.mem_get_info()[0]
        if need.working > on_gpu:
            where, peak, free = "GPU memory beside the model", need.working, on_gpu
    if peak > free:
        raise OSError(
            f"not enough {where}: about {gib(peak)} needed ({phase}), {gib(free)} free. Shorter records (--length) and fewer "
            "of them (--samples) need less; --no-memory-check starts all the same"
        )


def describe(
    need: Estimate, skeleton: PreTrainedModel, linears: dict[str, nn.Linear], settings: Settings, data: dict[str, Any]
) -> str:
    """What a dry run says."""
    kinds = Counter(n.rpartition(".")[2] for n in linears)
    dense = [n for n, m in skeleton.named_modules() if isinstance(m, nn.Linear) and n not in linears]
    phase, peak = need.peak
    wide = f"{need.tiles - need.narrow} of {settings.max_bits}"
    held = f", {data['held_out_records']} more held out" if data["held_out_records"] else ""
    rows = {
        "model": f"{type(skeleton).__name__}, {sum(p.numel() for p in skeleton.parameters()) / 1e6:.1f} M parameters",
        "targets": f"{len(linears)} linears in {need.groups} groups ({', '.join(f'{n} {k}' for k, n in kinds.items())})",
        "dense": ", ".join(dense[:8]) + (f" and {len(dense) - 8} more" if len(dense) > 8 else "") or "none",
        "budget": f"{need.narrow} tiles of 4 bits, {wide}: {need.stored_bits:.3f} stored bits per weight",
        "text": f"{data['records']} records of {data['length']} tokens, {data['tokens_used']} used{held}",
        "output": gib(need.output_bytes),
        "memory": f"about {gib(peak)} at most ({phase}); {gib(free_memory())} free",
        "time": f"roughly {clock(sum(need.seconds.values()))} "
        f"({', '.join(f'{p} {clock(s)}' for p, s in need.seconds.items() if s >= 0.1)})",
    }
    return "\n".join(f"{name:<8} {text}" for name, text in rows.items())


def gib(n_bytes: float) -> str:
    """1.23 GiB, or MiB where that says more."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / 2**20:.1f} MiB"

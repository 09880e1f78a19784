"""Engines of the speed benchmarks: each in a process of its own, at equal settings."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import synthetic
import torch

from vllm_tilequant.schema import LEVELS

SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # These scripts compute before they start an engine, and threads do not survive a fork: the engine would wait for them.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
if find_spec("flashinfer") is None:  # vLLM 0.26 takes it for granted where its sampler is on
    QUIET["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
#: Of a failed engine's log, shown: the folder may be gone when somebody asks.
LOG_LINES = 30
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def engine_run(args: argparse.Namespace, name: str, script: str, **options: Any) -> dict[str, Any]:
    """A script's `run_engine` in a process of its own, which takes its workers with it. Raises `OSError` that names the log."""
    output, log = args.folder / f"{name}.json", args.folder / f"{name}.log"
    output.unlink(missing_ok=True)
    command = [sys.executable, script, "--folder", str(args.folder), "--engine", json.dumps(options), "--output", str(output)]
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment()).returncode
    if code and output.exists():
        print(f"engine {name} ended with {code} after it had measured; see {log}", file=sys.stderr)
    elif code or not output.exists():
        end = "\n  ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise OSError(f"engine {name} ended with {code}; the end of {log}:\n  {end}")
    return json.loads(output.read_text())


def environment() -> dict[str, str]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    cpu = {} if torch.cuda.is_available() else ON_CPU
    return {**cpu, **QUIET, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def loaded_bits(levels: list[float]) -> float:
    """Code bits per weight, tiles being 4 or 8 bits wide independently of the channels."""
    four = synthetic.shapes.SHARE_OF_4_BIT_TILES
    each = [four * min(level, 4) + (1 - four) * level for level in LEVELS]
    return sum(n * bits for n, bits in zip(levels, each, strict=True)) / sum(levels)

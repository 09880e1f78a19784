"""What one rank takes from a memory-mapped checkpoint: bytes that it holds, and pages of the mapping that it touched for them.

    python benchmarks/bench_loading.py --sizes 1 2 4 8
    python benchmarks/bench_loading.py --engines SCRATCH/tilequant SCRATCH/bf16      # folders of bench_e2e.py --stored

With `--engines`: how long vLLM says that it loads and prepares the weights of whole folders, each in an engine of its own, and
for each GiB of them; `load_s` is the reading alone. What was written or read just before comes from the page cache, and a first
start compiles kernels, so that every folder is loaded `--starts` times, and all times are shown. Otherwise:

One layer at a time, at the shapes of an 8B model, goes through vLLM's own weight iterator, layers and loaders, on the CPU and
without an engine. Touched pages are the mapping's resident size in /proc/self/smaps, which the kernel rounds up to windows of
64 KiB; how much more it reads ahead from the disk is the disk's setting.
Writes `benchmarks/results/loading.cpu.json`, or `loading_engine.<device>.json`. Runs in the serving environment, on Linux.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import report
import shapes
import torch
import vllm.model_executor.layers.linear as vllm_linear
import vllm.model_executor.parameter as vllm_parameter
from engine_run import LOG_LINES, environment
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from vllm_tilequant import schema as s
from vllm_tilequant.config import TileQuantConfig
from vllm_tilequant.kernels import layout

HIDDEN, INNER = 4096, 14336
#: A layer of vLLM -> (its members, how it is cut).
LAYERS = {
    "gate_up_proj": ({"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN)}, "outputs"),
    "down_proj": ({"down_proj": (HIDDEN, INNER)}, "inputs"),
}
COLUMNS = {
    "layer": "",
    "cut": "",
    "tp": "d",
    "stored_mib": ".1f",
    "held_mib": ".1f",
    "held": ".1%",
    "touched": ".1%",
    "seconds": ".2f",
}
ENGINE_COLUMNS = {
    "model": "",
    "start": "d",
    "gib": ".2f",
    "load_s": ".2f",
    "weights_s": ".2f",
    "load_s_per_gib": ".3f",
    "s_per_gib": ".3f",
}
#: An engine over a folder, in one process: a second one would import everything once more, which takes longer than loading.
#: What follows the loading (a profile of the memory, caches) is left out.
START = """
import os, sys
from vllm import LLM
from vllm.v1.worker.gpu_worker import Worker
load = Worker.load_model
def load_and_leave(self, *args, **kwargs):
    load(self, *args, **kwargs)
    os._exit(0)
Worker.load_model = load_and_leave
LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=512)
"""


def write(folder: Path, layer: str) -> tuple[Path, TileQuantConfig]:
    """One layer's members with random words, 60 % of the tiles at 4 bits."""
    tensors, modules = {}, {}
    for i, (name, (n, k)) in enumerate(LAYERS[layer][0].items()):
        weight = shapes.draw_weight(n, k, "cpu", seed=i)
        own = layout.to_tensors(weight, shapes.thresholds_for("3.0")[None])
        tensors |= {f"{name}.{suffix}": t.contiguous() for suffix, t in own.items()}
        counts = {b: int((weight.tile_bits == b).sum()) for b in (4, 8)}
        modules[name] = {"out_features": n, "in_features": k, "tile_counts": counts, "bias": False, "input_group": "x"}
    path = folder / f"{layer}.safetensors"
    save_file(tensors, path)
    config = {
        "quant_method": s.QUANT_METHOD,
        "format_version": s.FORMAT_VERSION,
        "tile": s.TILE,
        "max_bits": 8,
        "transforms": [{"kind": "randomized_hadamard", "seed": 1}],
        "profiles": {"names": ["3.0"], "default": "3.0"},
        "ignore": [],
        "modules": modules,
    }
    return path, TileQuantConfig.from_config(config)


def touched_bytes(path: Path) -> int:
    """Resident bytes of every mapping of a file in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(f" {path}")
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def load(path: Path, config: TileQuantConfig, layer: str, rank: int, size: int) -> tuple[int, int]:
    """Build and fill one rank's layer; returns the bytes it holds and those it touched. vLLM is told where the layers stand."""
    for module in (vllm_linear, vllm_parameter):
        module.get_tensor_model_parallel_rank = lambda: rank  # type: ignore[attr-defined]
        module.get_tensor_model_parallel_world_size = lambda: size  # type: ignore[attr-defined]
    members = list(LAYERS[layer][0])
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    common: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": config, "prefix": layer}
    built = (
        MergedColumnParallelLinear(HIDDEN, [INNER, INNER], **common)
        if layer == "gate_up_proj"
        else RowParallelLinear(INNER, HIDDEN, **common)
    )
    stored = list(safetensors_weights_iterator([str(path)], False))  # views, which keep the mapping
    for name, tensor in stored:
        member, _, suffix = name.rpartition(".")
        shard = (members.index(member),) if len(members) > 1 else ()
        built.get_parameter(suffix).weight_loader(built.get_parameter(suffix), tensor, *shard)
    weight = built.tilequant_loading.finish().weight
    return sum(t.nbytes for t in vars(weight).values() if t is not None), touched_bytes(path)


def load_engine(folder: Path, log: Path) -> dict[str, Any]:
    """Start an engine over a folder until its weights are ready, and read what it says. Raises `OSError`."""
    gib = sum(p.stat().st_size for p in folder.glob("*.safetensors")) / 2**30
    with log.open("w") as out:
        code = subprocess.run(
            [sys.executable, "-c", START, str(folder)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        ).returncode
    text = log.read_text(errors="replace")
    load = re.search(r"Loading weights took ([\d.]+) seconds", text)
    whole = re.search(r"Model loading took .*?([\d.]+) seconds", text)
    if code or not load:
        end = "\n  ".join(text.splitlines()[-LOG_LINES:])
        raise OSError(f"the engine over {folder} ended with {code}; the end of what it said:\n  {end}")
    seconds = float(whole[1]) if whole else None  # not said on a CPU
    return {
        "model": folder.name,
        "gib": gib,
        "load_s": float(load[1]),
        "weights_s": seconds,
        "load_s_per_gib": float(load[1]) / gib,
        "s_per_gib": seconds and seconds / gib,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--engines", type=Path, nargs="+", help="folders to load whole, on this machine's device")
    parser.add_argument("--starts", type=int, default=2, help="of each of these engines")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the system's temporary folder if left out")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/loading.cpu.json")
    args = parser.parse_args()
    if args.engines:
        device, found = "cuda" if torch.cuda.is_available() else "cpu", []
        path = args.json or report.default_path("loading_engine", device)
        with tempfile.TemporaryDirectory() as scratch:
            for start, folder in product(range(1, args.starts + 1), args.engines):
                found.append({"start": start} | load_engine(folder, Path(scratch) / "log"))
                report.write(path, report.envelope("loading_engine", device, found))
        print(report.table(found, ENGINE_COLUMNS))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch, set_current_vllm_config(VllmConfig()):
        for layer, (_, cut) in LAYERS.items():
            path, config = write(Path(scratch), layer)
            for size in args.sizes:
                begin = time.perf_counter()
                held, touched = load(path, config, layer, size // 2, size)
                seconds, stored = time.perf_counter() - begin, path.stat().st_size
                rows.append(
                    {"layer": layer, "cut": cut, "tp": size, "stored_mib": stored / 2**20, "held_mib": held / 2**20}
                    | {"held": held / stored, "touched": touched / stored, "seconds": seconds}
                )
    path = args.json or report.default_path("loading", "cpu")
    report.write(path, report.envelope("loading", "cpu", rows))
    print(report.table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())

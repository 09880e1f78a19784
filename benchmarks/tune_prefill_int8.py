"""Search configurations of the prefill and write them to `configs/tuning/<gpu>.json`.

    python benchmarks/tune_prefill_int8.py [--shapes 4096x4096,...] [--write]

First `splits`, by the mean of relative times at 16, 64 and 128 rows; then `expand_tiles`; then `short_rows`, the largest number
of rows at which the short kernel is not slower than expanding.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import bench_prefill_int8 as bench
import shapes

from vllm_tilequant import ops
from vllm_tilequant.kernels import tuning
from vllm_tilequant.kernels.tuning import PrefillConfig

ROWS = (16, 64, 128)
BOUNDARIES = (64, 128, 192, 256, 320, 384, 448, 512)
SPLITS = (1, 2, 3, 4, 5, 7, 8, 12, 16)
EXPAND = (4, 8, 16)
HOW = {"replays": 8, "warmup": 2, "at_least": 10}


def tune(n: int, k: int) -> PrefillConfig:
    b, device = bench.draw(n, k), torch.device("cuda")
    gemm = ops.int8_gemm(device)
    x = {m: shapes.draw_rows(m, k, "cuda") for m in (*ROWS, *BOUNDARIES)}

    def us(config: PrefillConfig, m: int) -> float:
        return bench.time_ours(b, x[m], config, gemm, **HOW).us

    times = {s: [us(PrefillConfig(s, 10**6), m) for m in ROWS] for s in SPLITS}
    best = [min(t[i] for t in times.values()) for i in range(len(ROWS))]
    splits = min(times, key=lambda s: sum(math.log(t / b) for t, b in zip(times[s], best, strict=True)))
    print(f"{n}x{k} splits", {s: [round(t, 1) for t in v] for s, v in times.items()}, "->", splits, flush=True)
    expand = {e: us(PrefillConfig(splits, 0, e), 512) for e in EXPAND}
    config = PrefillConfig(splits, 0, min(expand, key=expand.__getitem__))
    print(f"{n}x{k} expand_tiles at 512 rows", {e: round(t, 1) for e, t in expand.items()}, flush=True)
    at = 0
    for m in BOUNDARIES:
        short, long = us(dataclasses.replace(config, short_rows=10**6), m), us(config, m)
        print(f"{n}x{k} M{m}: short {short:.1f} long {long:.1f}", flush=True)
        at = m if short <= long else at
    return dataclasses.replace(config, short_rows=max(at, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="N x K pairs, such as 4096x4096,28672x4096; default: those of the benchmark")
    parser.add_argument("--write", action="store_true", help="write the tuning file of this GPU")
    args = parser.parse_args()
    wanted = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else bench.SHAPES
    best = {}
    for n, k in wanted:
        best[n, k] = tune(n, k)
        print(n, k, best[n, k], flush=True)
        torch.cuda.empty_cache()
    if args.write:
        gpu = tuning.gpu_key(torch.cuda.get_device_properties("cuda").name)
        path = Path(__file__).resolve().parent.parent / "configs" / "tuning" / f"{gpu}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = tuning.tuned_prefill(gpu) | best
        path.write_text(tuning.dump(gpu, tuning.tuned(gpu), {"torch": torch.__version__}, found))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()

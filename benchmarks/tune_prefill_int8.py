"""Search configurations of the prefill and write them to `configs/tuning/<gpu>.json`.

    python benchmarks/tune_prefill_int8.py [--shapes 4096x4096,...] [--write]

A shape's figure is the sum over numbers of rows of log(time), each by the faster of the two ways; `splits` is chosen by it, and
`short_rows` is the largest number of rows up to which the short kernel is never slower than expanding.
"""

from __future__ import annotations

import argparse
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

ROWS = (9, 16, 32, 48, 64, 96, 128, 192, 256)
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
HOW = {"replays": 8, "warmup": 2, "at_least": 10}


def tune(n: int, k: int) -> PrefillConfig:
    b, gemm = bench.draw(n, k), ops.int8_gemm(torch.device("cuda"))
    x = {m: shapes.draw_rows(m, k, "cuda") for m in ROWS}

    def us(config: PrefillConfig, m: int) -> float:
        return bench.time_ours(b, x[m], config, gemm, **HOW).us

    long = {m: us(PrefillConfig(1, 0), m) for m in ROWS}
    short = {s: {m: us(PrefillConfig(s, 10**6), m) for m in ROWS} for s in SPLITS}
    splits = min(short, key=lambda s: sum(math.log(min(short[s][m], long[m])) for m in ROWS))
    for name, times in (("long", long), (f"short, {splits} splits", short[splits])):
        print(f"{n}x{k} {name}:", " ".join(f"M{m} {t:.1f}" for m, t in times.items()), flush=True)
    slower = [m for m in ROWS if short[splits][m] > long[m]]
    return PrefillConfig(splits, max([8] + [m for m in ROWS if not slower or m < slower[0]]))


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

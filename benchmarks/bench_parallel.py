"""Two GPUs of one host: the same greedy text at TP 1, TP 2 and PP 2, and the speed of a 14B shape at TP 1 and 2.

    python benchmarks/bench_parallel.py --folder SCRATCH [--tp 1 2] [--batch 1 8]
    python benchmarks/bench_parallel.py --folder SCRATCH --tiny --methods tilequant bf16   # anywhere, to try it

The checkpoints are random, written here by `synthetic.py`: what is measured is time, and text only against itself. Greedy text
is compared in float32 on a small model with grouped heads and layers of different widths. Speed is measured as by
`bench_e2e.py`, one engine for each method and size, tilequant beside W4A16 (compressed-tensors, groups of 128) and what else is
asked for, at the same settings. All-reduces are NCCL's, NVLink multicast stays off.
Writes `benchmarks/results/parallel.<device>.json`; exit code 1 when greedy text differs. Runs in the serving environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import bench_e2e
import report
import synthetic
import torch
from engine_run import engine_run
from legal_sizes import Shape

BIG = (Shape("14B shape", 5120, 17920, 40, 10, 128), 40, 100352)
SMALL = (Shape("small", 512, 1536, 8, 4, 64), 5, 2048)
TINY = (Shape("tiny", 256, 512, 4, 2, 64), 3, 512)
#: vLLM's own all-reduce kernels are left out: what differs between methods is the linears.
ENGINE = {"disable_custom_all_reduce": True}
#: Little: greedy text is asked for beside whatever else runs there.
ROOM = {"kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.3}


def run_engine(args: argparse.Namespace) -> None:
    """One engine in this process: greedy token ids of fixed prompts, as JSON to a file."""
    from vllm import LLM, SamplingParams

    options = json.loads(args.engine)
    vocab = json.loads((Path(options["model"]) / "config.json").read_text())["vocab_size"]
    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=512, seed=0, **options)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocab, (n,), generator=g).tolist() for n in (128, 33, 9, 8, 2)]
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    tokens = [list(llm.generate({"prompt_token_ids": p}, sampling, use_tqdm=False)[0].outputs[0].token_ids) for p in prompts]
    args.output.write_text(json.dumps({"tokens": tokens}))


def greedy(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Rows of TP 1, TP 2 and PP 2 with how many of the prompts got the text of TP 1."""
    shape, layers, vocab = TINY if args.tiny else SMALL
    folder = synthetic.write_tilequant(args.folder / "small", shape, layers, vocab, 128, device, torch.float32)
    rows, wanted = [], None
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        # vLLM's CPU backend runs stages only traced and without its asynchronous scheduler
        stages = (
            ENGINE
            | (ROOM if device == "cuda" else {})
            | ({"async_scheduling": False} if pp > 1 else {"enforce_eager": device == "cpu"})
        )
        options = dict(model=str(folder), dtype="float32", tensor_parallel_size=tp, pipeline_parallel_size=pp, **stages)
        got = engine_run(args, f"greedy-tp{tp}-pp{pp}", __file__, **options)["tokens"]
        wanted = wanted or got
        same = sum(a == b for a, b in zip(got, wanted, strict=True))
        rows.append({"model": shape.name, "method": "tilequant", "profile": synthetic.PROFILES[0], "tp": tp, "pp": pp})
        rows[-1] |= {"dtype": "float32", "prompts": len(got), "same_text": same}
        print(f"greedy text at TP {tp}, PP {pp}: {same} of {len(got)} as at TP 1", flush=True)
    return rows


def speed(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    model, rows = TINY if args.tiny else BIG, []
    for tp in args.tp:
        for method in args.methods:
            found = bench_e2e.measure(args, method, device, model, tp, **ENGINE)
            print(report.table(found, {"tp": "d"} | bench_e2e.COLUMNS), flush=True)
            rows += found
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="for models (some 12 GB; those found are used) and logs")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape for both parts, to try the script")
    parser.add_argument("--parts", nargs="+", default=["greedy", "speed"], choices=("greedy", "speed"))
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", default=["tilequant", "w4a16"], choices=bench_e2e.METHODS)
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/parallel.<device>.json")
    bench_e2e.add_load(parser, batch=[1, 8], long=None)
    args = parser.parse_args()
    if args.engine:
        run_engine(args)
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = args.json or report.default_path("parallel", device)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        for part in args.parts:
            rows += {"greedy": greedy, "speed": speed}[part](args, device)
            report.write(path, report.envelope("parallel", device, rows))  # kept should the rest break
    except (OSError, ValueError) as e:
        print(f"bench_parallel: {e}", file=sys.stderr)
        return 2
    return 1 if any(r.get("same_text", 0) < r.get("prompts", 0) for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

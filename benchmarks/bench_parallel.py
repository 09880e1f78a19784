"""Two GPUs of one host: the same greedy text at TP 1, TP 2 and PP 2, and the speed of a 14B shape at TP 1 and 2.

    python benchmarks/bench_parallel.py --folder SCRATCH [--tp 1 2] [--batch 1 8]
    python benchmarks/bench_parallel.py --folder SCRATCH --tiny --methods tilequant bf16   # anywhere, to try it

The checkpoints are random, written here by `synthetic.py`: what is measured is time, and text only against itself. Greedy text
is compared in float32 on a small model with grouped heads and layers of different widths. Speed is that of `vllm bench latency`
(one batch of equal requests; the first token apart), tilequant beside W4A16 (compressed-tensors, groups of 128) and bf16 at the
same settings; loaded bits are counted in a run of their own from the activations of decode steps. NVLink multicast stays off.
Writes `benchmarks/results/parallel.<device>.json`; exit code 1 when greedy text differs. Runs in the serving environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import report
import synthetic
import torch
from legal_sizes import Shape

from vllm_tilequant import engine
from vllm_tilequant.cli.serve import vllm_program
from vllm_tilequant.schema import LEVELS, QUANT_METHOD

BIG = (Shape("14B shape", 5120, 17920, 40, 10, 128), 40, 100352)
SMALL = (Shape("small", 512, 1536, 8, 4, 64), 5, 2048)
TINY = (Shape("tiny", 256, 512, 4, 2, 64), 3, 10240)  # vllm bench latency draws tokens below 10000
SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
#: Of a failed engine's log, shown: the folder may be gone when somebody asks.
LOG_LINES = 30
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
COLUMNS = {"model": "", "method": "", "profile": "", "tp": "d", "pp": "d", "batch": "d", "ttft_ms": ".1f", "tpot_ms": ".2f"}
COLUMNS |= {"weights_gib": ".2f", "loaded_bits": ".2f"}


class Counter:
    """Becomes part of vLLM's worker: counts the levels that decode steps of one row ask for, in an eager engine."""

    def start_counting(self) -> None:
        self.level_weights = [0.0] * len(LEVELS)

        def before(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            if x.shape[0] == 1:
                levels = torch.bucketize(x.float().abs(), layer.active_thresholds)
                outputs = sum(member.module.out_features for member in layer.quant_method.members)
                for i, n in enumerate(torch.bincount(levels.flatten(), minlength=len(LEVELS)).tolist()):
                    self.level_weights[i] += n * outputs

        for layer in self.model_runner.model.modules():  # type: ignore[attr-defined]
            if hasattr(layer, "active_thresholds"):
                layer.register_forward_pre_hook(before)

    def counted(self) -> list[float]:
        return self.level_weights


def run_engine(args: argparse.Namespace) -> None:
    """One engine in this process: greedy token ids of fixed prompts, and what was counted. Printed as JSON to a file."""
    from vllm import LLM, SamplingParams

    options = json.loads(args.engine)
    vocab = json.loads((Path(options["model"]) / "config.json").read_text())["vocab_size"]
    count = options.pop("count", False)
    llm = LLM(
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=512,
        seed=0,
        **({"worker_extension_cls": "bench_parallel.Counter"} if count else {}),
        **options,
    )
    if count:
        llm.collective_rpc("start_counting")
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocab, (n,), generator=g).tolist() for n in (128, 33, 9, 8, 2)]
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    tokens = [list(llm.generate({"prompt_token_ids": p}, sampling, use_tqdm=False)[0].outputs[0].token_ids) for p in prompts]
    levels = llm.collective_rpc("counted")[0] if count else None
    args.output.write_text(json.dumps({"tokens": tokens, "levels": levels}))


def engine_run(args: argparse.Namespace, name: str, script: str = __file__, **options: Any) -> dict[str, Any]:
    """A script's `run_engine` in a process of its own, which takes its workers with it. Raises `OSError` that names the log."""
    output, log = args.folder / f"{name}.json", args.folder / f"{name}.log"
    command = [sys.executable, script, "--folder", str(args.folder), "--engine", json.dumps(options), "--output", str(output)]
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment()).returncode
    if code or not output.exists():
        end = "\n  ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise OSError(f"engine {name} ended with {code}; the end of {log}:\n  {end}")
    return json.loads(output.read_text())


def environment() -> dict[str, str]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    cpu = {} if torch.cuda.is_available() else ON_CPU
    return {**cpu, **QUIET, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def greedy(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Rows of TP 1, TP 2 and PP 2 with how many of the prompts got the text of TP 1."""
    shape, layers, vocab = TINY if args.tiny else SMALL
    folder = synthetic.write_tilequant(args.folder / "small", shape, layers, vocab, 128, device, torch.float32)
    rows, wanted = [], None
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        # vLLM's CPU backend runs stages only traced and without its asynchronous scheduler
        stages = {"async_scheduling": False} if pp > 1 else {"enforce_eager": device == "cpu"}
        options = dict(model=str(folder), dtype="float32", tensor_parallel_size=tp, pipeline_parallel_size=pp, **stages)
        got = engine_run(args, f"greedy-tp{tp}-pp{pp}", **options)["tokens"]
        wanted = wanted or got
        same = sum(a == b for a, b in zip(got, wanted, strict=True))
        rows.append({"model": shape.name, "method": "tilequant", "profile": synthetic.PROFILES[0], "tp": tp, "pp": pp})
        rows[-1] |= {"dtype": "float32", "prompts": len(got), "same_text": same}
        print(f"greedy text at TP {tp}, PP {pp}: {same} of {len(got)} as at TP 1", flush=True)
    return rows


def loaded_bits(levels: list[float]) -> float:
    """Code bits per weight, tiles being 4 or 8 bits wide independently of the channels."""
    four = synthetic.shapes.SHARE_OF_4_BIT_TILES
    each = [four * min(level, 4) + (1 - four) * level for level in LEVELS]
    return sum(n * bits for n, bits in zip(levels, each, strict=True)) / sum(levels)


def speed(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    shape, layers, vocab = TINY if args.tiny else BIG
    program = vllm_program()
    context = args.prompt + args.answer // 2
    folders = {
        "tilequant": lambda f: synthetic.write_tilequant(f, shape, layers, vocab, context, device),
        "w4a16": lambda f: synthetic.write_config(f, shape, layers, vocab, synthetic.W4A16),
        "bf16": lambda f: synthetic.write_config(f, shape, layers, vocab),
    }
    os.environ.update(environment())  # of `vllm bench` as well
    rows = []
    for method in args.methods:
        folder = folders[method](args.folder / method)
        for profile in args.profile if method == "tilequant" else (None,):
            chosen = {"additional_config": {QUANT_METHOD: {"profile": profile}}} if profile else {}
            bits = None
            if profile:
                counting = dict(model=str(folder), enforce_eager=True, count=True, max_num_seqs=1, **chosen)
                bits = loaded_bits(engine_run(args, f"count-{profile}", **counting)["levels"])
            for tp in args.tp:
                options = ["--model", str(folder), "--dtype", "bfloat16", "--tensor-parallel-size", str(tp)]
                options += ["--max-model-len", str(args.prompt + args.answer + 64), "--skip-tokenizer-init"]
                options += ["--disable-detokenize", "--no-enable-prefix-caching"]
                options += [part for k, v in SETTINGS.items() for part in (f"--{k.replace('_', '-')}", str(v))]
                options += ["--additional-config", json.dumps(chosen["additional_config"])] if profile else []
                options += [] if method == "tilequant" else ["--load-format", "dummy"]
                options += ["--enforce-eager"] if device == "cpu" else []
                for batch in args.batch:
                    load = engine.Load(args.prompt, args.answer, batch, args.repeats, args.warmups, 0)
                    log = args.folder / f"{method}-{profile}-tp{tp}-{batch}.log"
                    times, peak, weights = engine.one_batch(program, options, load, log)
                    row = {"model": shape.name, "method": method, "profile": profile, "tp": tp, "pp": 1, "batch": batch}
                    row |= {"prompt": args.prompt, "output": args.answer, **times, "loaded_bits": bits, "weights_gib": weights}
                    row |= {"peak_gib": max(peak.values()) / 2**30, "repeats": args.repeats, **SETTINGS}
                    rows.append(row)
                    print(report.table([row], COLUMNS).splitlines()[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="new folder for models and logs (some 12 GB)")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape for both parts, to try the script")
    parser.add_argument("--parts", nargs="+", default=["greedy", "speed"], choices=("greedy", "speed"))
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--profile", nargs="+", default=["4.0", "3.0"], choices=synthetic.PROFILES)
    parser.add_argument("--methods", nargs="+", default=["tilequant", "w4a16", "bf16"], choices=("tilequant", "w4a16", "bf16"))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/parallel.<device>.json")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        run_engine(args)
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = args.json or report.default_path("parallel", device)
    try:
        args.folder.mkdir(parents=True)
        rows: list[dict[str, Any]] = []
        for part in args.parts:
            rows += {"greedy": greedy, "speed": speed}[part](args, device)
            report.write(path, report.envelope("parallel", device, rows))  # kept should the rest break
    except (OSError, ValueError) as e:
        print(f"bench_parallel: {e}", file=sys.stderr)
        return 2
    print(report.table([r for r in rows if "ttft_ms" in r], COLUMNS))
    return 1 if any(r.get("same_text", 0) < r.get("prompts", 0) for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

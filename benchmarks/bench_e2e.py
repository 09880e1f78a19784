"""A whole vLLM engine, one GPU: time per output token, time to first token, memory; tilequant beside bf16, W4A16 and W8A8-INT8.

    python benchmarks/bench_e2e.py --folder SCRATCH [--methods tilequant bf16 w4a16 w8a8] [--batch 1 8 16 32 64]
    python benchmarks/bench_e2e.py --folder SCRATCH --tiny --methods tilequant bf16     # anywhere, to try it

Weights are random (`synthetic.py`), all settings equal, CUDA graphs on where the device has them. One engine serves every
profile and batch of a method. The thresholds of a profile are scaled until the loaded bits, counted from the activations of
decode steps in an eager engine of the same checkpoint, meet its name. A method that cannot run is named at the end, never
estimated. Writes `benchmarks/results/e2e.<device>.json`. Runs in the serving environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import report
import synthetic
import torch
from bench_parallel import engine_run, loaded_bits
from legal_sizes import Shape

from vllm_tilequant.schema import LEVELS, QUANT_METHOD

BIG = (Shape("8B shape", 4096, 14336, 32, 8, 128), 32, 128256)
TINY = (Shape("tiny", 256, 512, 4, 2, 64), 2, 512)
SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
#: Prompts of the row for the first token, and of those for the others.
LONG, PROMPT, OUTPUT = 6000, 128, 256
NEAR_BITS = 0.1
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}
METHODS = ("tilequant", "bf16", "w4a16", "w8a8")
COLUMNS = {"method": "", "profile": "", "batch": "d", "prompt": "d", "ttft_ms": ".1f", "tpot_ms": ".3f", "loaded_bits": ".2f"}
COLUMNS |= {"resident_bits": ".2f", "resident_gib": ".2f", "peak_gib": ".2f", "load_s": ".0f"}


class Probe:
    """Becomes part of vLLM's worker."""

    def tile_layers(self) -> list[Any]:
        model = self.model_runner.model  # type: ignore[attr-defined]
        return [m for m in model.modules() if hasattr(m, "active_thresholds")]

    def use_profile(self, profile: str, factor: float) -> None:
        for layer in self.tile_layers():
            layer.quant_method.set_profile(layer, profile)
            layer.active_thresholds.mul_(factor)

    def record(self) -> None:
        """Keep the inputs of decode steps of one row, in an eager engine."""
        self.rows: dict[int, list[torch.Tensor]] = {}

        def before(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            if x.shape[0] == 1:
                self.rows.setdefault(id(layer), []).append(x.float().abs().cpu())

        self.hooks = [layer.register_forward_pre_hook(before) for layer in self.tile_layers()]

    def counted(self, factors: list[float]) -> list[float]:
        """Loaded bits of what was recorded, were the thresholds multiplied by each of `factors`."""
        found = []
        for factor in factors:
            levels = [0.0] * len(LEVELS)
            for layer in self.tile_layers():
                outputs = sum(member.module.out_features for member in layer.quant_method.members)
                level = torch.bucketize(torch.cat(self.rows[id(layer)]), layer.active_thresholds.cpu() * factor)
                for i, n in enumerate(torch.bincount(level.flatten(), minlength=len(LEVELS)).tolist()):
                    levels[i] += n * outputs
            found.append(loaded_bits(levels))
        return found

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.rows.clear()

    def sizes(self) -> dict[str, float]:
        """Bytes of all parameters and buffers, of those of decoder linears, and the most that was allocated."""
        model = self.model_runner.model  # type: ignore[attr-defined]

        def total(modules: Any) -> int:
            tensors = {t.data_ptr(): t.nbytes for m in modules for t in (*m.parameters(), *m.buffers())}
            return sum(tensors.values())

        linears = [m for n, m in model.named_modules() if hasattr(m, "quant_method") and ".layers." in n and "_proj" in n]
        return {
            "resident": total([model]),
            "linears": total(linears),
            "peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }


def run_engine(options: dict[str, Any], output: Path) -> None:
    """One engine in this process; what to measure comes in `options`, what was measured goes to `output`."""
    from vllm import LLM, SamplingParams

    work, vocab = options.pop("work"), options.pop("vocab")
    start = time.monotonic()
    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, seed=0, worker_extension_cls="bench_e2e.Probe", **options)
    load_s = time.monotonic() - start
    g = torch.Generator().manual_seed(0)

    def seconds(batch: int, prompt: int, tokens: int, repeats: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": torch.randint(3, vocab, (prompt,), generator=g).tolist()} for _ in range(batch)]
        times = []
        for _ in range(repeats + 1):  # the first warms up
            began = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            times.append(time.perf_counter() - began)
        return median(times[1:])

    rows: list[dict[str, Any]] = []
    for profile in work["profiles"]:
        if work["count"]:
            low, high = 0.25, 4.0  # loaded bits fall as the factor rises
            llm.collective_rpc("use_profile", args=(profile, 1.0))
            llm.collective_rpc("record")
            seconds(1, work["prompt"], 9, 1)
            for _ in range(16):
                middle = (low * high) ** 0.5
                bits = llm.collective_rpc("counted", args=([middle],))[0][0]
                low, high = (middle, high) if bits > float(profile) else (low, middle)
            llm.collective_rpc("stop")
            llm.collective_rpc("use_profile", args=(profile, high))
            llm.collective_rpc("record")
            seconds(1, work["prompt"], 9, 1)
            bits = llm.collective_rpc("counted", args=([1.0],))[0][0]
            llm.collective_rpc("stop")
            rows.append({"profile": profile, "factor": high, "loaded_bits": bits})
            continue
        if profile is not None:
            llm.collective_rpc("use_profile", args=(profile, work["factors"][profile]))
        for batch in work["batch"]:
            first = seconds(batch, work["prompt"], 1, work["repeats"])
            whole = seconds(batch, work["prompt"], work["output"] + 1, work["repeats"])
            row = {"profile": profile, "batch": batch, "prompt": work["prompt"], "output": work["output"]}
            rows.append(row | {"ttft_ms": 1e3 * first, "tpot_ms": 1e3 * (whole - first) / work["output"]})
    if not work["count"]:
        first = seconds(1, work["long"], 1, work["repeats"])
        profile = work["profiles"][-1]
        row = {"profile": profile, "batch": 1, "prompt": work["long"], "output": 1}
        rows.append(row | {"ttft_ms": 1e3 * first, "tpot_ms": None})
    output.write_text(json.dumps({"rows": rows, "load_s": load_s, "sizes": llm.collective_rpc("sizes")[0]}))


def engine(args: argparse.Namespace, name: str, options: dict[str, Any]) -> dict[str, Any]:
    return engine_run(args, name, __file__, **options)


def measure(args: argparse.Namespace, method: str, device: str) -> list[dict[str, Any]]:
    shape, layers, vocab = TINY if args.tiny else BIG
    folder = args.folder / method
    length = {"long": args.long, "prompt": args.prompt, "output": args.output_tokens}
    work: dict[str, Any] = {"batch": args.batch, "repeats": args.repeats, "profiles": [None], "factors": {}, "count": False}
    options: dict[str, Any] = {"model": str(folder), "dtype": "bfloat16", "vocab": vocab, "work": work | length}
    options |= {"max_model_len": max(args.long, args.prompt + args.output_tokens) + 64, **SETTINGS}
    options |= {"enforce_eager": True} if device == "cpu" else {"gpu_memory_utilization": 0.6}
    counted = {}
    if method == "tilequant":
        synthetic.write_tilequant(folder, shape, layers, vocab, args.prompt + args.output_tokens // 2, device)
        options["work"]["profiles"] = args.profile
        options["additional_config"] = {QUANT_METHOD: {"profile": args.profile[0]}}
        found = engine(args, "count", options | {"enforce_eager": True, "work": options["work"] | {"count": True}})["rows"]
        counted = {row["profile"]: row["loaded_bits"] for row in found}
        options["work"]["factors"] = {row["profile"]: row["factor"] for row in found}
        if far := {p: bits for p, bits in counted.items() if abs(bits - float(p)) > NEAR_BITS}:
            raise ValueError(f"loaded bits {far} are not within {NEAR_BITS} of their profiles")
    else:
        quantization = {"bf16": None, "w4a16": synthetic.W4A16, "w8a8": W8A8}[method]
        synthetic.write_config(folder, shape, layers, vocab, quantization)
        options["load_format"] = "dummy"
    got = engine(args, method, options)
    sizes, weights = got["sizes"], layers * sum(n * k for n, k in shape.linears().values())
    common = {
        "resident_gib": sizes["resident"] / 2**30, "peak_gib": sizes["peak"] / 2**30 or None,
        "resident_bits": 8 * sizes["linears"] / weights, "load_s": got["load_s"], "tp": 1, "pp": 1, "repeats": args.repeats,
        **SETTINGS,
    }  # fmt: skip
    head = {"model": shape.name, "method": method}
    return [head | row | {"loaded_bits": counted.get(row["profile"])} | common for row in got["rows"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="new folder for models and logs (some 10 GB)")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--profile", nargs="+", default=list(synthetic.PROFILES), choices=synthetic.PROFILES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT)
    parser.add_argument("--long", type=int, default=LONG, help="prompt of the row for the first token")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/e2e.<device>.json")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        run_engine(json.loads(args.engine), args.output)
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path, rows, missing = args.json or report.default_path("e2e", device), [], {}
    args.folder.mkdir(parents=True)
    for method in args.methods:
        try:
            rows += measure(args, method, device)
        except (OSError, ValueError) as e:  # the other methods are still worth their time
            missing[method] = str(e)
            continue
        report.write(path, report.envelope("e2e", device, rows))
        print(report.table([r for r in rows if r["method"] == method], COLUMNS), flush=True)
    for method, why in missing.items():
        print(f"not measured: {method}: {why}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

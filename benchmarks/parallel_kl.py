"""KL between tensor-parallel sizes of one checkpoint, from vLLM's own engine: every logit over the whole vocabulary.

    python benchmarks/parallel_kl.py --checkpoint FOLDER --text wiki.test.txt --sizes 1 3 [--profile off] [--dtype bfloat16]

One engine after the other gets the same windows of text as prompts; a worker extension keeps the logits of rank 0. Prints
KL(first size || other size) and writes `benchmarks/results/parallel_kl.<device>.json`. With grading off and in the served dtype
the bar is 2 milli-nats: exit code 1 above it. Runs in the serving environment; on a CPU it also sets what vLLM needs there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
import torch

from vllm_tilequant.evaluate import compare, windows
from vllm_tilequant.schema import ACTIVATIONS, PROFILE_OFF, QUANT_METHOD

MAX_KL = 2.0  # milli-nats between two sizes, grading off
COLUMNS = {
    "profile": "",
    "activation": "",
    "dtype": "",
    "tp": "d",
    "against": "d",
    "kl_milli": ".4f",
    "kl_max": ".3f",
    "top1": ".2%",
}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Recorder:
    """Becomes part of vLLM's worker (`worker_extension_cls`)."""

    def record_logits(self, folder: str) -> None:
        """From now on, keep the logits of every prompt in `folder`, where this rank has them."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        compute, self.recorded = model.compute_logits, 0

        def recording(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(hidden, *args, **kwargs)
            # One row is the token to be sampled; the prompt's rows come all at once.
            if logits is not None and hidden.shape[0] > 1 and self.rank == 0:  # type: ignore[attr-defined]
                torch.save(logits.float().cpu(), Path(folder, f"{self.recorded}.pt"))
                self.recorded += 1
            return logits

        model.compute_logits = recording


def run_engine(args: argparse.Namespace) -> None:
    """Feed the windows to one engine; its logits go to `args.logits`."""
    from vllm import LLM, SamplingParams

    ids = windows(args.checkpoint, args.text, args.tokens, args.window).tolist()
    llm = LLM(
        model=str(args.checkpoint),
        dtype=args.dtype,
        tensor_parallel_size=args.size,
        max_model_len=args.window + 1,
        max_num_batched_tokens=max(args.window + 1, 2048),
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_custom_all_reduce=True,
        seed=0,
        worker_extension_cls="parallel_kl.Recorder",
        additional_config={QUANT_METHOD: {"profile": args.profile, "activation": args.activation}},
    )
    llm.collective_rpc("record_logits", args=(str(args.logits),))
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    for window in ids:
        llm.generate({"prompt_token_ids": window}, sampling, use_tqdm=False)


def measure(args: argparse.Namespace) -> int:
    first, *others = args.sizes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common = {"name": args.checkpoint.resolve().name, "profile": args.profile, "activation": args.activation}
    rows = []
    with tempfile.TemporaryDirectory(prefix="tq-kl-") as scratch:
        folders = {size: engine(args, size, Path(scratch), device) for size in args.sizes}
        names = sorted(p.name for p in folders[first].iterdir())
        for size in others:
            if sorted(p.name for p in folders[size].iterdir()) != names:
                raise ValueError(f"sizes {first} and {size} answered different numbers of prompts")
            pairs = [compare(torch.load(folders[first] / n), torch.load(folders[size] / n)) for n in names]
            kl, same = (torch.cat(t) for t in zip(*pairs, strict=True))
            rows.append(
                common
                | {"dtype": args.dtype, "tp": size, "against": first, "kl_milli": 1e3 * float(kl.mean())}
                | {"kl_max": 1e3 * float(kl.max()), "top1": float(same.double().mean()), "tokens": kl.numel()}
                | {"window": args.window}
            )
    path = args.json or report.default_path("parallel_kl", device)
    kept = json.loads(path.read_text())["rows"] if args.append and path.exists() else []
    report.write(path, report.envelope("parallel_kl", device, kept + rows))
    print(report.table(rows, COLUMNS))
    bar = args.profile == PROFILE_OFF
    for row in rows if bar else []:
        word = "PASS" if row["kl_milli"] < MAX_KL else "FAIL"
        print(word, f"KL between sizes {row['against']} and {row['tp']}: {row['kl_milli']:.4f} < {MAX_KL} milli-nats")
    return 1 if bar and any(row["kl_milli"] >= MAX_KL for row in rows) else 0


def engine(args: argparse.Namespace, size: int, scratch: Path, device: str) -> Path:
    """Run one size in a process of its own, which takes its workers with it; returns the folder with its logits."""
    folder = scratch / str(size)
    folder.mkdir()
    given = ("checkpoint", "text", "tokens", "window", "profile", "activation", "dtype")
    options = [part for name in given for part in (f"--{name}", str(getattr(args, name)))]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**(ON_CPU if device == "cpu" else {}), **os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, __file__, *options, "--sizes", str(size), "--size", str(size), "--logits", str(folder)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL if args.quiet else sys.stderr)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--sizes", required=True, type=int, nargs="+", help="tensor-parallel sizes; the first is compared with")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--profile", default=PROFILE_OFF)
    parser.add_argument("--activation", default="group64", choices=ACTIVATIONS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/parallel_kl.<device>.json")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--quiet", action="store_true", help="without the engines' logs")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.logits:
        run_engine(args)
        return 0
    if len(args.sizes) < 2:
        parser.error("--sizes needs two sizes or more")
    try:
        return measure(args)
    except (OSError, ValueError, subprocess.CalledProcessError) as e:
        print(f"parallel_kl: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

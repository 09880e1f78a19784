"""KL between tensor-parallel sizes of one checkpoint, from vLLM's own engine: every logit over the whole vocabulary.

    python benchmarks/parallel_kl.py --checkpoint FOLDER --text wiki.test.txt --engine tp=1 --engine tp=3

One engine after the other gets the same windows of text as prompts, and a worker extension keeps the logits of rank 0. An
engine is a list of `tp`, `dtype`, `activation`, `profile` and `chunk` (tokens of a prompt at once); what is left out is as in
the first engine, and there 1, bfloat16, group64, off, the whole window. Prints KL(first engine || other) and writes
`benchmarks/results/parallel_kl.<device>.json`. `tp=1,chunk=128` beside `tp=1` is the control: the same server with sums of
another order. Runs in the serving environment; on a CPU it also sets what vLLM needs there. A folder of an ordinary model
works as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch

from vllm_tilequant.evaluate import compare, windows
from vllm_tilequant.schema import PROFILE_OFF, QUANT_METHOD

COLUMNS = {"name": "", "reference": "", "engine": "", "kl_milli": ".3f", "kl_se": ".3f", "kl_max": ".1f", "top1": ".2%"}
DEFAULTS = {"tp": "1", "dtype": "bfloat16", "activation": "group64", "profile": PROFILE_OFF, "chunk": "0"}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Recorder:
    """Becomes part of vLLM's worker (`worker_extension_cls`)."""

    def record_logits(self, folder: str) -> None:
        """From now on, keep the logits of every prompt in `folder`, where this rank has them."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        compute, self.recorded = model.compute_logits, 0

        def recording(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(hidden, *args, **kwargs)
            # One row is the token to be sampled; the prompt's rows come all at once, or chunk by chunk.
            if logits is not None and hidden.shape[0] > 1 and self.rank == 0:  # type: ignore[attr-defined]
                torch.save(logits.float().cpu(), Path(folder, f"{self.recorded:06d}.pt"))
                self.recorded += 1
            return logits

        model.compute_logits = recording


def run_engine(args: argparse.Namespace, engine: dict[str, str]) -> None:
    """Feed the windows to one engine; its logits go to `args.logits`."""
    from vllm import LLM, SamplingParams

    ids = windows(args.checkpoint, args.text, args.tokens, args.window).tolist()
    llm = LLM(
        model=str(args.checkpoint),
        dtype=engine["dtype"],
        tensor_parallel_size=int(engine["tp"]),
        max_model_len=args.window + 1,
        max_num_batched_tokens=int(engine["chunk"]) or args.window + 1,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_custom_all_reduce=True,
        seed=0,
        worker_extension_cls="parallel_kl.Recorder",
        additional_config={QUANT_METHOD: {k: engine[k] for k in ("profile", "activation")}},
    )
    llm.collective_rpc("record_logits", args=(str(args.logits),))
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    for window in ids:
        llm.generate({"prompt_token_ids": window}, sampling, use_tqdm=False)


def described(engine: dict[str, str], reference: dict[str, str] = DEFAULTS) -> str:
    return ",".join(f"{k}={v}" for k, v in engine.items() if k == "tp" or v != reference[k])


def parsed(text: str, defaults: dict[str, str]) -> dict[str, str]:
    given = dict(pair.partition("=")[::2] for pair in text.split(","))
    if unknown := sorted(set(given) - set(DEFAULTS)):
        raise ValueError(f"--engine {text}: unknown keys {unknown}, legal ones are {list(DEFAULTS)}")
    return defaults | given


def logits(folder: Path, rows: int) -> Iterator[torch.Tensor]:
    """[rows, V] of every window, whatever the chunks they were computed in."""
    chunks: list[torch.Tensor] = []
    for path in sorted(folder.iterdir()):
        chunks.append(torch.load(path))
        if sum(len(c) for c in chunks) >= rows:
            yield torch.cat(chunks)
            chunks = []


def measure(args: argparse.Namespace) -> int:
    first = parsed(args.engine[0], DEFAULTS)
    others = [parsed(text, first) for text in args.engine[1:]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    with tempfile.TemporaryDirectory(prefix="tq-kl-") as scratch:
        reference = start(args, first, Path(scratch, "reference"), device)
        for i, other in enumerate(others):
            folder = start(args, other, Path(scratch, str(i)), device)
            both = zip(logits(reference, args.window - 1), logits(folder, args.window - 1), strict=True)
            kl, same = (torch.cat(t) for t in zip(*(compare(p, q) for p, q in both), strict=True))
            rows.append(
                {"name": args.checkpoint.resolve().name, "reference": described(first), "engine": described(other, first)}
                | {"kl_milli": 1e3 * float(kl.mean()), "kl_se": 1e3 * float(kl.std()) / math.sqrt(kl.numel())}
                | {"kl_max": 1e3 * float(kl.max()), "top1": float(same.double().mean()), "tokens": kl.numel()}
                | {"window": args.window}
            )
            shutil.rmtree(folder)
    path = args.json or report.default_path("parallel_kl", device)
    kept = json.loads(path.read_text())["rows"] if args.append and path.exists() else []
    report.write(path, report.envelope("parallel_kl", device, kept + rows))
    print(report.table(rows, COLUMNS))
    return 0


def start(args: argparse.Namespace, engine: dict[str, str], folder: Path, device: str) -> Path:
    """Run one engine in a process of its own, which takes its workers with it; returns the folder with its logits."""
    folder.mkdir()
    given = ("checkpoint", "text", "tokens", "window")
    options = [part for name in given for part in (f"--{name}", str(getattr(args, name)))]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**(ON_CPU if device == "cpu" else {}), **os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, __file__, *options, "--engine", described(engine), "--logits", str(folder)]
    with folder.with_suffix(".log").open("w+") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            log.seek(0)
            raise OSError(f"the engine {described(engine)} ended with {done.returncode}:\n{log.read()[-3000:]}")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument(
        "--engine", required=True, action="append", help="such as tp=3,dtype=float32; the first is compared with"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/parallel_kl.<device>.json")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.logits:
            run_engine(args, parsed(args.engine[0], DEFAULTS))
            return 0
        return measure(args)
    except (OSError, ValueError) as e:
        print(f"parallel_kl: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

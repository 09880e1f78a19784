"""Speculative decoding: how many drafted tokens are accepted, with grading and without.

    python benchmarks/bench_drafts.py --folder SCRATCH --quantized CHECKPOINT --dense SOURCE [--text FILE]

Targets are both models, drafts are n-grams and the other model. Each pair answers the same prompts greedily, the
quantized model under every `--profile`; draft and target take the same. Prompts are stretches of `--text` (plain text) or made
up. `same_text` counts the answers that equal those of the target alone with the same profile: all of them in float32.
Writes `benchmarks/results/drafts.<device>.json`, replacing only rows of the same case. Runs in the serving environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import report
import torch
from engine_run import engine_run

from vllm_tilequant.schema import QUANT_METHOD

COLUMNS = {"target": "", "draft": "", "profile": "", "drafted": "d", "accepted": "d", "rate": ".1%", "same_text": ""}
CASE = ("model", "target", "draft", "profile", "dtype", "text")
#: Tokens drafted ahead: verifying them with one more row is graded for one request.
AHEAD = 3


def run_engine(options: dict[str, Any], output: Path) -> None:
    """Greedy token ids of the prompts, and vLLM's counters of drafts."""
    from vllm import LLM, SamplingParams

    prompts, tokens = options.pop("prompts"), options.pop("tokens")
    llm = LLM(enable_prefix_caching=False, seed=0, disable_log_stats=False, max_num_seqs=1, **options)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    answers = [llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafts = [int(counters.get(f"vllm:spec_decode_num_{what}_tokens", 0)) for what in ("draft", "accepted")]
    output.write_text(json.dumps({"answers": [list(a) for a in answers], "drafts": drafts}))


def draw_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Stretches of the text, evenly spaced; without a text repeated random tokens, of which n-grams can draft something."""
    if args.text is None:
        vocab = json.loads((args.dense / "config.json").read_text())["vocab_size"]
        g = torch.Generator().manual_seed(0)
        half = args.prompt // 2
        return [2 * torch.randint(3, vocab, (half,), generator=g).tolist() for _ in range(args.prompts)]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(args.dense)(args.text.read_text()[: 40 * args.prompt * args.prompts])["input_ids"]
    if len(ids) < args.prompt * args.prompts:
        raise ValueError(f"{args.text} gives {len(ids)} tokens, wanted {args.prompt * args.prompts}: fewer or shorter prompts")
    step = len(ids) // args.prompts
    return [ids[i * step : i * step + args.prompt] for i in range(args.prompts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="new folder for logs")
    parser.add_argument("--quantized", type=Path, help="a tilequant checkpoint")
    parser.add_argument("--dense", type=Path, help="its source model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--profile", nargs="+", default=["off", "3.0"])
    parser.add_argument("--targets", nargs="+", default=["quantized", "dense"], choices=("quantized", "dense"))
    drafts = ("ngram", "quantized", "dense")
    parser.add_argument("--drafts", nargs="+", default=list(drafts), choices=drafts)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/drafts.<device>.json")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        run_engine(json.loads(args.engine), args.output)
        return 0
    if args.quantized is None or args.dense is None:
        parser.error("--quantized and --dense are wanted")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.folder.mkdir(parents=True)
    models = {"quantized": str(args.quantized), "dense": str(args.dense)}
    options = {"prompts": draw_prompts(args), "tokens": args.tokens, "dtype": args.dtype}
    options |= {"max_model_len": args.prompt + args.tokens + 8} | ({"enforce_eager": True} if device == "cpu" else {})
    path = args.json or report.default_path("drafts", device)
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows: list[dict[str, Any]] = []
    for target in args.targets:
        alone: dict[str | None, Any] = {}
        for draft in (d for d in args.drafts if d != target):
            for profile in args.profile if "quantized" in (target, draft) else (None,):
                chosen = {"additional_config": {QUANT_METHOD: {"profile": profile}}} if profile else {}
                own = profile if target == "quantized" else None
                common = options | {"model": models[target]} | chosen
                if own not in alone:
                    alone[own] = engine_run(args, f"{target}-{own}", __file__, **common)["answers"]
                ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
                method = ngram if draft == "ngram" else {"method": "draft_model", "model": models[draft]}
                speculative = {"speculative_config": method | {"num_speculative_tokens": AHEAD}}
                got = engine_run(args, f"{target}-{draft}-{profile}", __file__, **common, **speculative)
                drafted, accepted = got["drafts"]
                same = sum(a == b for a, b in zip(got["answers"], alone[own], strict=True))
                rows.append(
                    {"model": args.dense.name, "target": target, "draft": draft, "profile": profile, "ahead": AHEAD}
                    | {"drafted": drafted, "accepted": accepted, "rate": accepted / drafted if drafted else None}
                    | {"same_text": f"{same} of {args.prompts}", "dtype": args.dtype, "prompt": args.prompt}
                    | {"tokens": args.tokens, "text": args.text.name if args.text else None}
                )
                print(report.table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
                kept = [row for row in kept if any(row[key] != rows[-1][key] for key in CASE)]
                report.write(path, report.envelope("drafts", device, kept + rows))
    print(report.table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())

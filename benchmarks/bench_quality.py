"""Quality of a checkpoint against its source model, at stored precision and at every profile.

    python benchmarks/bench_quality.py --model SOURCE --checkpoint FOLDER --text wiki.test.txt --tokens 65536

Prints a table, writes `benchmarks/results/quality.<device>.json`, and checks three bars (set for the sample model with 60 % of
its tiles at 4 bits on WikiText-2): exit code 1 if one fails, 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import torch

from vllm_tilequant import evaluate as ev
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.cli.evaluate import print_progress
from vllm_tilequant.schema import PROFILE_FULL

#: KL in milli-nats, bits per weight.
MAX_STATIC_KL = 70.0
MAX_GRADED_KL = 180.0
MAX_GRADED_BITS = 3.06
MAX_STORED_BITS = 5.64

COLUMNS = {
    "phase": "",
    "profile": "",
    "activation": "",
    "stored_bits": ".3f",
    "loaded_bits": ".3f",
    "kl_milli": ".1f",
    "kl_se": ".1f",
    "kl_p99": ".0f",
    "top1": ".1%",
    "ppl": ".4f",
}


def check_bars(rows: Sequence[dict[str, Any]]) -> list[tuple[bool, str]]:
    """(passed, sentence) of every bar.

    The worst of the static rows counts; of the graded ones the best that loads few enough bits, since each profile is a choice.
    """
    stored = rows[0]["stored_bits"]
    bars = [(stored <= MAX_STORED_BITS, f"stored bits {stored:.3f} <= {MAX_STORED_BITS}")]
    static = max(r["kl_milli"] for r in rows if r["phase"] == "static")
    bars.append((static <= MAX_STATIC_KL, f"static KL {static:.1f} <= {MAX_STATIC_KL:g} milli-nats"))
    graded = [r for r in rows if r["phase"] == "graded" and r["loaded_bits"] <= MAX_GRADED_BITS]
    if graded:
        best = min(graded, key=lambda r: r["kl_milli"])
        what = f"graded KL {best['kl_milli']:.1f} at {best['loaded_bits']:.3f} loaded bits (profile {best['profile']})"
        bars.append((best["kl_milli"] <= MAX_GRADED_KL, f"{what} <= {MAX_GRADED_KL:g} milli-nats"))
    else:
        bars.append((False, f"a profile that loads at most {MAX_GRADED_BITS} bits: there is none"))
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="source model: folder or hub id")
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text to predict")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--profile", action="append", help="repeatable; every stored one and 'full' if left out")
    parser.add_argument("--batch", type=int, help="windows at once; by the vocabulary if left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", help="name of the rows; the checkpoint folder's if left out")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/quality.<device>.json")
    args = parser.parse_args()
    try:
        return measure(args)
    except (OSError, ValueError) as e:
        print(f"bench_quality: {e}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace) -> int:
    schema = Checkpoint.open(args.checkpoint).schema
    profiles = args.profile or [*schema.profiles.names, PROFILE_FULL]
    configurations = [
        *ev.configurations(schema, profiles, ["none", "group64"], ["static"]),
        *ev.configurations(schema, profiles, ["group64"], ["graded"]),
    ]
    rows = ev.evaluate(
        args.checkpoint,
        args.model,
        ev.windows(args.checkpoint, args.text, args.tokens, args.window),
        configurations,
        device=args.device,
        batch=args.batch,
        name=args.name,
        progress=print_progress,
    )
    path = args.json or report.default_path("quality", args.device)
    report.write(path, report.envelope("quality", args.device, rows))
    print(report.table(rows, COLUMNS))
    first = rows[0]
    print(f"{first['tokens']} tokens, {first['dtype']}; reference perplexity {first['ppl_reference']:.4f}; rows in {path}")
    bars = check_bars(rows)
    for passed, sentence in bars:
        print("PASS" if passed else "FAIL", sentence)
    return 0 if all(passed for passed, _ in bars) else 1


if __name__ == "__main__":
    sys.exit(main())

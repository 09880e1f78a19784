"""Write the tables of README.md from the committed results; `--check` only says whether they are up to date.

python benchmarks/readme.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUALITY = {
    "recipe": "",
    "stored bits": ".2f",
    "read": "",
    "loaded bits": ".2f",
    "KL": ".1f",
    "KL p99": ".0f",
    "same top-1": ".1%",
    "perplexity": ".2f",
}
PEERS = {"bf16 µs": "bf16", "INT8 µs": "cutlass_int8", "Marlin 4-bit µs": "marlin4"}
#: Rows at stored precision by the arithmetic of activations.
STATIC = {"group64": "all stored bits", "token_smooth": "all stored bits, long prompts"}


def quality() -> str:
    """The quality table: what is served (INT8 activations per 64 inputs), static and at every profile."""
    data = json.loads((RESULTS / "quality.h200.json").read_text())
    rows = [
        {
            "recipe": r["recipe"],
            "stored bits": r["stored_bits"],
            "read": STATIC[r["activation"]] if r["phase"] == "static" else f"graded, profile {r['profile']}",
            "loaded bits": r["loaded_bits"],
            "KL": r["kl_milli"],
            "KL p99": r["kl_p99"],
            "same top-1": r["top1"],
            "perplexity": r["ppl"],
        }
        for r in data["rows"]
        if r["activation"] in STATIC and r["profile"] != "full" and r["text"] == "test"
    ]
    beside = [r for r in data["rows"] if r["text"] != "test" and r["phase"] == "graded"]
    missing = sorted({p.stem for p in (ROOT / "configs" / "recipes").glob("*.yaml")} - {r["recipe"] for r in data["rows"]})
    first = data["rows"][0]
    others = " and ".join(
        f"{r['kl_milli']:.1f} at {r['loaded_bits']:.2f} loaded bits for {r['recipe']}, profile {r['profile']}" for r in beside
    )
    return (
        f"{first['model']}, calibrated on {first['calibration_tokens']} tokens of WikiText-2 valid, judged on "
        f"{first['tokens']} of its test part in windows of {first['window']}: KL divergence to the source model in "
        f"milli-nats (its perplexity: {first['ppl_reference']:.2f}), INT8 activations as served (per 64 inputs, in long "
        "prompts per row), grading at every position. "
        f"{data['device']}, {data['measured_at'][:10]}, `make quality` "
        f"([JSON](benchmarks/results/quality.h200.json)).\n\n{report.table(rows, QUALITY)}\n\n"
        "The sample model's weights come from a 4-bit file and a model of this size is fragile: trust the order of the rows "
        f"more than their size. On another text ({beside[0]['tokens']} tokens of GSM8K) KL is {others}. "
        + (f"The recipes {', '.join(missing)} are not measured yet with these codes, " if missing else "")
        + ("nor are peers on the same text." if missing else "Peers on the same text are not measured yet.")
    )


def decode() -> str:
    """Microseconds of the graded GEMV beside its peers, at the levels' four mixes."""
    data = json.loads((RESULTS / "decode_bitplane.h200.json").read_text())
    rows = [
        {
            "N × K": f"{r['N']} × {r['K']}",
            "rows": r["M"],
            "loaded bits": r["loaded_bits"],
            "µs": r["us"],
            "× Marlin 4-bit": r["us"] / r["peers_us"]["marlin4"],
            "Marlin 4-bit µs": r["peers_us"]["marlin4"],
            "INT8 µs": r["peers_us"]["cutlass_int8"],
            "bf16 µs": r["peers_us"]["bf16"],
        }
        for r in data["rows"]
    ]
    columns = {"N × K": "", "rows": "d", "loaded bits": ".2f", "µs": ".1f", "× Marlin 4-bit": ".2f"}
    columns |= {"Marlin 4-bit µs": ".1f", "INT8 µs": ".1f", "bf16 µs": ".1f"}
    return (
        "One decode step of one linear, weights with 60 % of the tiles at 4 bits, levels drawn per channel, preparation and "
        f"reduction included, CUDA-graph replay over rotated weights; peers in the same run. {data['device']}, "
        f"{data['measured_at'][:10]}, `python benchmarks/bench_decode_bitplane.py` "
        f"([JSON](benchmarks/results/decode_bitplane.h200.json)). With more rows, more channels are wanted by one of them.\n\n"
        f"{report.table(rows, columns)}"
    )


def prefill() -> str:
    """Microseconds of a linear over many rows beside its peers."""
    data = json.loads((RESULTS / "prefill_int8.h200.json").read_text())
    rows = [
        {
            "N × K": f"{r['N']} × {r['K']}",
            "rows": r["M"],
            "kernel": r["kernel"],
            "µs": r["us"],
            "of which before the product": r["us_prepare"] + (r["us_expand"] or 0),
        }
        | {"× bf16": r["ratio_bf16"]}
        | {name: r["peers_us"][key] for name, key in PEERS.items()}
        for r in data["rows"]
    ]
    columns = {"N × K": "", "rows": "d", "kernel": "", "µs": ".1f", "of which before the product": ".1f", "× bf16": ".2f"}
    return (
        "Prompts and batches beyond 8 rows: one linear from bf16 activations to bf16 outputs, weights with 60 % of the tiles "
        "at 4 bits, quantized rows and expanded tiles included, CUDA-graph replay over rotated weights; peers in "
        f"the same run. {data['device']}, {data['measured_at'][:10]}, `python benchmarks/bench_prefill_int8.py` "
        f"([JSON](benchmarks/results/prefill_int8.h200.json)).\n\n{report.table(rows, columns | dict.fromkeys(PEERS, '.1f'))}"
    )


def engine() -> str:
    """Milliseconds per output token and to the first one, of whole engines: a line for a method, a column for a batch."""
    data = json.loads((RESULTS / "e2e.h200.json").read_text())
    lines: dict[tuple[str, str | None], dict[str, object]] = {}
    for r in data["rows"]:
        line = lines.setdefault((r["method"], r["profile"]), {"method": r["method"], "profile": r["profile"]})
        line |= {"bits held": r["resident_bits"]}
        if r["tpot_ms"] is None:
            long = r["prompt"]
            line["first token, ms"] = r["ttft_ms"]
        else:
            line[f"{r['batch']}"] = r["tpot_ms"]
    first = data["rows"][0]
    batches = sorted({r["batch"] for r in data["rows"] if r["tpot_ms"] is not None})
    columns = {"method": "", "profile": "", "bits held": ".2f"} | {f"{b}": ".2f" for b in batches} | {"first token, ms": ".0f"}
    return (
        f"A whole engine ({first['model']}, random weights, prompts of {first['prompt']} tokens, {first['output']} outputs, "
        f"`max_num_seqs` {first['max_num_seqs']}, CUDA graphs): milliseconds per output token at 1 to {batches[-1]} requests, "
        f"and to the first token of a prompt of {long}. Thresholds are set so that the loaded bits counted in the run are the "
        f"profile's; `bits held` is memory for each weight of the linears. {data['device']}, vLLM {data['versions']['vllm']}, "
        f"{data['measured_at'][:10]}, `python benchmarks/bench_e2e.py` ([JSON](benchmarks/results/e2e.h200.json)).\n\n"
        f"{report.table(lines.values(), columns)}"
    )


TABLES = {"quality": quality, "decode": decode, "prefill": prefill, "engine": engine}


def updated(text: str) -> str:
    """README with every marked table written anew."""
    return report.with_tables(text, {f"{name} table": make() for name, make in TABLES.items()})


if __name__ == "__main__":
    sys.exit(report.rewrite(ROOT / "README.md", updated))

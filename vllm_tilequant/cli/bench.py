"""`tilequant bench`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Generator
from contextlib import closing
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_tilequant import engine
from vllm_tilequant.checkpoint.card import CALIBRATION
from vllm_tilequant.checkpoint.files import read_config
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.cli import doctor
from vllm_tilequant.cli.output import JsonFlag, print_json, print_table
from vllm_tilequant.cli.serve import Activation, CopyFlag, PrefillOption, serve_command, vllm_program

_GIB = float(1 << 30)


class How(StrEnum):
    serve = "serve"
    latency = "latency"


def bench(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to write: bench.json, bench.png, logs.", show_default=False)],
    reference: Annotated[Path | None, typer.Option(help="Folder of the source model, measured beside it.")] = None,
    profile: Annotated[list[str] | None, typer.Option(help="Profile (repeatable). Default: the checkpoint's.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once (repeatable). Default: 1.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Requests for each batch size; with latency, batches.")] = 32,
    warmups: Annotated[int, typer.Option(min=0, help="Requests before those that count.")] = 3,
    how: Annotated[How, typer.Option(help="vllm bench serve against a server, or vllm bench latency.")] = How.serve,
    activation: Annotated[Activation, typer.Option(help="INT8 per 64 inputs, or none.")] = Activation.group64,
    prefill_activation: PrefillOption = None,
    int8_copy: CopyFlag = False,
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "bfloat16",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    start_seconds: Annotated[float, typer.Option(help="How long a server may take to answer.")] = 1800,
    plot: Annotated[bool, typer.Option(help="Draw bench.png (extra report).")] = True,
    as_json: JsonFlag = False,
    more: Annotated[list[str] | None, typer.Argument(help="After --: options for both engines.", show_default=False)] = None,
) -> None:
    """Measure a checkpoint beside its source model in one run with vLLM's own benchmarks: TTFT and TPOT apart, and memory.

    Each model gets a server of its own, one after the other, on the same random prompts, without prefix caching. TTFT and TPOT
    are medians over the requests. Resident memory is that of the server's processes before the first request, peak memory the
    most until the last; on a GPU vLLM fills what --gpu-memory-utilization allows with its cache, so compare `weights` there:
    what vLLM says its model takes. With --how latency a batch of equal requests runs in one engine; TTFT is its time for
    answers of one token. Options for vLLM follow after --, as in
    `tilequant bench FOLDER OUT --reference MODEL --batch 1 --batch 8 -- --gpu-memory-utilization 0.8`.
    """
    if plot and find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} is there already and not empty: name another folder")
    checkpoint = Checkpoint.open(folder)
    common = ["--max-model-len", str(prompt + answer + 64), "--no-enable-prefix-caching", *(more or [])]
    models: list[tuple[str, str | None, Path, list[str]]] = []
    for one in profile or [checkpoint.schema.profiles.default]:
        command = serve_command(checkpoint, one, activation, prefill_activation, int8_copy, dtype, tp, common)
        models.append(("tilequant", one, folder, command))
    if reference is not None:
        if "quantization_config" in read_config(reference):
            raise ValueError(f"{reference} is quantized: name the original model as --reference")
        parallel = ["--tensor-parallel-size", str(tp)] if tp > 1 else []
        command = ["vllm", "serve", str(reference), "--dtype", dtype, *parallel, *common]
        models.insert(0, (dtype if dtype != "bfloat16" else "bf16", None, reference, command))
    program = vllm_program()
    output.mkdir(parents=True, exist_ok=True)
    loads = [engine.Load(prompt, answer, b, max(requests, b if how is How.serve else 1), warmups, seed) for b in batch or [1]]
    rows: list[dict[str, Any]] = []
    for method, chosen, model, command in models:
        name = f"{method}-{chosen}" if chosen else method
        shown = command if how is How.serve else ["vllm", "bench", "latency", "--model", *command[2:]]
        print(f"bench: {name}: {shlex.join(shown)}", file=sys.stderr, flush=True)
        log = output / f"{name}.log"
        run_with = _served if how is How.serve else _latency
        with closing(run_with([program, *command[1:]], loads, log, start_seconds)) as run:
            for load, measured in run:
                bits = _loaded_bits(checkpoint, chosen, load.batch) if method == "tilequant" else None
                rows.append(
                    {"model": model.resolve().name, "method": method, "profile": chosen, "batch": load.batch}
                    | {"prompt": load.prompt, "output": load.output, **measured, "loaded_bits": bits}
                    | {"tp": tp, "pp": 1, "how": how.value}
                )
                print(f"bench: {name}, batch {load.batch}: {_line(rows[-1])}", file=sys.stderr, flush=True)
                _write(output / "bench.json", rows)  # after every figure: a run that breaks keeps what it has
    if plot:
        from vllm_tilequant.checkpoint.pictures import speed

        (output / "bench.png").write_bytes(speed(rows))
    if as_json:
        print_json(json.loads((output / "bench.json").read_text()))
    else:
        _print(rows)
        print(f"{output / 'bench.json'}{' and bench.png' if plot else ''} written")


Run = Generator[tuple[engine.Load, dict[str, Any]]]


def _served(command: list[str], loads: list[engine.Load], log: Path, start_seconds: float) -> Run:
    with engine.server(command, log, start_seconds) as running:
        resident = running.memory.now()
        for load in loads:
            client = log.with_name(f"{log.stem}-client-{load.batch}.log")
            times = engine.measure(command[0], running, command[2], load, client)
            running.memory.now()
            memory = _memory(resident, running.memory.peak, engine.loaded_gib(log))
            yield load, times | memory | {"load_s": running.load_seconds}


def _latency(command: list[str], loads: list[engine.Load], log: Path, start_seconds: float) -> Run:
    for load in loads:
        times, peak, weights = engine.one_batch(command[0], ["--model", *command[2:]], load, log)
        yield load, times | _memory({}, peak, weights)


def _memory(resident: dict[str, int], peak: dict[str, int], weights: float | None) -> dict[str, Any]:
    kind = "gpu" if "gpu" in peak else "host"
    now = resident.get(kind)
    return {
        "memory": kind,
        "weights_gib": weights,
        "resident_gib": None if now is None else now / _GIB,
        "peak_gib": peak[kind] / _GIB if kind in peak else None,
    }


def _loaded_bits(checkpoint: Checkpoint, profile: str | None, batch: int) -> float | None:
    """Code bits per weight of a decode step: of one row as calibration measured the profile on held-out text, else unknown."""
    if profile == "off":
        return checkpoint.stored_code_bits()
    path = checkpoint.folder / CALIBRATION
    if batch > 1 or not path.is_file():
        return None
    try:
        measured = json.loads(path.read_text())["profiles"][profile]["measured"]
        return float(measured["average"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    found = doctor.hardware()
    device = found["gpus"][0] if found["gpus"] else f"{found['cpu']}, {found['machine']}"
    data = {
        "stem": "e2e",
        "device": device,
        "driver": found["driver"],
        "versions": {k: v for k, v in found["packages"].items() if v},
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def _line(row: dict[str, Any]) -> str:
    times = f"TTFT {row['ttft_ms']:.1f} ms, TPOT {row['tpot_ms']:.2f} ms"
    return f"{times}, peak {_gib(row['peak_gib'])} GiB of {row['memory']} memory"


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _print(rows: list[dict[str, Any]]) -> None:
    headings = ("batch", "TTFT ms", "TPOT ms", "tokens/s", "weights GiB", "resident GiB", "peak GiB", "load s", "loaded bits")
    print_table(
        f"prompts of {rows[0]['prompt']} tokens, answers of {rows[0]['output']}; medians; {rows[0]['memory']} memory",
        {"model": False, "profile": False, **dict.fromkeys(headings, True)},
        [
            (
                f"{r['model']} ({r['method']})",
                r["profile"] or "",
                str(r["batch"]),
                f"{r['ttft_ms']:.1f}",
                f"{r['tpot_ms']:.2f}",
                f"{r['output_tokens_per_s']:.1f}" if "output_tokens_per_s" in r else "",
                *(_gib(r[k]) for k in ("weights_gib", "resident_gib", "peak_gib")),
                f"{r['load_s']:.0f}" if "load_s" in r else "",
                _gib(r["loaded_bits"]),
            )
            for r in rows
        ],
    )

"""A vLLM server or a one-batch run as a process of its own, timed by vLLM's benchmarks, its memory watched from outside.

Imports neither vLLM nor torch: everything goes through the `vllm` command, as a user would call it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOP_SECONDS = 60
ORPHAN_SECONDS = 5
_SAMPLE_SECONDS = 1.0
_PERCENTILES = (50, 90, 99)
_LOADED = re.compile(r"Model loading took ([0-9.]+) GiB")


@dataclass(frozen=True)
class Load:
    """What is asked: `prompts` random prompts of `prompt` tokens with answers of `output` tokens, `batch` of them at once."""

    prompt: int
    output: int
    batch: int
    prompts: int
    warmups: int
    seed: int


class Memory:
    """Memory of a session's processes (host: proportional shares, so that nothing counts twice) and of all GPUs, sampled.

    On GPUs it is what nvidia-smi says is in use beyond what was when the watch began: nothing else may run there.
    """

    def __init__(self, session: int, gpu_before: int | None):
        self._session, self._before = session, gpu_before
        self._end = threading.Event()
        self.peak: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def now(self) -> dict[str, int]:
        """Bytes by kind of memory, `host` and, where nvidia-smi answers, `gpu`; counts towards the peak."""
        found = {"host": session_bytes(self._session)}
        if self._before is not None and (used := gpu_bytes()) is not None:
            found["gpu"] = used - self._before
        for kind, nbytes in found.items():
            self.peak[kind] = max(self.peak.get(kind, 0), nbytes)
        return found

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            self.now()


def session_bytes(session: int) -> int:
    """Proportional resident bytes of every process of a session."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                rollup = (folder / "smaps_rollup").read_text()
                total += 1024 * int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[1])  # type: ignore[index]
        except (OSError, TypeError):  # it ended meanwhile
            continue
    return total


def gpu_bytes() -> int | None:
    """Bytes in use on all GPUs together; None where nvidia-smi does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return sum(int(line) << 20 for line in done.stdout.split()) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


@dataclass(frozen=True)
class Running:
    """A server that answers. load_seconds: from its start until it did."""

    url: str
    memory: Memory
    load_seconds: float
    log: Path


@contextmanager
def server(command: list[str], log: Path, start_seconds: float) -> Iterator[Running]:
    """Run `vllm serve …` on a free port until the block ends; raises `OSError` with the end of its log if it does not start."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with _process([*command, "--host", "127.0.0.1", "--port", str(port)], log) as (process, memory):
        begin = time.monotonic()
        url = f"http://127.0.0.1:{port}"
        while not _answers(url):
            if process.poll() is not None:
                raise OSError(f"the server ended with {process.returncode} before it was ready; {_end_of(log)}")
            if time.monotonic() - begin > start_seconds:
                raise OSError(f"the server did not answer within {start_seconds:.0f} s; {_end_of(log)}")
            time.sleep(0.5)
        yield Running(url, memory, time.monotonic() - begin, log)


def measure(program: str, running: Running, model: str, load: Load, log: Path) -> dict[str, Any]:
    """`vllm bench serve` against a running server: times of the first token and between tokens, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="tilequant-bench-") as scratch:
        command = [
            *(program, "bench", "serve", "--backend", "openai", "--base-url", running.url, "--model", model),
            *("--dataset-name", "random", "--random-input-len", str(load.prompt), "--random-output-len", str(load.output)),
            *("--num-prompts", str(load.prompts), "--num-warmups", str(load.warmups), "--max-concurrency", str(load.batch)),
            *("--ignore-eos", "--temperature", "0", "--seed", str(load.seed), "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", ",".join(map(str, _PERCENTILES))),
            *("--save-result", "--result-dir", scratch, "--result-filename", "result.json"),
        ]
        with log.open("w") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        result = Path(scratch) / "result.json"
        if code or not result.exists():
            raise OSError(f"vllm bench serve ended with {code}; {_end_of(log)}")
        data = json.loads(result.read_text())
    if data["completed"] != load.prompts:
        raise OSError(f"only {data['completed']} of {load.prompts} requests were answered; {_end_of(log)}, and {running.log}")
    out_row = {"requests": load.prompts, "output_tokens_per_s": data["output_throughput"]}
    for metric in ("ttft", "tpot"):
        out_row[f"{metric}_ms"] = data[f"median_{metric}_ms"]
        out_row |= {f"{metric}_p{p}_ms": data[f"p{p}_{metric}_ms"] for p in _PERCENTILES[1:]}
    return out_row


def one_batch(program: str, options: list[str], load: Load, log: Path) -> tuple[dict[str, Any], dict[str, int], float | None]:
    """`vllm bench latency` twice, for one token and for all: (times as of `measure`, peak memory, GiB of the model).

    With answers of one token the time is that of the first token; the rest divides among the others.
    """
    medians, peak, loaded = [], dict[str, int](), None
    for tokens in (1, load.output):
        with tempfile.TemporaryDirectory(prefix="tilequant-bench-") as scratch:
            result = Path(scratch) / "result.json"
            command = [
                *(program, "bench", "latency", *options, "--input-len", str(load.prompt), "--output-len", str(tokens)),
                *("--batch-size", str(load.batch), "--num-iters", str(load.prompts), "--num-iters-warmup", str(load.warmups)),
                *("--seed", str(load.seed), "--output-json", str(result)),
            ]
            with _process(command, log) as (process, memory):
                code = process.wait()
            if code or not result.exists():
                raise OSError(f"vllm bench latency ended with {code}; {_end_of(log)}")
            medians.append(1000 * statistics.median(json.loads(result.read_text())["latencies"]))
            peak = {kind: max(nbytes, peak.get(kind, 0)) for kind, nbytes in memory.peak.items()}
            loaded = loaded_gib(log)
    first, whole = medians
    times = {"requests": load.prompts, "ttft_ms": first, "tpot_ms": (whole - first) / (load.output - 1)}
    return times, peak, loaded


def loaded_gib(log: Path) -> float | None:
    """What vLLM itself says its model takes; None where it says nothing, as on a CPU."""
    found = _LOADED.findall(log.read_text(errors="replace"))
    return sum(map(float, found)) if found else None  # one line a rank


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], Memory]]:
    """A process in a session of its own, which ends with the block, all its children with it."""
    before = gpu_bytes()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    memory = Memory(process.pid, before)
    try:
        yield process, memory
    finally:
        memory.close()
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, time for all processes of the session to clean up, SIGTERM to those that the first one left, then SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    orphans_since = None
    end = time.monotonic() + STOP_SECONDS
    while time.monotonic() < end:
        ended = process.poll() is not None
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        if ended and orphans_since is None:
            orphans_since = time.monotonic()
        elif orphans_since is not None and time.monotonic() - orphans_since > ORPHAN_SECONDS:
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _end_of(log: Path, lines: int = 12) -> str:
    noise = re.compile(r"\s*(- leaked |- \.\.\. skipped|nanobind:)")  # what a library says of itself when any process ends
    tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and not noise.match(line)]
    return f"the end of {log}:\n  " + "\n  ".join(tail[-lines:])

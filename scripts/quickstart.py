"""From an ordinary model to an answer: quantize, verify, measure, serve with vLLM, ask. `make quickstart` runs this.

    python scripts/quickstart.py --serve-env .venvs/serve [--model FOLDER_OR_HUB_ID] [--data FILE] [--port 8177]

Plain Python, run by the calibration environment; only the server and its client use the other one. What an earlier run
made is used again when model, data, recipe and code are the same. Every failure is one line on stderr and exit code 1.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # not resolved: a virtual environment's python is a link
TEXTS = ROOT / "configs" / "calibration"
SAMPLE = ROOT / ".cache" / "sample-model"
RUNS = ROOT / "runs" / "quickstart"
RECIPE = {"samples": 32, "length": 512, "w4_fraction": 0.6, "seed": 0}
TOKENS = 4096
SERVER_DEADLINE_S = 420
QUESTION = "What is the capital of France? Answer in one sentence."
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}

#: Runs in the serving environment; prints the answer as JSON.
CLIENT = """
import json, sys
from openai import OpenAI
url, question = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none", timeout=180, max_retries=0)
reply = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": question}],
    max_tokens=48,
    temperature=0,
)
print(json.dumps({"text": reply.choices[0].message.content, "tokens": reply.usage.completion_tokens}))
"""

#: Runs in the serving environment: is our entry point there, and does it import?
PLUGIN_CHECK = """
from importlib.metadata import entry_points
found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "tilequant"]
assert found, "no entry point 'tilequant' in the group vllm.general_plugins"
found[0].load()
import vllm_tilequant.config
"""


class QuickstartError(Exception):
    """One readable line for the user."""


class Steps:
    """Progress lines with elapsed seconds, and the table at the end."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.rows: list[tuple[str, float, str]] = []

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time one step; the yielded function adds a note to its row."""
        self.say(f"{name} ...")
        before, notes = time.monotonic(), []
        yield notes.append
        self.rows.append((name, time.monotonic() - before, "; ".join(notes)))

    def table(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        lines = [f"  {name:<{width}}  {seconds:7.1f} s  {note}".rstrip() for name, seconds, note in self.rows]
        return "\n".join([*lines, f"  {'total':<{width}}  {time.monotonic() - self.start:7.1f} s"])


def gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


def digest(*parts: Path | str) -> str:
    """SHA-256 over strings and over the contents of files, in order."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        h.update(b"\0")
    return h.hexdigest()


def run(command: list[str], *, what: str, env: dict[str, str] | None = None, quiet: bool = False) -> str:
    """Run a program in a process group of its own, so that an interrupt ends all of it; its output is shown unless `quiet`.

    Returns stdout when quiet. A failure carries what the program said last.
    """
    pipe = subprocess.PIPE
    merged = os.environ | QUIET | (env or {})
    with subprocess.Popen(command, env=merged, text=True, errors="replace", start_new_session=True,
                          stdout=pipe, stderr=pipe if quiet else subprocess.STDOUT, cwd=ROOT) as process:  # fmt: skip
        try:
            if quiet:
                out, err = process.communicate()
                lines = (err.strip() or out.strip()).splitlines()
            else:
                out, lines = "", []
                assert process.stdout is not None
                for line in process.stdout:
                    if re.search(r"\d%\|", line) or not line.strip():
                        continue  # a progress bar is no log line
                    print("    " + line.rstrip(), flush=True)
                    lines = [*lines[-40:], line.rstrip()]
                process.wait()
        except BaseException:
            stop_group(process)
            raise
    if process.returncode:
        reason = message(lines) or f"exit code {process.returncode}"
        raise QuickstartError(f"{what} failed: {reason}")
    return out


def message(lines: list[str]) -> str:
    """What a failed program had to say: our command's own message in one line, else its last line."""
    for i, line in enumerate(lines):
        if line.startswith("tilequant: "):
            return " ".join(part.strip() for part in lines[i : i + 3]).removeprefix("tilequant: ")
    words = [line.strip(" │") for line in lines if re.search(r"\w", line)]  # not the frame around a usage message
    return words[-1].removeprefix("error: ") if words else ""


def stop_group(process: subprocess.Popen[str], grace_s: float = 20) -> None:
    """SIGTERM to the program, time to finish, then SIGKILL to its whole process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it; the group is ours alone
    process.wait()


# Checks before anything long.


def check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise QuickstartError(f"PORT={port} is no port: choose one from 1 to 65535")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as e:
            reason = "is taken" if e.errno == 98 else f"cannot be used ({e.strerror})"
            raise QuickstartError(f"port {port} on 127.0.0.1 {reason}: choose another one with PORT=") from None


def check_model(model: str) -> tuple[str, bool]:
    """What MODEL names: (absolute folder, True) or (hub id, False)."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise QuickstartError(f"MODEL={model} is a folder without config.json: not a Hugging Face model")
        if not list(folder.glob("*.safetensors")):
            raise QuickstartError(f"MODEL={model} has no *.safetensors file")
        if "quantization_config" in json.loads((folder / "config.json").read_text()):
            raise QuickstartError(f"MODEL={model} is quantized already: name the model it was made from")
        return str(folder.resolve()), True
    if folder.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        raise QuickstartError(f"MODEL={model} is neither a folder nor a hub id of the form owner/name")
    return model, False


def check_data(data: str | None) -> Path:
    file = Path(data).expanduser().resolve() if data else TEXTS / "bundled.txt"
    if not file.is_file() or not file.stat().st_size:
        raise QuickstartError(f"DATA={file} is not a file with text in it")
    return file


def check_disk(folder: Path, need_bytes: float, what: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise QuickstartError(f"no disk space: {what} needs {gib(need_bytes)} in {folder}, free are {gib(free)}")


@contextmanager
def alone() -> Iterator[None]:
    """Two runs at once would write the same folder; the lock goes with the process, however it ends."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with (RUNS / ".lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuickstartError(f"another quickstart is running in {RUNS}") from None
        yield


def check_plugin(serve_env: Path) -> None:
    """The server must find our entry point; vLLM itself would only say "unknown quantization method"."""
    python = serve_env / "bin" / "python"
    if not python.exists() or not (serve_env / "bin" / "vllm").exists():
        raise QuickstartError(f"{serve_env} has no vLLM: make it with scripts/setup_env.sh serve {serve_env}")
    try:  # -P: the checkout in the working directory must not stand in for an installation
        run([str(python), "-P", "-c", PLUGIN_CHECK], what="importing the plugin", quiet=True)
    except QuickstartError as e:
        raise QuickstartError(f"the plugin does not load in {serve_env} ({e}): pip install -e . there") from None


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


# The steps.


def make_sample(steps: Steps) -> str:
    with steps.step("sample model") as note:
        if (SAMPLE / "config.json").is_file():
            note("reused")
        else:
            check_disk(SAMPLE.parent, 2**30, "the sample model")
            run([sys.executable, str(ROOT / "scripts" / "sample_model.py"), str(SAMPLE)], what="writing the sample model")
    return str(SAMPLE)


def reuse_key(model: str, local: bool, data: Path) -> dict[str, Any]:
    """What a quantized folder depends on. Weights by name, size and time: hashing tens of GB would cost minutes."""
    code = sorted([*ROOT.glob("calibrate/*.py"), ROOT / "kernels" / "layout.py", ROOT / "vllm_tilequant" / "schema.py"])
    files: list[list[Any]] = []
    if local:
        entries = [f for f in sorted(Path(model).iterdir()) if f.suffix in (".safetensors", ".json")]
        files = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in entries]
    return {"model": model, "files": files, "data": digest(data), "recipe": RECIPE, "code": digest(*code)}


def recorded(file: Path) -> Any:
    """A JSON file of an earlier run, or None."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def quantize(steps: Steps, model: str, local: bool, data: Path) -> Path:
    """OUT of `tilequant quantize`, from an earlier run if nothing that matters has changed."""
    key = reuse_key(model, local, data)
    out = RUNS / f"{Path(model).name}-tilequant"
    key_file = out.with_name(out.name + ".key.json")
    with steps.step("quantize") as note:
        if (out / "config.json").is_file() and recorded(key_file) == key:
            note("reused: same model, data, recipe and code")
            return out
        size = sum(f.stat().st_size for f in Path(model).glob("*.safetensors")) if local else 0
        check_disk(RUNS, size + 2**29, "the quantized model")
        key_file.unlink(missing_ok=True)
        remove_quantized(out)
        options = [part for k, v in RECIPE.items() for part in (f"--{k.replace('_', '-')}", str(v))]
        try:
            run([str(BIN / "tilequant"), "quantize", model, str(out), "--data", str(data), *options],
                what="tilequant quantize", env=OFFLINE if local else None)  # fmt: skip
        except BaseException:
            remove_quantized(out)
            raise
        key_file.write_text(json.dumps(key, indent=1))
    return out


def remove_quantized(out: Path) -> None:
    """A quantized folder, and what a run that was ended by a signal has left beside it."""
    for folder in (out, out.with_name(out.name + ".partial"), out.with_name(out.name + ".work")):
        shutil.rmtree(folder, ignore_errors=True)


def verify(steps: Steps, out: Path) -> None:
    with steps.step("verify"):
        run([str(BIN / "tilequant"), "verify", str(out)], what="tilequant verify", env=OFFLINE)


def evaluate(steps: Steps, model: str, local: bool, out: Path) -> list[dict[str, Any]]:
    """Perplexity before and after, KL divergence, stored and loaded bits on text that calibration has not seen."""
    text = TEXTS / "heldout.txt"
    result = out.with_name(out.name + ".quality.json")
    key_file = out.with_name(out.name + ".key.json")
    code = sorted([*ROOT.glob("kernels/*.py"), *ROOT.glob("vllm_tilequant/*.py"), *ROOT.glob("vllm_tilequant/cli/*.py")])
    key = digest(key_file, text, str(TOKENS), *code)
    with steps.step("evaluate") as note:
        known = recorded(result)
        if isinstance(known, dict) and known.get("key") == key:
            note("reused: same checkpoint, text and code")
            return known["result"]
        with tempfile.TemporaryDirectory(dir=RUNS) as scratch:
            fresh = Path(scratch) / "quality.json"
            run([str(BIN / "tilequant"), "evaluate", str(out), "--reference", model, "--text", str(text),
                 "--tokens", str(TOKENS), "--window", "512", "--profile", "3.0", "--json", str(fresh)],
                what="tilequant evaluate", env=OFFLINE if local else None)  # fmt: skip
            data = json.loads(fresh.read_text())
        result.write_text(json.dumps({"key": key, "result": data}, indent=1))
    return data


def server_command(serve_env: Path, out: Path, port: int, gpu: bool) -> tuple[list[str], dict[str, str]]:
    command = [str(serve_env / "bin" / "vllm"), "serve", str(out), "--quantization", "tilequant"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "4"]
    if gpu:
        return command, OFFLINE
    return [*command, "--enforce-eager"], OFFLINE | {"VLLM_CPU_KVCACHE_SPACE": "1"}


def last_line(log: Path) -> str:
    """The line of a server's log that says most: the first error with a cause in it, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # A worker's error comes first; the processes above it then report that a process below has failed.
    errors = [m[0] for line in lines if (m := re.search(r"\b[A-Z]\w*(Error|Exception): .*", line))]
    causes = [e for e in errors if "initialization failed" not in e and "Errno 24" not in e]
    return (causes or errors[-1:] or lines[-1:] or ["no output"])[0][:500]


@contextmanager
def serving(steps: Steps, serve_env: Path, out: Path, port: int, gpu: bool) -> Iterator[str]:
    """A running server's base URL; it is stopped on the way out, whatever happens."""
    command, env = server_command(serve_env, out, port, gpu)
    log = RUNS / "server.log"
    check_port(port)
    with steps.step("server start") as note:
        steps.say("  " + " ".join(command))
        with log.open("w") as f:
            process = subprocess.Popen(command, env=os.environ | QUIET | env, stdout=f, stderr=subprocess.STDOUT,
                                       text=True, start_new_session=True, cwd=ROOT)  # fmt: skip
        try:
            wait_for_health(process, port, log)
        except BaseException:
            stop_group(process)
            raise
        note(f"log: {log.relative_to(ROOT)}")
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with steps.step("server stop"):
            stop_group(process)


def wait_for_health(process: subprocess.Popen[str], port: int, log: Path) -> None:
    deadline = time.monotonic() + SERVER_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise QuickstartError(f"the server ended with code {process.returncode} (log: {log}): {last_line(log)}")
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    raise QuickstartError(f"the server was not ready after {SERVER_DEADLINE_S} s (log: {log}): {last_line(log)}")


def ask(steps: Steps, serve_env: Path, url: str) -> str:
    with steps.step("chat completion") as note:
        python = str(serve_env / "bin" / "python")
        reply = json.loads(run([python, "-P", "-c", CLIENT, url, QUESTION], what="the chat completion", quiet=True))
        note(f"{reply['tokens']} tokens")
    return reply["text"]


def summary(quality: list[dict[str, Any]]) -> str:
    """The measured numbers, from the rows of `tilequant evaluate`."""
    rows = {row["phase"]: row for row in quality}
    static, graded = rows["static"], rows["graded"]
    before, tokens = static["ppl_reference"], static["tokens"]
    return "\n".join(
        [
            f"  stored bits per weight     {static['stored_bits']:8.3f}   (source: 16)",
            f"  loaded bits per weight     {graded['loaded_bits']:8.3f}   (decode, profile {graded['profile']})",
            f"  perplexity before          {before:8.3f}   ({tokens} tokens of configs/calibration/heldout.txt)",
            f"  perplexity after, prompts  {static['ppl']:8.3f}   (KL {static['kl_milli']:.1f} milli-nats)",
            f"  perplexity after, decode   {graded['ppl']:8.3f}   (KL {graded['kl_milli']:.1f} milli-nats)",
        ]
    )


def main(args: argparse.Namespace) -> None:
    steps = Steps()
    serve_env = Path(args.serve_env).absolute()
    with steps.step("checks"):
        check_port(args.port)
        data = check_data(args.data)
        model, local = check_model(args.model) if args.model else ("", True)
        check_disk(RUNS, 2**30, "a run")
        check_plugin(serve_env)
        gpu = has_gpu()
    steps.say(f"device: {'GPU (nvidia-smi answers)' if gpu else 'CPU (no answering nvidia-smi)'}")
    if not model:
        model = make_sample(steps)
    out = quantize(steps, model, local, data)
    verify(steps, out)
    quality = evaluate(steps, model, local, out)
    with serving(steps, serve_env, out, args.port, gpu) as url:
        answer = ask(steps, serve_env, url)
    print(f"\nquestion: {QUESTION}\nanswer:   {answer.strip()}\n\n{summary(quality)}\n\n{steps.table()}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--serve-env", default=".venvs/serve", help="virtual environment with vLLM and this plugin")
    parser.add_argument("--model", help="folder or hub id; left out: the sample model")
    parser.add_argument("--data", help="text or JSONL file for calibration; left out: the bundled text")
    parser.add_argument("--port", type=int, default=8177)
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` stops the server then, too
    try:
        options = parse_args()
        with alone():
            main(options)
    except QuickstartError as e:
        sys.exit(f"error: {e}")
    except OSError as e:  # a full disk in the middle of a step, a folder that may not be written
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; what was running has been stopped")

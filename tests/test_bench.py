"""`tilequant bench` around a stand-in for the `vllm` command, which answers as vLLM does; the real one: test_serve_bench.py."""

import json
import os
import sys
import time

import pytest

from vllm_tilequant import engine
from vllm_tilequant.cli import bench, doctor

#: serve: allocates 64 MiB in a child and answers /health. bench serve, bench latency: write what vLLM's benchmarks write.
STAND_IN = """
import http.server, json, os, subprocess, sys, time
arguments = sys.argv[1:]
def value(name):
    return arguments[arguments.index(name) + 1]
if arguments[0] == "serve":
    if "--broken" in arguments:
        print("one sentence about what is wrong", flush=True)
        sys.exit(1)
    hold = "b = bytearray(64 << 20); b[::1024] = b'x' * len(b[::1024]); import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", hold])
    print("Model loading took 1.25 GiB memory and 2 seconds\\nModel loading took 1.5 GiB memory", flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    time.sleep(1)
    http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
elif arguments[1] == "serve":
    print("the client's words")
    n = int(value("--num-prompts"))
    ours = "toy" in value("--model")
    lost = "99" == value("--random-input-len")
    out = {"completed": n - lost, "output_throughput": 50.0}
    for metric, ms in (("ttft", 30.0), ("tpot", 5.0 if ours else 10.0)):
        out |= {f"median_{metric}_ms": ms, f"p90_{metric}_ms": ms + 1, f"p99_{metric}_ms": ms + 2}
    path = os.path.join(value("--result-dir"), value("--result-filename"))
    json.dump(out, open(path, "w"))
elif arguments[1] == "latency":
    tokens = int(value("--output-len"))
    time.sleep(1.5)
    json.dump({"latencies": [0.02 + 0.004 * (tokens - 1)] * int(value("--num-iters"))}, open(value("--output-json"), "w"))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "vllm"
    path.write_text(f"#!{sys.executable}\n{STAND_IN}")
    path.chmod(0o755)
    monkeypatch.setattr(bench, "vllm_program", lambda: str(path))
    monkeypatch.setattr(engine, "gpu_bytes", lambda: None)
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    return path


@pytest.fixture
def source(toy, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    config = json.loads((toy / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def left(path):
    """Processes that still run the stand-in."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as f:
                found += [pid] if str(path) in f.read() else []
        except OSError:
            continue
    return found


def test_both_models_in_one_run(toy, source, program, tmp_path, tilequant):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    arguments = ("bench", toy, out, "--reference", source, "--profile", "2.0", "--profile", "off", "--batch", 1, "--batch", 4)
    code, said, err = tilequant(*arguments, "--requests", 6, "--json", "--", "--enforce-eager")
    assert code == 0, err
    data = json.loads(said)
    assert data == json.loads((out / "bench.json").read_text()) and data["stem"] == "e2e" and data["versions"]["torch"]
    rows = [(r["method"], r["profile"], r["batch"], r["tpot_ms"]) for r in data["rows"]]
    assert rows == [
        ("bf16", None, 1, 10.0), ("bf16", None, 4, 10.0), ("tilequant", "2.0", 1, 5.0), ("tilequant", "2.0", 4, 5.0),
        ("tilequant", "off", 1, 5.0), ("tilequant", "off", 4, 5.0),
    ]  # fmt: skip
    for row in data["rows"]:
        assert row["ttft_ms"] == 30 and row["ttft_p99_ms"] == 32 and row["weights_gib"] == 2.75 and row["load_s"] >= 1
        assert 64 / 1024 < row["resident_gib"] <= row["peak_gib"] < 1  # the child's memory is in it
    assert data["rows"][0]["loaded_bits"] is None and data["rows"][-1]["loaded_bits"] > 4
    assert "--enforce-eager" in err and err.count("--no-enable-prefix-caching") == 3
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG") and (out / "tilequant-2.0-client-4.log").exists()
    assert not left(program)
    code, _, err = tilequant(*arguments)
    assert code == 1 and "not empty" in err


def test_one_batch_splits_the_first_token_from_the_rest(toy, program, tmp_path, tilequant):
    arguments = ("bench", toy, tmp_path / "out", "--how", "latency", "--answer", 11, "--requests", 3, "--no-plot")
    code, said, err = tilequant(*arguments)
    assert code == 0, err
    (row,) = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
    assert row["ttft_ms"] == pytest.approx(20) and row["tpot_ms"] == pytest.approx(4) and row["peak_gib"] > 0
    assert "20.0" in said and not (tmp_path / "out" / "bench.png").exists()


def test_what_goes_wrong_is_told_with_the_log(toy, source, program, tmp_path, tilequant, monkeypatch):
    code, _, err = tilequant("bench", toy, tmp_path / "a", "--no-plot", "--", "--broken")
    assert code == 1 and "ended with 1 before it was ready" in err and "one sentence about what is wrong" in err
    code, _, err = tilequant("bench", toy, tmp_path / "b", "--no-plot", "--prompt", 99, "--requests", 5)
    assert code == 1 and "only 4 of 5 requests were answered" in err and "the client's words" in err
    code, _, err = tilequant("bench", toy, tmp_path / "c", "--no-plot", "--reference", toy)
    assert code == 1 and "name the original model" in err
    begin = time.monotonic()
    code, _, err = tilequant("bench", toy, tmp_path / "d", "--no-plot", "--start-seconds", 0.1)
    assert code == 1 and "did not answer within 0 s" in err and time.monotonic() - begin < 30
    assert not left(program)
    monkeypatch.setattr(bench, "find_spec", lambda _: None)
    code, _, err = tilequant("bench", toy, tmp_path / "e")
    assert code == 3 and "vllm-tilequant[report]" in err and not (tmp_path / "e").exists()

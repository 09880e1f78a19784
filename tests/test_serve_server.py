"""A real `vllm serve` on loopback: its greedy tokens against transformers, and how it ends on bad input."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file
from torch import nn

from toy import write_toy
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.hf import load_dense
from vllm_tilequant.kernels import reference
from vllm_tilequant.kernels.dispatch import GRADED_ROWS

pytestmark = pytest.mark.serve

#: Prompts above, at and below the graded limit: a short one is graded as a whole, a long one only from its first new token on.
#: The longest comes first, because the traced server without warm-up traces its first request, and vLLM's trace at one row
#: holds for one row only.
PROMPTS = [list(range(3 + 7 * n, 3 + 8 * n)) for n in (24, 17, 9, 8, 3, 1)]
NEW_TOKENS = 12
#: Bounds on the median and the largest difference of log-probabilities. Float32 rounding gives some 1e-5; where INT8 codes and
#: levels are taken, it may now and then move one of them to its neighbour, which shows in one token and the few after it.
LOGPROB_BOUNDS = {"static": (1e-4, 1e-3), "graded": (1e-4, 0.5)}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "OMP_NUM_THREADS": "1",
}
TRACED = {"VLLM_CPU_CI_ENV": "1"}  # traced by dynamo, not compiled
START_SECONDS = 240
STOP_SECONDS = 60


@pytest.fixture(autouse=True)
def one_thread():
    """The reference beside a server on a small machine: a second thread of tiny products only waits for its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(folder, port, *options):
    return [
        str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "256", "--max-num-seqs", "4", "--dtype", "float32", "--no-enable-prefix-caching", *options,
    ]  # fmt: skip


@contextlib.contextmanager
def server(folder, log, *options, **environment):
    """A running server's client; stopped by SIGTERM, its log printed when anything goes wrong."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tq-") as scratch, log.open("w") as out:  # vLLM leaves files in TMPDIR behind
        process = subprocess.Popen(
            command(folder, port, *options),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | environment | {"TMPDIR": scratch},
            start_new_session=True,
        )
        try:
            wait_until_ready(process, port)
            yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
            assert process.poll() is None, "the server died during the test"
        except BaseException:
            print(log.read_text()[-8000:])
            raise
        finally:
            stop(process)


def stop(process):
    """SIGTERM, then time for all processes of the session to clean up their shared memory, then no mercy."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    while time.monotonic() < end:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    raise TimeoutError(f"the server had not ended {STOP_SECONDS} s after SIGTERM")


def wait_until_ready(process, port):
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with {process.returncode} before it was ready"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(f"no answer within {START_SECONDS} s")


def ask(client, folder, prompt):
    """Greedy continuation: token ids and their log-probabilities."""
    answer = client.completions.create(
        model=str(folder),
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice = answer.choices[0]
    return choice.model_extra["token_ids"], choice.logprobs.token_logprobs


class ReferenceLinear(nn.Module):
    """A quantized linear in float64, graded as the server grades it: by the rows of the call."""

    def __init__(self, stored, checkpoint, profile):
        super().__init__()
        self.stored = stored
        self.matrices = checkpoint.transforms[stored.weight.output_transform.long()]
        self.thresholds = stored.thresholds[checkpoint.schema.profile_row(profile)]

    def forward(self, x):
        rows, w = x.reshape(-1, x.shape[-1]), self.stored.weight
        if rows.shape[0] <= GRADED_ROWS:
            y = reference.decode_bitplane_ref(rows, w, self.matrices, self.thresholds, self.stored.bias)
        else:
            y = reference.linear_ref(rows, w, self.matrices, self.stored.bias, int8=True)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def reference_model(folder, profile):
    model, checkpoint = load_dense(folder), Checkpoint.open(folder)
    for name in checkpoint.schema.modules:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, ReferenceLinear(checkpoint.module(name), checkpoint, profile))
    return model


@torch.no_grad()
def greedy(model, prompt):
    """What `ask` should return, from transformers: the prompt in one call, then token by token."""
    tokens, logprobs, cache, ids = [], [], None, torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache, last = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)
        tokens.append(int(last.argmax()))
        logprobs.append(float(last[tokens[-1]]))
        ids = torch.tensor([[tokens[-1]]])
    return tokens, logprobs


def compare(client, folder, wanted, bounds):
    differences = []
    for prompt, (want_tokens, want_logprobs) in zip(PROMPTS, wanted, strict=True):
        tokens, logprobs = ask(client, folder, prompt)
        assert tokens == want_tokens, f"prompt of {len(prompt)} tokens"
        differences.append((torch.tensor(logprobs) - torch.tensor(want_logprobs)).abs())
    differences = torch.cat(differences)
    assert differences.median() <= bounds[0] and differences.max() <= bounds[1]


def settings(**tilequant):
    return "--additional-config", json.dumps({"tilequant": tilequant})


def test_without_grading_and_activation_codes_it_is_the_dequantized_model(tmp_path):
    folder = write_toy(tmp_path / "toy", tied=True, kv_heads=2)
    options = (*settings(profile="off", activation="none"), "--enforce-eager", "--quantization", "tilequant")
    model = load_dense(folder)
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    with server(folder, tmp_path / "log", *options) as client:
        compare(client, folder, wanted, LOGPROB_BOUNDS["static"])
    assert "tilequant: profile off (graded up to 0 rows), activation none" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("traced", [False, True])
def test_default_profile_is_the_float64_reference(tmp_path, traced):
    """Once eager with biases, once traced: a traced server must still choose by the rows of each call."""
    folder = write_toy(tmp_path / "toy", bias=not traced, tied=False, seed=1)
    options, environment = ((), TRACED) if traced else (("--enforce-eager",), {})
    model = reference_model(folder, "3.0")
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    with server(folder, tmp_path / "log", *options, **environment) as client:
        compare(client, folder, wanted, LOGPROB_BOUNDS["graded"])
    assert "tilequant: profile 3.0 (graded up to 8 rows), activation group64" in (tmp_path / "log").read_text()


def without_a_tensor(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight_tile_scale"]
    save_file(tensors, path, metadata={"format": "pt"})


def with_method(method):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        if method is None:
            del config["quantization_config"]
        else:
            config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    "change, options, environment, message",
    [
        pytest.param(without_a_tensor, (), {}, "model.layers.1.mlp.up_proj.weight_tile_scale: missing", id="missing tensor"),
        pytest.param(with_method("gptq"), (), {}, "does not match the quantization method specified", id="foreign method"),
        pytest.param(with_method(None), (), {}, "Cannot find the config file for tilequant", id="not quantized"),
        pytest.param(
            lambda folder: None,
            settings(profile="5.0"),
            {},
            "profile is '5.0', legal values are ['2.0', '3.0', '4.0', 'full', 'off']",
            id="unknown profile",
        ),
        pytest.param(
            lambda folder: None, (), {"VLLM_PLUGINS": ""}, "Unknown quantization method: tilequant", id="plugin blocked"
        ),
    ],
)
def test_bad_input_ends_the_server_with_one_sentence(tmp_path, change, options, environment, message):
    folder = write_toy(tmp_path / "toy", layers=2)
    change(folder)
    with tempfile.TemporaryDirectory(prefix="tq-") as scratch:
        ended = subprocess.run(
            command(folder, free_port(), "--enforce-eager", "--quantization", "tilequant", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | environment | {"TMPDIR": scratch},
            text=True,
            timeout=START_SECONDS,
        )
    assert ended.returncode != 0
    assert message in ended.stdout, ended.stdout[-8000:]

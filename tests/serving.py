"""What the tests around a real `vllm serve` share: start, ask, stop, and what transformers says it should answer."""

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
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from torch import nn

from toy import ROTATED
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.hf import load_dense
from vllm_tilequant.kernels import reference
from vllm_tilequant.kernels.dispatch import GRADED_ROWS
from vllm_tilequant.kernels.layout import rotate_inputs

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
if find_spec("flashinfer") is None:  # vLLM 0.26 takes it for granted on a GPU where its sampler is on
    ENVIRONMENT["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
#: A toy whose heads and tiles three ranks can share and whose three layers make unequal pipeline stages, with biases.
#: Its greedy text is asked for at one rank, three ranks and two stages: the same in all of them. Random models part easily,
#: since one INT8 code rounded to its neighbour may move a close decision; in this one every token leads by 0.5 or more.
PARALLEL_TOY = dict(hidden=192, intermediate=384, heads=3, kv_heads=3, layers=3, vocab=384, bias=True, seed=7, rotated=ROTATED)
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
        if w.input_rotation is not None:
            rows = rotate_inputs(rows, w.input_rotation)
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
        # as in a server, the head sees the last row only: its product goes by the rows it gets
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, last = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)
        tokens.append(int(last.argmax()))
        logprobs.append(float(last[tokens[-1]]))
        ids = torch.tensor([[tokens[-1]]])
    return tokens, logprobs


def compare(client, folder, wanted, bounds, prompts=PROMPTS):
    differences = []
    for prompt, (want_tokens, want_logprobs) in zip(prompts, wanted, strict=True):
        tokens, logprobs = ask(client, folder, prompt)
        assert tokens == want_tokens, f"prompt of {len(prompt)} tokens"
        differences.append((torch.tensor(logprobs) - torch.tensor(want_logprobs)).abs())
    differences = torch.cat(differences)
    assert differences.median() <= bounds[0] and differences.max() <= bounds[1]


def settings(**tilequant):
    return "--additional-config", json.dumps({"tilequant": tilequant})

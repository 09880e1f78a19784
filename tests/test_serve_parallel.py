"""Tensor and pipeline parallelism through vLLM's own engine, on the CPU: several ranks answer what one reference says."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request

import pytest
from serving import (
    ENVIRONMENT,
    LOGPROB_BOUNDS,
    PARALLEL_TOY,
    PROMPTS,
    START_SECONDS,
    command,
    compare,
    free_port,
    greedy,
    one_thread,  # noqa: F401 - a fixture
    reference_model,
    server,
)

from toy import write_toy

pytestmark = pytest.mark.serve

THREE_RANKS = ("--tensor-parallel-size", "3", "--enforce-eager")


@pytest.mark.parametrize(
    "options",
    [
        # Every linear is cut: q, k, v and gate, up by outputs, o and down by inputs, each rank with its own share of the maps.
        pytest.param(THREE_RANKS, id="three ranks"),
        # Two layers in the first stage, one in the second: what the other stage holds is no error. vLLM's CPU backend allocates
        # the input of later stages while it warms up for tracing, and its asynchronous scheduler does not know stages.
        pytest.param(("--pipeline-parallel-size", "2", "--no-async-scheduling"), id="two stages"),
    ],
)
def test_several_ranks_answer_as_the_float64_reference(tmp_path, options):
    """In float32, where greedy text is equal to the last token; one rank is asked for the same in test_serve_server.py.

    So does a server of as many ranks that starts from what the first one saved, each rank its own part.
    """
    folder = write_toy(tmp_path / "toy", **PARALLEL_TOY)
    model = reference_model(folder, "3.0")
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    state = shutil.copytree(folder, tmp_path / "state", ignore=shutil.ignore_patterns("*.safetensors"))
    with server(folder, tmp_path / "log", *options, VLLM_SERVER_DEV_MODE="1") as client:
        compare(client, folder, wanted, LOGPROB_BOUNDS["graded"])
        if options != THREE_RANKS:  # a second server for one of them
            return
        call = {"method": "save_sharded_state", "kwargs": {"path": str(state)}}
        address, headers = client.base_url.join("/collective_rpc"), {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(str(address), json.dumps(call).encode(), headers), timeout=60).close()
    assert len(list(state.glob("model-*.safetensors"))) == int(options[1])
    with server(state, tmp_path / "log", *options, "--load-format", "sharded_state") as client:
        few = slice(2, 4)  # a prompt at stored precision and a graded one
        compare(client, state, wanted[few], LOGPROB_BOUNDS["graded"], PROMPTS[few])


def test_a_size_that_cuts_tiles_is_refused_with_the_legal_ones(tmp_path):
    folder = write_toy(tmp_path / "toy", hidden=128, intermediate=192, heads=2, kv_heads=2)
    with tempfile.TemporaryDirectory(prefix="tq-") as scratch:
        ended = subprocess.run(
            command(folder, free_port(), "--enforce-eager", "--tensor-parallel-size", "2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | {"TMPDIR": scratch},
            text=True,
            timeout=START_SECONDS,
        )
    assert ended.returncode != 0
    assert "tensor parallel size 2 would cut tiles" in ended.stdout, ended.stdout[-6000:]
    for linear in ("gate_proj: 192 outputs", "up_proj: 192 outputs", "down_proj: 192 inputs"):
        assert f"model.layers.0-1.mlp.{linear} / 2 = 96, not a multiple of 64" in ended.stdout
    assert "Legal tensor parallel sizes: [1]." in ended.stdout


WORKER = """
import sys
import vllm.v1.executor.ray_utils as ray_utils
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase


class Idle(WorkerBase):
    def __init__(self, **kwargs):
        pass

    def methods(self):
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

        return QUANTIZATION_METHODS


if __name__ == "__main__":
    config = VllmConfig(model_config=ModelConfig(model=sys.argv[2]))
    config.parallel_config.worker_cls = "worker.Idle"
    if sys.argv[1] == "ray":
        import ray

        ray.init(include_dashboard=False, num_cpus=1, log_to_driver=False)
        actor = ray.remote(ray_utils.RayWorkerWrapper).remote(rpc_rank=0)
        ray.get(actor.execute_method.remote("init_worker", [{"vllm_config": config}]))
        methods = ray.get(actor.execute_method.remote("methods"))
        ray.shutdown()
    else:
        wrapper = WorkerWrapperBase()
        wrapper.init_worker([{"vllm_config": config}])
        methods = wrapper.methods()
    print("tilequant" in methods)
"""


@pytest.mark.parametrize("executor", ["multiprocessing", "ray"])
def test_a_worker_process_loads_the_plugin(tmp_path, executor):
    """In a process that has loaded nothing yet, through what the executor runs there before a model is built.

    vLLM serves with Ray on GPUs only; here one actor of its kind is started. The multiprocessing executor also serves above.
    """
    if executor == "ray":
        pytest.importorskip("ray")
    folder = write_toy(tmp_path / "toy", layers=1)
    plain = json.loads((folder / "config.json").read_text())
    del plain["quantization_config"]  # which a process without the plugin could not read
    (folder / "config.json").write_text(json.dumps(plain))
    (tmp_path / "worker.py").write_text(WORKER)
    path = os.pathsep.join(p for p in (str(tmp_path), os.environ.get("PYTHONPATH")) if p)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "worker.py"), executor, str(folder)],
        capture_output=True,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        text=True,
        timeout=START_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert ended.stdout.splitlines()[-1] == "True"

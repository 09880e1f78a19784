"""On a GPU a server's first process forks its engine: what we do before may leave no threads that the engine then misses."""

import json
import os
import subprocess
import sys

import pytest
from serving import ENVIRONMENT

from toy import write_toy

pytestmark = pytest.mark.serve

SCRIPT = """
import os, sys, time

if __name__ == "__main__":
    import torch
    from vllm.engine.arg_utils import EngineArgs

    torch.set_num_threads(2)
    if sys.argv[2] == "used":
        torch.zeros(1 << 22).add_(1)
    options = dict(model=sys.argv[1], enforce_eager=True, max_model_len=128, dtype="bfloat16", skip_tokenizer_init=True)
    config = EngineArgs(**options).create_engine_config()
    print("quantization", config.quant_config.get_name(), "threads", torch.get_num_threads())
    child = os.fork()
    if child == 0:
        torch.zeros(1 << 22).add_(1)
        os._exit(0)
    for _ in range(100):
        if os.waitpid(child, os.WNOHANG)[0]:
            print("the child has worked")
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        print("the child hangs")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Embeddings of more entries than torch gives to one thread."""
    out = write_toy(tmp_path_factory.mktemp("fork") / "toy", hidden=256, heads=4, kv_heads=2, intermediate=256)
    assert json.loads((out / "config.json").read_text())["vocab_size"] * 256 > 1 << 15
    return out


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("threads", ["unused", "used"])
def test_the_first_process_may_be_forked(folder, tmp_path, threads):
    """`used` shows that this test would see a fault: there, threads are started on purpose."""
    script = tmp_path / "first_process.py"
    script.write_text(SCRIPT)
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder), threads], capture_output=True, text=True, env=environment, timeout=300
    )
    assert "quantization tilequant threads 2" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert ("the child has worked" if threads == "unused" else "the child hangs") in done.stdout

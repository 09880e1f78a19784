"""Run vLLM engines one after the other, each in a fork of this process, so that all cost one import.

    python engines.py JOBS OUT

A job names a folder, options for `vllm.LLM` and prompts; the result has greedy tokens, their log-probabilities and what was
asked for beside, or the error. Not imported by tests: they start it as a process of its own.
"""

import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
import traceback
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # engine and worker in this process


def compiled(worker):
    """How often each of our kernels was compiled in this process: by NVRTC, and the variants that Triton holds."""
    from vllm_tilequant import kernels

    counts = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        for key, found in vars(importlib.import_module(f"vllm_tilequant.kernels.{module.name}")).items():
            if hasattr(found, "device_caches"):
                counts[f"{module.name}.{key}"] = sum(len(caches[0]) for caches in found.device_caches.values())
            elif key.endswith("_module") and hasattr(found, "cache_info"):
                counts[f"{module.name}.{key}"] = found.cache_info().misses
    return counts


def run(job):
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = dict(
        dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True, enable_prefix_caching=False, seed=0
    ) | job.get("options", {})
    llm = LLM(model=job["folder"], disable_log_stats=False, **options)
    sampling = SamplingParams(max_tokens=job.get("new", 12), temperature=0, ignore_eos=True, logprobs=1)
    lora = LoRARequest("adapter", 1, job["lora"]) if "lora" in job else None
    out = {}
    for step in job.get("steps", ["ask"]):
        if step == "ask":
            prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
            batches = [prompts] if job.get("together") else [[p] for p in prompts]
            answers = [a for batch in batches for a in llm.generate(batch, sampling, use_tqdm=False, lora_request=lora)]
            outputs = [a.outputs[0] for a in answers]
            tokens = [list(o.token_ids) for o in outputs]
            logprobs = [[d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
            out.setdefault("asked", []).append(
                {"tokens": tokens, "logprobs": logprobs, "cached": [a.num_cached_tokens for a in answers]}
            )
        elif step == "reload":
            llm.collective_rpc("reload_weights")
        elif step == "reload other":
            llm.collective_rpc("reload_weights", kwargs={"weights_path": job["other"]})
        elif step == "compiled":
            out.setdefault("compiled", []).append(llm.collective_rpc(compiled)[0])
        elif step == "every batch":
            few = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            for rows in job["batches"]:
                llm.generate([{"prompt_token_ids": [5 + i]} for i in range(rows)], few, use_tqdm=False)
            llm.generate([{"prompt_token_ids": [7] * job["long"]}], few, use_tqdm=False)
        elif step == "sleep 1":
            llm.sleep(level=1)
            llm.wake_up()
        elif step == "sleep 2":
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
        elif step == "save":
            llm.collective_rpc("save_sharded_state", kwargs={"path": job["save"]})
    out["metrics"] = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return out


def child(job, pipe):
    try:
        pipe.send(run(job))
    except Exception:
        pipe.send({"error": traceback.format_exc()})
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # the engine's threads and groups end with the process


if __name__ == "__main__":
    import torch
    import vllm  # noqa: F401 - what the forks share

    importlib.import_module(f"vllm.v1.worker.{'gpu' if torch.version.cuda else 'cpu'}_worker")

    context = multiprocessing.get_context("fork")
    results = {}
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        print(f"== {name}", flush=True)
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(job, theirs))
        process.start()
        theirs.close()
        try:
            results[name] = ours.recv()
        except EOFError:
            results[name] = {"error": "the process ended"}
        process.join()
        Path(sys.argv[2]).write_text(json.dumps(results))

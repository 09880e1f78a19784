"""`tilequant doctor`: everything a bug report needs, gathered without failing on what is broken."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from vllm_tilequant.cli.output import JsonFlag, print_json

PACKAGES = ("vllm-tilequant", "torch", "triton", "vllm", "llmcompressor", "compressed-tensors", "transformers", "safetensors")
#: Run in a process of its own: importing vLLM takes seconds, and may crash where its build does not fit the machine.
_REGISTER = """
from importlib.metadata import entry_points
points = [e for e in entry_points(group="vllm.general_plugins") if e.name == "tilequant"]
assert points, "no entry point tilequant in the group vllm.general_plugins: install vllm-tilequant into this environment"
points[0].load()()
from vllm.model_executor.layers.quantization import get_quantization_config
print(get_quantization_config("tilequant").__name__)
"""


def doctor(as_json: JsonFlag = False) -> None:
    """Print an environment block to paste into a bug report: system, GPU, driver, packages, plugin, kernels.

    Exit code 1 if vLLM is installed and the plugin does not register with it; everything else is only reported.
    """
    data = environment()
    if as_json:
        print_json(data)
    else:
        _print(data)
    if data["plugin"]["expected"] and not data["plugin"]["registered"]:
        raise typer.Exit(1)


def environment() -> dict[str, Any]:
    """A JSON object; what cannot be found out is None or a sentence."""
    return hardware() | {"plugin": _plugin()}


def hardware() -> dict[str, Any]:
    """All of it but the plugin, which takes a start of vLLM to find out."""
    return {
        "os": _os_name(),
        "kernel": platform.release(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {_memory()} of memory",
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "location": str(Path(__file__).resolve().parents[1]),
        "driver": _driver(),
        **_torch(),
    }


def _torch() -> dict[str, Any]:
    """GPUs as torch sees them, and for each what the graded kernels say."""
    try:
        import torch

        from vllm_tilequant.kernels import capability, prefill_cuda
    except (ImportError, OSError, RuntimeError, AttributeError) as e:  # a broken torch is a finding
        return {"torch_error": f"{type(e).__name__}: {e}", "gpus": [], "kernels": {}}

    def reasons(of: tuple[int, int] | None) -> dict[str, str | None]:
        spec = capability.DecodeSpec(4096, 4096, torch.bfloat16, of)
        found = {f"decode {path}": capability.unsupported_reason(spec, path) for path in capability.PATHS}
        prefill = found["decode triton"] if of is None else prefill_cuda.unsupported_reason(of)
        return found | {"prefill cuda": prefill, "prefill triton": found["decode triton"]}

    gpus, kernels = [], {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        gpus.append(f"{properties.name}, capability {properties.major}.{properties.minor}, {properties.total_memory >> 30} GiB")
        kernels[f"GPU {i}"] = reasons(capability.device_capability(torch.device("cuda", i)))
    return {
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "gpus": gpus,
        "kernels": kernels or {"no GPU": reasons(None)},
    }


def _plugin() -> dict[str, Any]:
    """Whether `--quantization tilequant` would be known to a server of this environment."""
    if find_spec("vllm") is None:
        return {"expected": False, "registered": False, "detail": "vllm is not installed: pip install 'vllm-tilequant[serve]'"}
    try:
        done = subprocess.run([sys.executable, "-c", _REGISTER], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return {"expected": True, "registered": False, "detail": "importing vllm took more than 300 seconds"}
    lines = [line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line.strip()]
    return {"expected": True, "registered": done.returncode == 0, "detail": lines[-1] if lines else f"exit {done.returncode}"}


def _print(data: dict[str, Any]) -> None:
    print("```text")
    for key in ("os", "kernel", "machine", "cpu", "python"):
        print(f"{key:20} {data[key]}")
    for name, found in data["packages"].items():
        print(f"{name:20} {found or 'not installed'}")
    print(f"{'installed in':20} {data['location']}")
    print(f"{'driver':20} {data['driver'] or 'nvidia-smi does not answer'}")
    if "torch_error" in data:
        print(f"{'torch':20} does not import: {data['torch_error']}")
    else:
        print(f"{'torch built for':20} CUDA {data['torch_cuda']}, HIP {data['torch_hip']}")
    for i, gpu in enumerate(data["gpus"]):
        print(f"{f'GPU {i}':20} {gpu}")
    for device, paths in data["kernels"].items():
        for path, reason in paths.items():
            print(f"{path:20} {device}: {reason or 'usable'}")
    plugin = data["plugin"]
    print(f"{'plugin':20} {'registered with vLLM as ' if plugin['registered'] else 'not registered: '}{plugin['detail']}")
    print("```")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30} GiB"
    except (ValueError, OSError):
        return "an unknown amount"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ", ".join(sorted(set(done.stdout.split()))) if done.returncode == 0 else None

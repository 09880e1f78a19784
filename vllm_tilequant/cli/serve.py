"""`tilequant serve`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from vllm_tilequant.checkpoint.files import raise_faults
from vllm_tilequant.checkpoint.parallel import tensor_parallel
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.cli.output import print_json
from vllm_tilequant.schema import QUANT_METHOD, FormatError


class Activation(StrEnum):
    group64 = "group64"
    none = "none"


class PrefillActivation(StrEnum):
    token_smooth = "token_smooth"
    group64 = "group64"


PrefillOption = Annotated[
    PrefillActivation | None,
    typer.Option(help="Of prompts on a GPU: INT8 per row, the fast product, or per 64 inputs. Default: the plugin's."),
]


CopyFlag = Annotated[
    bool,
    typer.Option(
        "--int8-copy", help="On a GPU, keep the weights in INT8 too: 8 more bits a weight, faster prompts and batches."
    ),
]


def serve(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    profile: Annotated[str | None, typer.Option(help="A stored profile, 'full' or 'off'. Default: the checkpoint's.")] = None,
    activation: Annotated[Activation, typer.Option(help="INT8 per 64 inputs, or none.")] = Activation.group64,
    prefill_activation: PrefillOption = None,
    int8_copy: CopyFlag = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; 'auto' takes config.json's.")] = "auto",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    dry_run: Annotated[bool, typer.Option("--print", help="Only print the command.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only print the command, as a JSON list.")] = False,
    more: Annotated[list[str] | None, typer.Argument(help="After --: options for vllm serve.", show_default=False)] = None,
) -> None:
    """Print the exact `vllm serve` command for a checkpoint and run it.

    The folder, the profile and the tensor-parallel size are checked first. Options of vllm serve follow after --, as in
    `tilequant serve FOLDER --profile 2.5 -- --port 8000 --max-model-len 4096`.
    """
    command = serve_command(Checkpoint.open(folder), profile, activation, prefill_activation, int8_copy, dtype, tp, more or [])
    if as_json:
        print_json(command)
        return
    print(shlex.join(command), flush=True)
    if dry_run:
        return
    os.execv(vllm_program(), command)


def vllm_program() -> str:
    """Path of the `vllm` command; raises `ModuleNotFoundError` where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    beside = Path(sys.executable).with_name("vllm")  # that of this environment, whatever PATH says
    program = str(beside) if beside.exists() else shutil.which("vllm")
    if program is None:
        raise FileNotFoundError(f"vllm is installed, its command is neither beside {sys.executable} nor on the PATH")
    return program


def serve_command(
    checkpoint: Checkpoint,
    profile: str | None,
    activation: Activation,
    prefill_activation: PrefillActivation | None,
    int8_copy: bool,
    dtype: str,
    tp: int,
    more: list[str],
) -> list[str]:
    """The command line; raises `FormatError` on a profile that is not stored or a size that does not fall on tiles."""
    profiles = checkpoint.schema.profiles
    if profile is not None and profile not in profiles.choices:
        raise FormatError(f"unknown profile {profile!r}; this checkpoint has {profiles.choices}")
    legality = tensor_parallel(checkpoint, tp)
    if legality.faults:
        raise_faults(checkpoint.folder, [*legality.faults, f"legal tensor-parallel sizes are {legality.legal}"])
    if dtype == "auto":
        stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        dtype = stated if isinstance(stated, str) else "auto"
    settings: dict[str, str | bool] = {"profile": profile or profiles.default, "activation": activation.value}
    if prefill_activation is not None:
        settings["prefill_activation"] = prefill_activation.value
    if int8_copy:
        settings["int8_copy"] = True
    return [
        *("vllm", "serve", str(checkpoint.folder), "--quantization", QUANT_METHOD, "--dtype", dtype),
        *(("--tensor-parallel-size", str(tp)) if tp > 1 else ()),
        *("--additional-config", json.dumps({QUANT_METHOD: settings})),
        *more,
    ]

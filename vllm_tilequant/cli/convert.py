"""`tilequant convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from vllm_tilequant.checkpoint import convert as write
from vllm_tilequant.cli.output import JsonFlag, print_json, sizes


class Form(StrEnum):
    dense = "dense"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def convert(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)],
    to: Annotated[Form, typer.Option(help="What to write: an ordinary dense model.")] = Form.dense,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights written.")] = Dtype.bfloat16,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint as an ordinary dense model, every weight at its stored precision, for programs without tilequant.

    Tokenizer, chat template and generation config come along, and a SHA256SUMS is written. The folder appears under its name
    only when it is complete. Grading and INT8 activations are not part of a dense model.
    """
    files = write.to_dense(folder, output, getattr(torch, dtype.value))
    size = sum((output / file).stat().st_size for file in files)
    if as_json:
        print_json({"folder": str(output), "to": to.value, "dtype": dtype.value, "files": files, "bytes": size})
    else:
        print(f"{output}: written, {len(files)} weight file{'s' if len(files) > 1 else ''}, {sizes(size)} in {dtype.value}")

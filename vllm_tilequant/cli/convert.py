"""`tilequant convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vllm_tilequant.checkpoint import adopt, compressed
from vllm_tilequant.checkpoint import convert as write
from vllm_tilequant.checkpoint.files import read_config
from vllm_tilequant.checkpoint.foreign import is_foreign
from vllm_tilequant.cli.output import JsonFlag, print_errors, print_json, sizes


class Form(StrEnum):
    dense = "dense"
    w4a16 = "w4a16"
    w8a16 = "w8a16"
    w8a8 = "w8a8"
    tilequant = "tilequant"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def convert(
    folder: Annotated[Path, typer.Argument(help="A tilequant, GPTQ or compressed-tensors folder.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)],
    to: Annotated[Form, typer.Option(help="What to write.")] = Form.dense,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Round anew what the form cannot hold exactly, and tell the error.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of dense weights, norms, and compressed-tensors' scales.")] = Dtype.bfloat16,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint in another form.

    --to dense: an ordinary model, every weight at its stored precision, for programs without tilequant; also from GPTQ and
    compressed-tensors.

    --to w4a16, w8a16, w8a8: compressed-tensors, for stock vLLM and transformers. In w4a16 and w8a16, groups of 64 inputs,
    linears without rotations keep their codes if no tile is wider; with the scales in float32 (--dtype float32) nothing changes
    at all. All others, and w8a8 (one scale for each output), are refused by name, or rounded anew with --requantize.

    --to tilequant: from GPTQ or integer compressed-tensors; exact where one scale holds for whole tiles of 64 x 64 (block or
    tensor scales), else 8-bit tiles with --requantize. Such a checkpoint has no graded profile: to get those, run
    `tilequant quantize` on the original model.

    Tokenizer, chat template and generation config come along, and a SHA256SUMS is written. The folder appears under its name
    only when it is complete. Exit code 1 if the form cannot hold the checkpoint; every linear in the way is named.
    """
    chosen = getattr(torch, dtype.value)
    errors: dict[str, float] = {}
    if to is Form.tilequant:
        if "quantization_config" not in read_config(folder):
            raise ValueError(f"{folder} is an original model: use tilequant quantize {folder} {output} --data TEXT")
        if not is_foreign(folder):
            raise ValueError(f"{folder} is a tilequant checkpoint already")
        adopted = adopt.adopt(folder, output, chosen, requantize)
        files, errors = adopted.files, adopted.errors
    elif to is Form.dense:
        files = write.to_dense(folder, output, chosen)
    else:
        written = compressed.to_compressed(folder, output, compressed.Scheme(to.value), chosen, requantize)
        files, errors = written.files, written.errors
    size = sum((output / file).stat().st_size for file in files)
    if as_json:
        data: dict[str, Any] = {"folder": str(output), "to": to.value, "dtype": dtype.value, "files": files, "bytes": size}
        print_json(data | ({"errors": errors} if errors else {}))
        return
    number = f"{len(files)} weight file{'s' if len(files) > 1 else ''}"
    print(f"{output}: written, {number}, {sizes(size)}, {to.value} in {dtype.value}")
    if errors:
        print_errors(errors, f"relative error of the weights against those of {folder}, |W^ - W| / |W|")

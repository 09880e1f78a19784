"""Every class of broken checkpoint given to a real `vllm serve`: what it says, and after how many seconds it has ended.

    python tests/broken_starts.py [--checkpoint FOLDER] [--json FILE]

Runs in the serving environment. Each class changes one thing in a copy of a small checkpoint (the one given, or a Qwen2 of
random weights with biases and tiles of 2, 4, 6 and 8 bits). Exit code 1 if a server starts, ends with another message than
the validator's, or takes 20 seconds or more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SECONDS = 20
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Broken:
    """One class. change: what is done to the folder; says: part of the one error that follows."""

    change: Callable[[Path], object]
    says: str


def _tensors(edit: Callable[[dict[str, torch.Tensor], str], None]) -> Callable[[Path], None]:
    """A change of the stored tensors; `edit` gets them and the name of the first quantized linear."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        first = next(iter(json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]))
        edit(tensors, first)
        (folder / WEIGHTS).unlink()  # it may be a link to the original
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def _value(suffix: str, value: float, row: int = 0) -> Callable[[Path], None]:
    """A single value of a tensor of the first linear; `suffix` may also be the whole name of a tensor."""

    def edit(tensors: dict[str, torch.Tensor], first: str) -> None:
        name = suffix if suffix in tensors else f"{first}.{suffix}"
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[row] = value

    return _tensors(edit)


def _config(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        edit(config)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def _quantization(**fields: Any) -> Callable[[Path], None]:
    return _config(lambda config: config["quantization_config"].update(fields))


def _remove(suffix: str) -> Callable[[Path], None]:
    def edit(tensors: dict[str, torch.Tensor], first: str) -> None:
        del tensors[f"{first}.{suffix}"]

    return _tensors(edit)


def _replace(suffix: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return _tensors(lambda tensors, first: tensors.update({f"{first}.{suffix}": new(tensors[f"{first}.{suffix}"])}))


def _twice(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"quantization_config": {', '"quantization_config": {"tile": 64, ', 1))


def _index(folder: Path) -> None:
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), "../x.bin")})
    )


def _link(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    shutil.move(folder / WEIGHTS, outside)
    (folder / WEIGHTS).symlink_to(outside)


def _cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def _header(folder: Path) -> None:
    """Two tensors on the same bytes."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    a, b = [n for n in header if n.endswith("_layernorm.weight")][:2]
    header[a]["data_offsets"] = header[b]["data_offsets"]
    text = json.dumps(header).encode()
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _bias(tensors: dict[str, torch.Tensor], first: str) -> None:
    name = next(n for n in tensors if n.endswith(".bias"))
    tensors[name] = torch.full_like(tensors[name], torch.nan)


def _under_narrow(tensors: dict[str, torch.Tensor], first: str) -> None:
    for name, bits in tensors.items():
        if name.endswith("weight_tile_bits") and bool((bits == 2).any()):
            tensors[name.replace("tile_bits", "plane1")].fill_(0x55555555)


CLASSES: dict[str, Broken] = {
    "tensor missing": Broken(_remove("weight_tile_scale"), "weight_tile_scale: missing"),
    "tensor extra": Broken(_tensors(lambda t, n: t.update({f"{n}.weight": torch.ones(2, 2)})), "does not announce it"),
    "tensor of another type": Broken(_replace("weight_plane0", lambda t: t.to(torch.int64)), "I64"),
    "tensor of another shape": Broken(_replace("weight_extension", lambda t: t[:-1]), "weight_extension: I32"),
    "map value unknown": Broken(_value("weight_tile_bits", 3), "weight_tile_bits holds [3]"),
    "map against counts": Broken(_replace("weight_tile_bits", lambda t: 10 - t), "config.json promises"),
    "scale not a number": Broken(_value("weight_tile_scale", float("nan")), "not finite and > 0"),
    "scale negative": Broken(_value("weight_tile_scale", -1.0), "not finite and > 0"),
    "scale huge": Broken(_value("weight_tile_scale", 1e30), "wanted at most 2^64"),
    "transform out of the list": Broken(_value("output_transform", 77), "output_transform holds 77"),
    "thresholds descending": Broken(_value("thresholds", 1e9), "thresholds are not finite and ascending"),
    "thresholds infinite": Broken(_value("thresholds", float("inf"), 3), "thresholds are not finite and ascending"),
    "thresholds differ in a group": Broken(_value("thresholds", 0.0), "differ within the shared-input group"),
    "bias not finite": Broken(_tensors(_bias), "bias is not finite"),
    "embedding not finite": Broken(_value("model.embed_tokens.weight", float("nan")), "embed_tokens.weight is not finite"),
    "norm not finite": Broken(_value("model.norm.weight", float("inf")), "model.norm.weight is not finite"),
    "codes under 2-bit tiles": Broken(_tensors(_under_narrow), "is not empty under 2-bit tiles"),
    "file cut short": Broken(_cut, "is damaged or not a safetensors file"),
    "tensors overlap": Broken(_header, "is damaged or not a safetensors file"),
    "index leads outside": Broken(_index, "names files outside the folder"),
    "link leads outside": Broken(_link, "is a link that leads outside"),
    "pickle beside": Broken(lambda folder: (folder / "pytorch_model.bin").touch(), "may be pickles"),
    "weights of a stranger beside": Broken(
        lambda folder: (folder / "x.safetensors").write_bytes((folder / WEIGHTS).read_bytes()), "do not belong to it"
    ),
    "key twice in config.json": Broken(_twice, "the key 'tile' occurs twice"),
    "vocabulary without tensors": Broken(_config(lambda c: c.update(vocab_size=1 << 21)), "vocab_size and hidden_size say"),
    "layers without tensors": Broken(_config(lambda c: c.update(num_hidden_layers=900)), "num_hidden_layers is 900"),
    "newer format": Broken(_quantization(format_version=2, producer={"vllm-tilequant": "9.9"}), "vllm-tilequant 9.9 wrote it"),
    "feature unknown": Broken(_quantization(required_features=["colour"]), "features ['colour'] unknown"),
    "transform unknown": Broken(_quantization(transforms=[{"kind": "fourier"}]), "unknown transform kind 'fourier'"),
    "pattern of exponential time": Broken(_quantization(ignore=["re:(a+)+$"]), "repeats a group"),
    "size out of bounds": Broken(_quantization(tile=32), "tile is 32, wanted 64"),
}


def copy_of(base: Path, folder: Path, name: str) -> Path:
    """`base` with the change of class `name`; unchanged files are links within the file system, not copies."""
    shutil.copytree(base, folder, copy_function=os.link)
    config = folder / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text)
    CLASSES[name].change(folder)
    return folder


def start(folder: Path) -> tuple[float, int | None, str]:
    """(seconds until the server ended, its exit code or None if it had to be ended, what it printed)."""
    from serving import ENVIRONMENT, command, free_port, stop

    with tempfile.TemporaryDirectory(prefix="tq-") as scratch, (Path(scratch) / "log").open("w") as log:
        begin = time.monotonic()
        process = subprocess.Popen(
            command(folder, free_port(), "--enforce-eager", "--quantization", "tilequant"),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | {"TMPDIR": scratch},
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(6 * SECONDS)
        seconds = time.monotonic() - begin
        code = process.poll()
        stop(process)
        return seconds, code, Path(log.name).read_text()


def outcome(name: str, code: int | None, text: str) -> str:
    """`validator`, or what happened instead."""
    if code is None:
        return "it runs"
    if code == 0:
        return "it ended with 0"
    return "validator" if CLASSES[name].says in text else "another message"


def main() -> None:
    from toy import write_toy

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="a sound one in one file; classes it has no place for are left out")
    parser.add_argument("--only", action="append", choices=CLASSES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tq-broken-", dir=arguments.checkpoint and arguments.checkpoint.parent) as tmp:
        base = arguments.checkpoint or write_toy(Path(tmp) / "toy", kind="mixed2468", bias=True, kv_heads=2)
        print(f"{'class':30} {'seconds':>8}  {'load':>5}  ended by")
        for name in arguments.only or CLASSES:
            folder = Path(tmp) / "broken"
            try:
                copy_of(base, folder, name)
            except StopIteration:  # no such tensor in this checkpoint
                print(f"{name:30} {'-':>8}  {'-':>5}  no such tensor here")
                shutil.rmtree(folder)
                continue
            load = os.getloadavg()[0]
            seconds, code, text = start(folder)
            shutil.rmtree(folder)
            rows.append({"class": name, "seconds": round(seconds, 1), "load": round(load, 2), "by": outcome(name, code, text)})
            print(f"{name:30} {seconds:8.1f}  {load:5.2f}  {rows[-1]['by']}", flush=True)
            if rows[-1]["by"] != "validator":
                print(text[-1500:], file=sys.stderr)
    slowest = max(row["seconds"] for row in rows)
    print(f"{len(rows)} classes, slowest {slowest} s; {os.cpu_count()} CPUs ({platform.machine()})")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(slowest >= SECONDS or any(row["by"] != "validator" for row in rows))


if __name__ == "__main__":
    main()

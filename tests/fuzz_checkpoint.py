"""Mutate a small real checkpoint and see that each mutant is refused in words or loaded as it says.

    python tests/fuzz_checkpoint.py --mutants 10000 --seed 0

Mutant i depends on the seed and i alone: `--only I` runs one again and shows its traceback. The outcome of a mutant is
`refused` (one `FormatError`) or `equal` (dense weights, logits and graded outputs equal a float64 reconstruction that
`fuzz_truth.py` makes without the package's reader); everything else is a failure: another exception, a wrong answer, more
than 20 seconds, more than 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_truth import true_model

from toy import ROTATED, write_toy
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.schema import FormatError

SECONDS, GIB = 20, 1 << 30
SHAPE: dict[str, Any] = dict(hidden=64, intermediate=128, layers=1, heads=1, kv_heads=1, vocab=16, tokenizer=False)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 63, 65, 128, 1 << 20, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**400, 1.5, -0.5,
    1e308, "", "4", "-1", "off", "../x", "/etc/passwd", "re:(a+)+$", "re:(", "\x1b[2J", "\ud800", "x" * 5000, [], [None],
    [[]], [4, 4], {}, {"a": 1}, {"4": -3, "8": 5}, {"4": "1"}, ["x"] * 300,
]  # fmt: skip


class Hang(BaseException):
    """Not an `Exception`, so that no handler of the code under test can swallow it."""


# -- bases and mutations: each mutation takes (folder, random) and edits the folder ------------------------------------------


def make_bases(root: Path) -> list[Path]:
    """A Llama in one file; a Qwen2 with biases, rotated inputs and a quantized head; a Llama in two files with an index."""
    llama = write_toy(root / "llama", kind="mixed2468", **SHAPE)
    qwen = write_toy(root / "qwen", kind="mixed48", bias=True, rotated=ROTATED, head=True, **SHAPE | {"vocab": 64})
    sharded = write_toy(root / "sharded", kind="mixed48", seed=1, **SHAPE)
    tensors = load_file(sharded / WEIGHTS)
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, sharded / file)
    (sharded / WEIGHTS).unlink()
    weight_map = {n: f for f, part in shards.items() for n in part}
    (sharded / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [llama, qwen, sharded]


def edit_json(data: Any, r: random.Random) -> Any:
    """One random change somewhere in a JSON value: replace, remove, rename, copy or add."""
    parent, at = None, data
    while isinstance(at, (dict, list)) and at and (parent is None or r.random() < 0.8):
        key = r.choice(list(at)) if isinstance(at, dict) else r.randrange(len(at))
        parent, place, at = at, key, at[key]
    if parent is None:
        return r.choice(ODD)
    kind = r.choice(("replace", "replace", "replace", "near", "remove", "rename", "add"))
    if kind == "near" and type(at) is int:
        parent[place] = at + r.choice((-64, -1, 1, 64))
    elif kind == "remove":
        del parent[place]
    elif kind == "rename" and isinstance(parent, dict):
        parent[r.choice(("", "x", str(place) + "2", "\ud800", "a/../b"))] = parent.pop(place)
    elif kind == "add" and isinstance(parent, dict):
        parent[r.choice(("extra", "auto_map", "weight", "2", "5"))] = r.choice(ODD)
    else:
        parent[place] = r.choice(ODD)
    return data


def edit_bytes(data: bytes, r: random.Random) -> bytes:
    """Flip, cut, insert or repeat a few bytes."""
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 4, 16))):
        i = r.randrange(len(out)) if out else 0
        match r.choice(("flip", "flip", "flip", "set", "cut", "insert", "repeat")):
            case "flip" if out:
                out[i] ^= 1 << r.randrange(8)
            case "set" if out:
                out[i] = r.choice((0, 0x22, 0x5B, 0x7B, 0xFF, 0x39))
            case "cut":
                del out[i : i + r.choice((1, 8, 1000))]
            case "insert":
                out[i:i] = r.choice((b"\0", b"[" * 3000, b"9" * 5000, b"NaN", b'"', b"\xff\xfe", b"{}"))
            case "repeat":
                out[i:i] = out[i : i + 64]
    return bytes(out)


def dumps(data: Any) -> bytes:
    return json.dumps(data).encode()


def weight_file(folder: Path, r: random.Random) -> Path:
    return r.choice(sorted(folder.glob("*.safetensors")))


def split(path: Path) -> tuple[bytes, bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], raw[8 + length :]


def join(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def config_values(folder: Path, r: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    for _ in range(r.choice((1, 1, 2))):
        part = config.get("quantization_config") if isinstance(config, dict) else None
        config = edit_json(config, r) if r.random() < 0.4 or not isinstance(part, dict) else _inside(config, r)
    (folder / "config.json").write_bytes(dumps(config))


def _inside(config: dict, r: random.Random) -> dict:
    config["quantization_config"] = edit_json(config["quantization_config"], r)
    return config


def config_text(folder: Path, r: random.Random) -> None:
    path = folder / "config.json"
    path.write_bytes(edit_bytes(path.read_bytes(), r))


def header_values(folder: Path, r: random.Random) -> None:
    path = weight_file(folder, r)
    header, data = split(path)
    fields = json.loads(header)
    if r.random() < 0.2:  # two tensors exchange an entry, or lie on the same bytes
        a, b = r.sample([n for n in fields if n != "__metadata__"], 2)
        key = r.choice(("data_offsets", "shape", "dtype"))
        fields[a][key], fields[b][key] = fields[b][key], fields[r.choice((a, b))][key]
    else:
        fields = edit_json(fields, r)
    join(path, dumps(fields), data)


def header_bytes(folder: Path, r: random.Random) -> None:
    path = weight_file(folder, r)
    header, data = split(path)
    if r.random() < 0.3:
        raw = path.read_bytes()
        path.write_bytes(edit_bytes(raw[:8], r)[:8].ljust(8, b"\0") + raw[8:])
    elif r.random() < 0.2:  # the first tensor a second time
        join(path, b"{" + header.strip()[1:-1] + b"," + header.strip()[1:], data)
    else:
        join(path, edit_bytes(header, r), data)


def metadata(folder: Path, r: random.Random) -> None:
    path = weight_file(folder, r)
    header, data = split(path)
    fields = json.loads(header)
    fields["__metadata__"] = r.choice([*ODD, {"format": r.choice(ODD)}, {"format": "pt", "x": "y" * 10000}, {"a": {"b": {}}}])
    join(path, dumps(fields), data)


def index(folder: Path, r: random.Random) -> None:
    path = folder / INDEX
    if not path.exists():
        path.write_bytes(dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)}))
    if r.random() < 0.25:
        path.write_bytes(edit_bytes(path.read_bytes(), r))
        return
    fields = json.loads(path.read_text())
    if r.random() < 0.5:
        name = r.choice(list(fields["weight_map"]))
        stems = ("../a", "/a", "sub/a", "\0", "", "%2e%2e/a", "model-1", "model-2", "model-3")
        fields["weight_map"][name] = r.choice(("a.bin", "..", "config.json", *(f"{stem}.safetensors" for stem in stems)))
    else:
        fields = edit_json(fields, r)
    path.write_bytes(dumps(fields))


def payload(folder: Path, r: random.Random) -> None:
    path = weight_file(folder, r)
    header, data = split(path)
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 8))):
        out[r.randrange(len(out))] ^= 1 << r.randrange(8)
    join(path, header, bytes(out))


def small_tensors(folder: Path, r: random.Random) -> None:
    """The tensors a flip anywhere seldom meets: maps, scales, transform indices, thresholds, biases, norms."""
    path = weight_file(folder, r)
    tensors = load_file(path)
    small = [n for n in tensors if 0 < tensors[n].numel() <= 256]
    t = tensors[r.choice(small)]
    i = r.randrange(t.numel())
    if t.is_floating_point():
        odd = (0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-45, 1e-39, 1e30, 65504.0, 2.0, 1e-3)
        t.view(-1)[i] = r.choice(odd)
    else:
        t.view(-1)[i] = r.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64, 128, 255))
    save_file(tensors, path)


def size(folder: Path, r: random.Random) -> None:
    path = r.choice([weight_file(folder, r), folder / "config.json"])
    data = path.read_bytes()
    cut = r.randrange(len(data))
    path.write_bytes(r.choice((data[:cut], data[cut:], b"", data + b"\0" * r.choice((1, 8, 4096)), data[:7], data + data)))


def surroundings(folder: Path, r: random.Random) -> None:
    """Files beside, links, pipes and folders in place of files, tensors under other names."""
    path = r.choice([weight_file(folder, r), folder / "config.json"])
    match r.choice(("pickle", "stranger", "link out", "link in", "pipe", "folder", "gone", "rename", "harmless", "both")):
        case "pickle":
            (folder / r.choice(("pytorch_model.bin", "x.pt", "X.PTH", "a.pkl", "a.ckpt"))).write_bytes(b"\x80\x04.")
        case "stranger":
            shutil.copy(weight_file(folder, r), folder / "extra.safetensors")
        case "link out":
            outside = folder.parent / f"{folder.name}-outside"
            path.rename(outside)
            path.symlink_to(outside)
        case "link in":
            path.rename(folder / "kept")
            path.symlink_to("kept")
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "folder":
            path.unlink()
            path.mkdir()
        case "gone":
            path.unlink()
        case "rename":
            file = weight_file(folder, r)
            tensors = load_file(file)
            name = r.choice(sorted(tensors))
            tensors[r.choice((name + "x", name.replace("0", "1"), "x", "\x1b[31m"))] = tensors.pop(name)
            save_file(tensors, file)
        case "harmless":
            (folder / r.choice(("README.md", "notes.txt", "code.py"))).write_text("import os")
        case "both":
            (folder / INDEX).write_bytes(dumps({"weight_map": {"a": WEIGHTS}}))


CLASSES: dict[str, tuple[int, Callable[[Path, random.Random], None]]] = {
    "config values": (20, config_values),
    "config text": (6, config_text),
    "header values": (14, header_values),
    "header bytes": (8, header_bytes),
    "metadata": (4, metadata),
    "index": (8, index),
    "payload bits": (18, payload),
    "small tensors": (14, small_tensors),
    "file size": (4, size),
    "surroundings": (4, surroundings),
}


# -- judging ------------------------------------------------------------------------------------------------------------------


def close(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """Relative to the largest wanted value; not-a-numbers must agree."""
    with np.errstate(all="ignore"):
        error = np.abs(got - want)
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0, error)
        scale = np.nanmax(np.nan_to_num(np.abs(want)), initial=0)
        if not (error <= tolerance * scale + 1e-37).all():
            raise AssertionError(f"{what}: off by {np.nanmax(error):.3g} of {scale:.3g}")


def judge(folder: Path, number: int) -> str:
    """`refused` or `equal`; raises what went wrong."""
    from transformers import AutoModelForCausalLM

    from vllm_tilequant import hf

    try:
        verify(folder)
        dense = hf.load_dense(folder)
        graded = hf.load_reference(folder, activation="none", graded="always")
    except FormatError as e:
        message = str(e)
        if not message or len(message) > 8000 or any(not line.isprintable() for line in message.split("\n")):
            raise AssertionError(f"not a readable error: {message[:300]!r}") from None
        return "refused"
    try:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    except KeyError as e:
        if str(e) != "'metadata'":  # transformers itself, before it asks us, cannot do without this part of an index
            raise
        plain = dense.state_dict()
    for name, tensor in dense.state_dict().items():
        if not torch.equal(tensor, plain[name]):
            raise AssertionError(f"{name}: from_pretrained and load_dense differ")
    truth, linears = true_model(folder)
    for name, linear in linears.items():
        # one rounding to float32 of each dense weight
        close(dense.get_submodule(name).weight.double().numpy(), linear.weight(), 1e-6, f"weight of {name}")
        x = np.random.default_rng(number).normal(size=linear.codes.shape[1]).astype(np.float32)
        profile = number % linear.thresholds.shape[0]
        hf.set_profile(graded, graded.tilequant.schema.profiles.names[profile])
        y = graded.get_submodule(name)(torch.from_numpy(x)[None])[0].double().numpy()
        sums = np.abs(linear.read(np.full(x.size, 8)) @ np.diag(np.abs(x))).sum(1).max()  # what float32 sums can be off by
        close(np.append(y, sums), np.append(linear.graded(x.astype(np.float64), profile), sums), 1e-5, f"output of {name}")
    ids = torch.arange(8)[None] % dense.config.vocab_size
    with torch.no_grad():  # the weights are judged, not float32 arithmetic on a broken model's huge values
        close(dense.double()(ids).logits.numpy(), truth(ids).logits.numpy(), 1e-3, "logits")
    return "equal"


def run(mutants: int, seed: int, first: int = 0, debug: bool = False) -> tuple[dict[str, Counter], list[str]]:
    """(class -> counts of outcomes, failures as text)."""

    def on_alarm(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, on_alarm)
    counts: dict[str, Counter] = defaultdict(Counter)
    failures = []
    names = list(CLASSES)
    with tempfile.TemporaryDirectory() as tmp:
        bases = make_bases(Path(tmp))
        for base in bases:
            assert judge(base, 0) == "equal", base
        for number in range(first, first + mutants):
            r = random.Random(f"{seed}/{number}")
            name = r.choices(names, [CLASSES[n][0] for n in names])[0]
            base = r.choice(bases)
            folder = Path(tmp) / "mutant"
            shutil.copytree(base, folder)
            CLASSES[name][1](folder, r)
            signal.alarm(SECONDS)
            try:
                outcome = judge(folder, number)
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
                outcome = "FAILED"
                failures.append(f"mutant {number} ({name}, {base.name}): {type(e).__name__}: {str(e)[:300]}")
                print(failures[-1], file=sys.stderr, flush=True)
                if debug:
                    traceback.print_exc()
            finally:
                signal.alarm(0)
            counts[name][outcome] += 1
            shutil.rmtree(folder)
    signal.signal(signal.SIGALRM, before)
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this mutant alone")
    arguments = parser.parse_args()
    judge_imports()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * GIB, resource.RLIM_INFINITY))
    alone = arguments.only is not None
    first, mutants = (arguments.only, 1) if alone else (arguments.first, arguments.mutants)
    counts, failures = run(mutants, arguments.seed, first, debug=alone)
    total: Counter = sum(counts.values(), Counter())
    print(f"{'class':16} {'mutants':>8} {'refused':>8} {'equal':>8} {'failed':>8}")
    for name, c in [*((n, counts[n]) for n in CLASSES), ("all", total)]:
        print(f"{name:16} {c.total():8} {c['refused']:8} {c['equal']:8} {c['FAILED']:8}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    raise SystemExit(bool(failures))


def judge_imports() -> None:
    """Load the libraries before the memory limit is set relative to what they use."""
    with tempfile.TemporaryDirectory() as tmp:
        judge(make_bases(Path(tmp))[0], 0)


if __name__ == "__main__":
    main()

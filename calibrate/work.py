"""The folder of an unfinished run: a log, the state of finished steps and layers, and a fingerprint of what they belong to.

Every file is written beside its place and then moved there, so that a kill at any moment leaves whole files only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LOG = "log.txt"
_FINGERPRINT = "fingerprint.json"
#: Of every weight file: its header, and this many samples of this many bytes, evenly spaced.
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


class WorkFolder:
    """State by name. types: the dataclasses that it may hold."""

    def __init__(self, folder: Path, types: tuple[type, ...]):
        self.folder, self.types = folder, {t.__name__: t for t in types}
        self.log = folder / LOG

    @classmethod
    def open(cls, folder: Path, types: tuple[type, ...], fingerprint: Mapping[str, Any], *, resume: bool) -> WorkFolder:
        """Begin a folder, or go on with it when `resume`; a run holds it until its process ends.

        Raises `FileExistsError` when an unfinished run lies there and `resume` is not given, `BlockingIOError` when it is
        still running, `ValueError` when it was made from something else.
        """
        work = cls(folder, types)
        path = folder / _FINGERPRINT
        wanted = json.loads(json.dumps(fingerprint))
        known = path.is_file()
        if known and not resume:
            raise FileExistsError(f"{folder} holds an unfinished run: go on with it by --resume, or remove the folder")
        if known:
            found = json.loads(path.read_text())
            if other := sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k)):
                raise ValueError(
                    f"{folder} was begun with another {' and another '.join(other)}{_difference(found, wanted, other)}: "
                    "resume with the same ones, or remove the folder"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not the work folder of a run: remove it or choose another output")
        folder.mkdir(parents=True, exist_ok=True)
        work._lock()
        if not known:
            _replace(path, json.dumps(wanted, indent=1).encode())
        return work

    def save(self, name: str, state: Any) -> None:
        """Keep tensors, numbers, strings, the known dataclasses, and dicts, lists and tuples of these under a name."""
        tensors: dict[str, Tensor] = {}
        tree = _encode(state, tensors)
        path = self._path(name)
        path.parent.mkdir(exist_ok=True)
        scratch = path.with_suffix(".new")
        save_file(tensors or {"none": torch.zeros(0)}, scratch, metadata={"tree": json.dumps(tree)})
        scratch.replace(path)

    def load(self, name: str) -> Any | None:
        """What was kept under a name, on the CPU, or None."""
        path = self._path(name)
        if not path.is_file():
            return None
        with safe_open(path, "pt") as f:
            return _decode(json.loads(f.metadata()["tree"]), f.get_tensor, self.types)

    @property
    def empty(self) -> bool:
        return not list(self.folder.glob("state/*.safetensors"))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / "state" / f"{name}.safetensors"

    def _lock(self) -> None:
        self._held = self.log.open("a")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another run is at work in {self.folder}: wait for it, or end it") from None


def model_fingerprint(folder: Path) -> str:
    """Of config.json and every weight file: name, size, header and samples of the contents.

    Not of every byte, which would cost minutes on a large model: a change of single weights between two samples is not seen.
    """
    h = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        h.update(f"{path.name} {size}".encode())
        with path.open("rb") as f:
            h.update(f.read(8 + int.from_bytes(f.read(8), "little")))
            for i in range(_SAMPLES):
                f.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                h.update(f.read(_SAMPLE_BYTES))
    return h.hexdigest()


def _difference(found: Mapping, wanted: Mapping, names: list[str]) -> str:
    """The fields that differ, where a part of the fingerprint has fields."""
    parts = []
    for name in names:
        old, new = found.get(name), wanted.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            parts += [f"{k} {old.get(k)!r}, now {new.get(k)!r}" for k in sorted(old | new) if old.get(k) != new.get(k)]
    return f" ({'; '.join(parts)})" if parts else ""


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous().clone()  # a clone: two tensors of a file may not share storage
        return {"tensor": key}
    if isinstance(value, dict):
        return {"dict": [[k, _encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encode(v, tensors) for v in value]}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "class": type(value).__name__,
            "fields": {f.name: _encode(getattr(value, f.name), tensors) for f in fields(value)},
        }
    if value is None or isinstance(value, str | int | float | bool):
        return {"value": value}
    raise TypeError(f"state of type {type(value).__name__} cannot be kept")


def _decode(tree: dict, tensor: Any, types: Mapping[str, type]) -> Any:
    if "tensor" in tree:
        return tensor(tree["tensor"])
    if "dict" in tree:
        return {k: _decode(v, tensor, types) for k, v in tree["dict"]}
    if "list" in tree:
        return [_decode(v, tensor, types) for v in tree["list"]]
    if "tuple" in tree:
        return tuple(_decode(v, tensor, types) for v in tree["tuple"])
    if "class" in tree:
        made: Any = object.__new__(types[tree["class"]])  # as it was, whatever its constructor would do
        for name, part in tree["fields"].items():
            object.__setattr__(made, name, _decode(part, tensor, types))
        return made
    return tree["value"]


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(data)
    os.replace(scratch, path)

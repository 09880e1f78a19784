"""The files of a checkpoint folder, read as if a stranger had written them: names, sizes, JSON and safetensors headers.

Nothing is allocated from a number that a file states before that number is compared with the file's own size. Every fault,
whatever its form, is a `CheckpointError` with one readable message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_tilequant.schema import FormatError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Files that hold Python objects: reading one can run code. A folder with any is refused, so that no other loader picks it.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_JSON_BYTES = 64 << 20
MAX_HEADER_BYTES = 100 << 20  #: what safetensors itself allows
MAX_DIMENSIONS = 8
MAX_NAME = 256
#: Bits of one element of every safetensors type; a type that is not listed is refused by name.
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_SHOWN = 12
_LONGEST_LINE = 400


class CheckpointError(FormatError):
    """A folder that is not a complete, consistent tilequant checkpoint. The message lists every fault."""


@dataclass(frozen=True)
class Header:
    """Where a tensor lies and what its file says about it; `dtype` is the safetensors name."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class Tensors:
    """The tensors of a folder whose headers were checked. Read on demand, memory-mapped."""

    def __init__(self, folder: Path, headers: dict[str, Header]):
        self.folder, self.headers = folder, headers
        self._handles: dict[str, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """One tensor by its full name, on the CPU, as stored: its values are not judged."""
        file = self.headers[name].file
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(self.folder / file, framework="pt")
            return self._handles[file].get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{self.folder / file}: tensor {name} cannot be read: {e}") from None


def raise_faults(folder: Path, faults: list[str], what: str = "tilequant checkpoint") -> None:
    """Raise one `CheckpointError` for all faults of a folder that should be `what`; nothing when there is none."""
    if not faults:
        return
    shown = "\n  ".join(printable(fault) for fault in faults[:_SHOWN])
    more = f"\n  ... and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise CheckpointError(f"{folder} is not a sound {what} ({len(faults)} faults):\n  {shown}{more}")


def printable(text: object) -> str:
    """One line a terminal can take: names from a file may hold escape sequences, lone surrogates, or a megabyte."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}... ({len(line)} characters)"


def parse_json(text: bytes, where: str) -> Any:
    """Strict JSON: UTF-8, every key once, no NaN or Infinity, no nesting or number that Python cannot take."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{where} is not JSON that can be read: it nests too deeply") from None
    except ValueError as e:  # includes JSONDecodeError, UnicodeDecodeError and integers of thousands of digits
        raise CheckpointError(f"{where} is not JSON: {printable(e)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} occurs twice")
        out[key] = value
    return out


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder; raises `CheckpointError`."""
    path = checked_file(folder, name)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, more than the {MAX_JSON_BYTES} that such a file may have")
    try:
        data = parse_json(path.read_bytes(), str(path))
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return data


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; raises `CheckpointError` in one sentence when there is none or it is no JSON object."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG}: it is not a model folder")
    return read_json_object(folder, CONFIG)


def checked_file(folder: Path, name: str) -> Path:
    """Path of a regular file of the folder. A link may lead elsewhere in the folder or, as in Hugging Face's cache, from
    `snapshots/REVISION` to the `blobs` beside; any other way out is refused."""
    path = folder / name
    if not path.is_file():  # also no pipe or device, on which a read would wait forever
        raise CheckpointError(f"{folder}: {printable(name)} is missing or no regular file")
    home, target = folder.resolve(), path.resolve()
    roots = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{folder}: {name} is a link that leads outside the folder, to {target}: put the file itself in")
    return path


def read_headers(folder: Path, *, strangers: bool = False) -> dict[str, Header]:
    """Name -> header of every tensor of the folder's safetensors files. Raises `CheckpointError`.

    strangers: tolerate other weight files and pickles beside (they are not read): for a source model of the user's own.
    """
    files, listed = weight_files(folder)
    if not strangers:
        _refuse_strangers(folder, files)
    headers: dict[str, Header] = {}
    for file in files:
        if not (folder / file).exists():
            raise CheckpointError(f"{folder}: {file} is missing, though the index lists it")
        for name, header in file_headers(folder, file).items():
            if name in headers:
                raise CheckpointError(f"{folder}: tensor {printable(name)} is in both {headers[name].file} and {file}")
            headers[name] = header
    if listed is not None:
        files_of = {name: header.file for name, header in headers.items()}
        raise_faults(
            folder,
            [f"{n}: the index names it, {f} does not hold it" for n, f in listed.items() if files_of.get(n) != f]
            + [f"{n}: not in the index" for n in headers if n not in listed],
        )
    return headers


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The weight files, and the index's own map of tensor -> file if the folder has an index."""
    weight_map = None
    if (folder / INDEX).exists():
        fields = read_json_object(folder, INDEX)
        weight_map = fields.get("weight_map")
        if not isinstance(fields.get("metadata", {}), dict):
            raise CheckpointError(f"{folder / INDEX} is not a safetensors index: its metadata is no object")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX} is not a safetensors index: wanted an object weight_map, tensor -> file")
        files = sorted(set(weight_map.values()))
        # The index is a trust boundary: a file name may not lead out of the folder.
        if bad := [f for f in files if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", f)]:
            shown = printable(bad[:3])
            raise CheckpointError(f"{folder / INDEX} names files outside the folder or of another kind: {shown}")
    elif (folder / SINGLE).exists():
        files = [SINGLE]
    else:
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}: no weights")
    return files, weight_map


def refuse_pickles(folder: Path) -> None:
    """Raise `CheckpointError` where another loader could take a pickle."""
    names = sorted(p.name for p in folder.iterdir())
    if pickled := [n for n in names if n.lower().endswith(PICKLE_SUFFIXES)]:
        raise CheckpointError(
            f"{folder} holds files that may be pickles, which can run code when read: {printable(', '.join(pickled[:3]))}; "
            "a tilequant checkpoint has safetensors only: remove them"
        )


def _refuse_strangers(folder: Path, files: Iterable[str]) -> None:
    """Other weight files: loaders differ in which of several they take, so there may be only one answer."""
    refuse_pickles(folder)
    names = sorted(p.name for p in folder.iterdir())
    if strange := [n for n in names if n.endswith(".safetensors") and n not in files]:
        raise CheckpointError(
            f"{folder} holds weight files that do not belong to it: {printable(', '.join(strange[:3]))}; some loaders would "
            "read them as well: remove them"
        )


def file_headers(folder: Path, file: str) -> dict[str, Header]:
    """Headers of one file, after its whole layout has been checked: every byte belongs to exactly one tensor."""
    path = checked_file(folder, file)

    def damaged(why: object) -> CheckpointError:
        return CheckpointError(f"{path} is damaged or not a safetensors file: {printable(why)}")

    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(f"its header claims {length} bytes, the file has {size}")
            raw = f.read(length)
    except OSError as e:
        raise damaged(e.strerror) from None
    entries = parse_json(raw, f"the header of {path}")
    if not isinstance(entries, dict):
        raise damaged("its header is no JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged("its metadata is no object of strings")
    headers, spans = {}, []
    for name, entry in entries.items():
        if len(name) > MAX_NAME:
            raise damaged(f"a tensor's name has {len(name)} characters, more than {MAX_NAME}")
        try:
            headers[name], span = _header(file, entry)
        except ValueError as e:
            raise damaged(f"tensor {name}: {e}") from None
        spans.append(span)
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise damaged(f"its tensors {'overlap' if begin < position else 'leave a gap'} at byte {position} of the data")
        position = end
    if position != size - 8 - length:
        raise damaged(f"its header describes {position} bytes of data, the file has {size - 8 - length}")
    try:  # the library that will read the tensors must agree
        with safe_open(path, framework="pt") as f:
            if set(f.keys()) != set(headers):
                raise damaged("two readers find different tensors in it")
    except (SafetensorError, OSError) as e:
        raise damaged(e) from None
    return headers


def _header(file: str, entry: Any) -> tuple[Header, tuple[int, int]]:
    """One entry of a safetensors header and its span of the data; raises `ValueError`."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("wanted an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"dtype {dtype!r} is not known")
    for what, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 1 << 63 for v in values):
            raise ValueError(f"{what} {values!r} is no list of sizes")
    if len(shape) > MAX_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"{len(shape)} dimensions and {len(offsets)} offsets, wanted at most {MAX_DIMENSIONS} and 2")
    header = Header(file, dtype, tuple(shape))
    if offsets[1] - offsets[0] != header.nbytes:
        raise ValueError(f"{dtype} {shape} takes {header.nbytes} bytes, its offsets span {offsets[1] - offsets[0]}")
    return header, (offsets[0], offsets[1])

"""The state of a running engine as vLLM saves it, rank by rank: whose files a folder holds, and whether they are sound.

Each file holds tensors of one rank under vLLM's names. Those of a quantized layer are the format's, cut and joined as the rank
serves them (`vllm_tilequant/state.py`). What they must be follows from the ranks, so that a rank judges its own; here is what
can be said of a folder without knowing how it will be served.
"""

from __future__ import annotations

import glob
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vllm_tilequant.checkpoint.files import (
    INDEX,
    SINGLE,
    CheckpointError,
    Header,
    Tensors,
    file_headers,
    printable,
    raise_faults,
    refuse_pickles,
    weight_files,
)
from vllm_tilequant.checkpoint.reader import dense_faults

#: vLLM's own names of the files, of one and of several pipeline stages. A user may give another pattern.
ONE_STAGE = "model-rank-{rank}-part-{part}.safetensors"
STAGES = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"
_SHOWN = 12
#: Fields of a pattern, by what they count.
_FIELDS = {"rank": "tp", "tp_rank": "tp", "pp_rank": "pp", "part": "part"}


@dataclass(frozen=True)
class SavedFile:
    """name: within the folder; tp, pp: the rank that it belongs to; part: what the name says there."""

    name: str
    tp: int
    pp: int
    part: str


def saved_files(folder: Path, pattern: str) -> list[SavedFile]:
    """The files whose names have the form of `pattern`, by rank. Raises `ValueError` for a pattern that vLLM does not know."""
    try:
        pieces = [(text, field) for text, field, _, _ in string.Formatter().parse(pattern)]
    except ValueError as e:
        raise ValueError(f"the pattern {pattern!r} of saved files cannot be read: {e}") from None
    if unknown := sorted({field for _, field in pieces if field is not None} - _FIELDS.keys()):
        raise ValueError(f"the pattern {pattern!r} of saved files has fields {unknown}; legal ones are {sorted(_FIELDS)}")
    form, seen = "", set[str]()
    for text, field in pieces:
        form += re.escape(text)
        if field is not None:
            group = _FIELDS[field]
            values = "[^/]*" if group == "part" else "0|[1-9][0-9]*"
            form += f"(?P={group})" if group in seen else f"(?P<{group}>{values})"
            seen.add(group)
    found = []
    for path in folder.glob("".join(glob.escape(text) + ("" if field is None else "*") for text, field in pieces)):
        name = path.relative_to(folder).as_posix()
        if (match := re.fullmatch(form, name)) is not None:
            given = match.groupdict()
            found.append(SavedFile(name, int(given.get("tp", 0)), int(given.get("pp", 0)), given.get("part", "")))
    return sorted(found, key=lambda file: (file.pp, file.tp, len(file.part), file.part))


def sizes(files: Iterable[SavedFile]) -> str:
    """How the engine ran that saved them, in a user's words."""
    tp, pp = (1 + max(ranks) for ranks in zip(*((file.tp, file.pp) for file in files), strict=True))
    return f"tensor parallel size {tp}" + (f", pipeline parallel size {pp}" if pp > 1 else "")


def default_files(folder: Path) -> list[SavedFile]:
    """The files under vLLM's own names."""
    return saved_files(folder, ONE_STAGE) + saved_files(folder, STAGES)


def holds_checkpoint(folder: Path) -> bool:
    """Whether any weight file is there that an ordinary checkpoint would name. An index alone may be a copied one."""
    if (folder / SINGLE).exists():
        return True
    return (folder / INDEX).exists() and any((folder / file).exists() for file in weight_files(folder)[0])


def rank_headers(folder: Path, files: Iterable[SavedFile]) -> dict[str, Header]:
    """Name -> header of every tensor of one rank. Raises `CheckpointError`."""
    headers: dict[str, Header] = {}
    for file in files:
        for name, header in file_headers(folder, file.name).items():
            if name in headers:
                raise CheckpointError(
                    f"{folder}: tensor {printable(name)} is in both {headers[name].file} and {file.name}: one of them was left "
                    "behind by an earlier save"
                )
            headers[name] = header
    return headers


def judge(folder: Path, files: list[SavedFile]) -> None:
    """Raise `CheckpointError` listing what is wrong with a folder whatever it is served with.

    All ranks are there and all parts of each; no other weights beside; sound headers; every floating-point tensor finite.
    """
    refuse_pickles(folder)
    ranks: dict[tuple[int, int], list[SavedFile]] = {}
    for file in files:
        ranks.setdefault((file.pp, file.tp), []).append(file)
    names = {file.name for file in files}
    faults = [
        f"{path.name}: no part of the saved state; some loaders would read it as well: remove it"
        for path in sorted(folder.glob("*.safetensors"))
        if path.name not in names
    ]
    stages, size = (1 + max(numbers) for numbers in zip(*ranks, strict=True))
    missing = ((p, t) for p in range(stages) for t in range(size) if (p, t) not in ranks)
    # Not all of them: a name may say any number.
    faults += [f"no file of rank {t}{f' of stage {p}' if p else ''}" for p, t in islice(missing, _SHOWN)]
    for (p, t), own in ranks.items():
        if [file.part for file in own] != [str(i) for i in range(len(own))]:
            stage = f" of stage {p}" if p else ""
            faults.append(f"rank {t}{stage} has parts {', '.join(file.part for file in own)}, wanted 0 and those after it")
    raise_faults(folder, faults, "sharded state")
    for own in ranks.values():
        faults += value_faults(folder, rank_headers(folder, own))
    raise_faults(folder, faults, "sharded state")


def value_faults(folder: Path, headers: dict[str, Header]) -> list[str]:
    """Which floating-point tensors of a rank are not finite."""
    tensors = Tensors(folder, headers)
    return [
        f"{header.file}: {fault}"
        for name, header in headers.items()
        if header.dtype in ("F64", "F32", "F16", "BF16")
        for fault in dense_faults(name, tensors.tensor(name))
    ]

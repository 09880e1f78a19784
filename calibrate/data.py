"""Calibration records: documents tokenized, then packed into full windows or padded to them."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from vllm_tilequant.calibrate.sources import Document, documents

#: Tokens of a record below which it says nothing.
_SHORTEST = 8
#: Times the wanted tokens that are read to choose from; a whole corpus is not tokenized.
_CHOICE = 64
#: One record in this many, beyond those asked for, is kept to check the thresholds on.
_HELD_OUT = 8


@dataclass(frozen=True)
class Records:
    """calibration, held_out: columns input_ids and attention_mask; report: what was used, for `calibration_report.json`."""

    calibration: Dataset
    held_out: Dataset | None
    report: dict[str, Any]


def bundled_text() -> Path:
    """The calibration text that comes with the package: our own writing, about 6,000 words of many kinds."""
    return Path(str(importlib.resources.files("vllm_tilequant.configs").joinpath("calibration") / "bundled.txt"))


def load_calibration(
    source: str | Path, tokenizer: Any, *, samples: int, length: int, seed: int = 0, pad: bool = False
) -> Dataset:
    """Records of `length` tokens, ready for `oneshot` (columns input_ids, attention_mask): see `load_records`."""
    return load_records(source, tokenizer, samples=samples, length=length, seed=seed, pad=pad, held_out=False).calibration


def load_records(
    source: str | Path,
    tokenizer: Any,
    *,
    samples: int,
    length: int,
    seed: int = 0,
    pad: bool = False,
    held_out: bool = True,
) -> Records:
    """Records of `length` tokens from a local file or a hub set (`sources.documents` says which).

    pad: False joins the documents with the end-of-text token between them and cuts windows, without padding. True makes each
        document one record, cut at `length` or padded on the right; documents of less than 8 tokens are left out.
    held_out: also records to check the thresholds on, one in eight of `samples` (none below 8): text beyond the chosen
        records, or the last of these where there is no more text.

    From more records than `samples` a choice is taken evenly; the seed orders the documents. The same arguments give the same
    bytes. Raises `ValueError` when the source gives no record, or is of an unknown kind.
    """
    if samples < 1 or length < _SHORTEST:
        raise ValueError(f"samples {samples} and length {length}: at least 1 record of {_SHORTEST} tokens is needed")
    stream = (_tokens(d, tokenizer) for d in documents(source, seed))
    cut = _padded if pad else _packed
    rows, read = cut(stream, samples, length, tokenizer)
    if not rows:
        wanted = f"one document of {_SHORTEST}" if pad else f"one record of {length}"
        raise ValueError(f"calibration data {source} has {read} tokens, fewer than {wanted}")
    step = max(1.0, len(rows) / samples)  # evenly over the text, so that no part of it is left out
    chosen = [int(i * step) for i in range(min(samples, len(rows)))]
    rest = sorted(set(range(len(rows))) - set(chosen))
    checked: list[int] = []
    if held_out and len(chosen) >= _HELD_OUT:
        count = len(chosen) // _HELD_OUT
        if rest:
            checked = rest[:: max(1, len(rest) // count)][:count]
        else:
            chosen, checked = chosen[:-count], chosen[-count:]
    filler = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    calibration = _dataset([rows[i] for i in chosen], length, filler)
    report = {
        "source": Path(source).name if Path(source).is_file() else str(source),
        "records": len(chosen),
        "length": length,
        "padded": pad,
        "tokens_read": read,
        "tokens_used": sum(len(rows[i]) for i in chosen),
        "padding": sum(length - len(rows[i]) for i in chosen),
        "held_out_records": len(checked),
        "held_out_tokens": sum(len(rows[i]) for i in checked),
        "sha256": digest(calibration),
    }
    return Records(calibration, _dataset([rows[i] for i in checked], length, filler) if checked else None, report)


def batches(records: Dataset) -> list[dict[str, torch.Tensor]]:
    """One batch of one record each, as tensors."""
    return [{k: torch.tensor(row[k])[None] for k in ("input_ids", "attention_mask")} for row in records]


def digest(records: Dataset) -> str:
    """SHA-256 of the records: what decides whether an unfinished run goes on with the same text."""
    h = hashlib.sha256()
    for row in records:
        h.update(repr((row["input_ids"], row["attention_mask"])).encode())
    return h.hexdigest()


def _packed(stream: Iterator[list[int]], samples: int, length: int, tokenizer: Any) -> tuple[list[list[int]], int]:
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for document in stream:
        ids += document + separator
        if len(ids) > _CHOICE * samples * length:
            break
    return [ids[i * length : (i + 1) * length] for i in range(len(ids) // length)], len(ids)


def _padded(stream: Iterator[list[int]], samples: int, length: int, tokenizer: Any) -> tuple[list[list[int]], int]:
    rows, read = [], 0
    for document in stream:
        read += len(document)
        if len(document) >= _SHORTEST:
            rows.append(document[:length])
        if read > _CHOICE * samples * length or len(rows) >= _CHOICE * samples:
            break
    return rows, read


def _dataset(rows: list[list[int]], length: int, filler: int) -> Dataset:
    missing = [length - len(row) for row in rows]
    return Dataset.from_dict(
        {
            "input_ids": [row + [filler] * m for row, m in zip(rows, missing, strict=True)],
            "attention_mask": [[1] * (length - m) + [0] * m for m in missing],
        }
    )


def _tokens(document: Document, tokenizer: Any) -> list[int]:
    text = document if isinstance(document, str) else tokenizer.apply_chat_template(document, tokenize=False)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

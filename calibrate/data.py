"""Calibration text from a local file: plain text, JSON (lines), parquet or CSV; chat messages through the model's template."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COLUMNS = ("messages", "conversations", "text", "content", "prompt")


def bundled_text() -> Path:
    """The calibration text that comes with the package: our own writing, about 6,000 words of many kinds."""
    return Path(str(importlib.resources.files("vllm_tilequant.configs").joinpath("calibration") / "bundled.txt"))


def load_calibration(source: str | Path, tokenizer: Any, *, samples: int, length: int, seed: int = 0) -> Dataset:
    """Records of `length` tokens from a local file, ready for `oneshot` (columns input_ids, attention_mask).

    The documents are tokenized, joined with the end-of-text token between them and cut into windows without padding. From
    more windows than `samples`, a seeded choice is taken. Raises `ValueError` when the file gives no whole window, is of an
    unknown kind or has no text column.
    """
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"calibration data {path} is not a file")
    kind = _KINDS.get(path.suffix)
    if kind is None:
        raise ValueError(f"calibration data {path}: unknown kind {path.suffix!r}, wanted one of {sorted(_KINDS)}")
    if samples < 1 or length < 8:
        raise ValueError(f"samples {samples} and length {length}: at least 1 record of 8 tokens is needed")
    options = {"sample_by": "document"} if kind == "text" else {}
    table = load_dataset(kind, data_files=str(path), split="train", **options)
    column = next((c for c in _COLUMNS if c in table.column_names), None)
    if column is None:
        raise ValueError(f"calibration data {path} has columns {table.column_names}, wanted one of {_COLUMNS}")
    ids: list[int] = []
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for record in table.shuffle(seed=seed)[column]:
        ids += _tokens(record, tokenizer) + separator
        if len(ids) > 64 * samples * length:  # enough to choose from; do not tokenize a whole corpus
            break
    windows = len(ids) // length
    if windows == 0:
        raise ValueError(f"calibration data {path} has {len(ids)} tokens, fewer than one record of {length}")
    chosen = list(range(windows))
    if windows > samples:
        step = windows / samples  # evenly over the text, so that no part of it is left out
        chosen = [int(i * step) for i in range(samples)]
    rows = [ids[i * length : (i + 1) * length] for i in chosen]
    return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * length for _ in rows]})


def _tokens(record: Any, tokenizer: Any) -> list[int]:
    if isinstance(record, str):
        return tokenizer(record, add_special_tokens=False, verbose=False)["input_ids"]
    text = tokenizer.apply_chat_template(record, tokenize=False)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

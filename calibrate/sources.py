"""Where calibration text comes from: local files, a few data sets of the Hugging Face hub by name, any other by its id.

Every source becomes a stream of documents in a seeded order; a document is a text or a list of chat messages.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset

Document = str | list[dict[str, str]]

_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_CHAT = ("messages", "conversations")
#: Columns that belong together, with the text that they make. Looked for before a single column of text.
_PAIRS = {
    ("document", "summary"): "{}\n\nSummary: {}",
    ("article", "highlights"): "{}\n\nSummary: {}",
    ("question", "answer"): "Question: {}\nAnswer: {}",
    ("prompt", "completion"): "{}{}",
    ("prompt", "response"): "{}\n\n{}",
    ("instruction", "output"): "{}\n\n{}",
}
_TEXT = ("text", "content", "prompt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Documents of a stream that are held to shuffle them: a hub set may be far larger than memory.
_SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True)
class HubSet:
    """A data set of the hub: repository, configuration, split; `lines`: its rows are lines of articles, in order."""

    repository: str
    configuration: str | None = None
    split: str = "train"
    revision: str | None = None
    lines: bool = False


#: What may be named in short. multi_news is a loading script, which `datasets` no longer runs: the hub's own conversion of it.
HUB_SETS = {
    "wikitext": HubSet("Salesforce/wikitext", "wikitext-2-raw-v1", lines=True),
    "c4": HubSet("allenai/c4", "en"),
    "gsm8k": HubSet("openai/gsm8k", "main"),
    "cnn_dailymail": HubSet("abisee/cnn_dailymail", "3.0.0"),
    "multi_news": HubSet("alexfabbri/multi_news", revision="refs/convert/parquet"),
    "ultrachat_200k": HubSet("HuggingFaceH4/ultrachat_200k", split="train_sft"),
}


def documents(source: str | Path, seed: int) -> Iterator[Document]:
    """The documents of a source in a seeded order, empty ones left out.

    source: a local file, a name of `HUB_SETS`, or a hub id `owner/name`; the latter two with `:split` if another is wanted.
    Raises `ValueError` for what is none of these or has no known column, `OSError` when the hub cannot be reached.
    """
    path = Path(source)
    if path.is_file():
        kind = _KINDS.get(path.suffix)
        if kind is None:
            raise ValueError(f"calibration data {path}: unknown kind {path.suffix!r}, wanted one of {sorted(_KINDS)}")
        if not path.stat().st_size:
            raise ValueError(f"calibration data {path} is empty")
        options = {"sample_by": "document"} if kind == "text" else {}
        table = load_dataset(kind, data_files=str(path), split="train", **options)
        rows: Iterable[dict] = table.shuffle(seed=seed)
    else:
        rows = _hub_rows(str(source), seed)
    for row in rows:
        document = _document(row, str(source))
        if document:
            yield document


def _hub_rows(source: str, seed: int) -> Iterator[dict]:
    name, _, split = source.partition(":")
    known = HUB_SETS.get(name)
    if known is None:
        if not _HUB_ID.fullmatch(name) or Path(name).suffix in _KINDS:
            raise ValueError(
                f"calibration data {source} is not a file, not one of {sorted(HUB_SETS)} and not a hub id (owner/name)"
            )
        known = HubSet(name)
    try:
        rows = load_dataset(
            known.repository, known.configuration, split=split or known.split, revision=known.revision, streaming=True
        )
        if known.lines:
            articles = list(_articles(rows))
            random.Random(seed).shuffle(articles)
            yield from articles
        else:
            yield from rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
    except (OSError, RuntimeError) as e:  # both are what the loader raises, at the start or in the middle of a stream
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise OSError(
            f"calibration data {source}: {known.repository} cannot be read from the Hugging Face hub ({reason}); "
            "without network, give a local .txt, .jsonl, .json, .parquet or .csv file"
        ) from e


def _articles(rows: Iterable[dict]) -> Iterator[dict]:
    """Lines joined to articles: a line ` = Title = ` begins one."""
    lines: list[str] = []
    for row in rows:
        if re.match(r" = [^=].* = \n?$", row["text"]) and lines:
            yield {"text": "".join(lines)}
            lines = []
        lines.append(row["text"])
    yield {"text": "".join(lines)}


def _document(row: dict[str, Any], source: str) -> Document | None:
    """A row's document, or None when it holds none."""
    chat = next((c for c in _CHAT if c in row), None)
    if chat is not None:
        return [_message(m) for m in row[chat] or []] or None
    pair = next((p for p in _PAIRS if all(c in row for c in p)), None)
    if pair is not None:
        parts = [str(row[c] or "").strip() for c in pair]
        return _PAIRS[pair].format(*parts) if all(parts) else None
    column = next((c for c in _TEXT if c in row), None)
    if column is None:
        wanted = [*_CHAT, *("+".join(p) for p in _PAIRS), *_TEXT]
        raise ValueError(f"calibration data {source} has columns {sorted(row)}, wanted one of {wanted}")
    text = row[column]
    return text if isinstance(text, str) and text.strip() else None


def _message(message: dict[str, str]) -> dict[str, str]:
    """A chat message with the keys that templates know; ShareGPT's `from` and `value` become `role` and `content`."""
    if "from" not in message:
        return message
    roles = {"human": "user", "gpt": "assistant"}
    return {"role": roles.get(message["from"], message["from"]), "content": message["value"]}

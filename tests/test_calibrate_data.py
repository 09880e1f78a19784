"""Calibration text: every kind of source, packing and padding, the same bytes for the same seed, refusals."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from toy import write_tokenizer
from vllm_tilequant.calibrate import sources
from vllm_tilequant.calibrate.capture import watch_gradients, watch_inputs
from vllm_tilequant.calibrate.data import batches, digest, load_calibration, load_records

pytestmark = pytest.mark.calibrate

TEMPLATE = "{% for m in messages %}{{ 'w250' if m.role == 'user' else 'w251' }} {{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 256)
    made = AutoTokenizer.from_pretrained(folder)
    made.chat_template = TEMPLATE
    return made


def words(start, n):
    return " ".join(f"w{3 + (start + i) % 240}" for i in range(n))


def numbers(start, n):
    return [3 + (start + i) % 240 for i in range(n)]


def rows(records):
    return [row["input_ids"] for row in records]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "parquet", "csv"])
def test_every_kind_of_local_file_gives_the_same_tokens(kind, tokenizer, tmp_path):
    path, text = tmp_path / f"data.{kind}", words(0, 40)
    if kind == "txt":
        path.write_text(text)
    elif kind == "jsonl":
        write_jsonl(path, [{"text": text}])
    elif kind == "json":
        path.write_text(json.dumps([{"text": text}]))
    elif kind == "parquet":
        pq.write_table(pa.table({"text": [text]}), path)
    else:
        path.write_text(f"id,text\n1,{text}\n")
    assert rows(load_calibration(path, tokenizer, samples=2, length=16)) == [numbers(0, 16), numbers(16, 16)]


@pytest.mark.parametrize(
    "row,want",
    [
        ({"messages": [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]}, [250, 5, 6, 251, 7]),
        ({"conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "w7"}]}, [250, 5, 251, 7]),
        ({"document": "w5 w6", "summary": "w7"}, [5, 6, 0, 7]),  # the word between them is unknown to this tokenizer
        ({"question": "w5", "answer": "w7 w8"}, [0, 5, 0, 7, 8]),
        ({"prompt": "w5", "response": "w7 w8", "text": "w9"}, [5, 7, 8]),
        ({"prompt": "w5"}, [5]),
    ],
)
def test_chat_pairs_and_text_become_documents(row, want, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [row] * 8)
    tokens = (want + [2]) * 8  # end of text after each
    got = rows(load_calibration(path, tokenizer, samples=1, length=len(tokens)))
    assert got == [tokens]


def test_padding_makes_one_record_of_each_document_and_counts_tokens(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": words(0, n)} for n in (10, 40, 3)])
    made = load_records(path, tokenizer, samples=5, length=16, pad=True)
    assert sorted(rows(made.calibration)) == sorted([numbers(0, 10) + [2] * 6, numbers(0, 16)])
    assert sorted(sum(row["attention_mask"]) for row in made.calibration) == [10, 16]
    report = made.report
    assert (report["records"], report["tokens_used"], report["padding"], report["tokens_read"]) == (2, 26, 6, 53)


def test_padding_enters_no_statistic(tokenizer, tmp_path):
    """Other ids in the padding change nothing, and no padded row is handed on."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": words(0, 9)}, {"text": words(50, 12)}])
    records = batches(load_calibration(path, tokenizer, samples=2, length=16, pad=True))
    other = [r | {"input_ids": r["input_ids"].where(r["attention_mask"].bool(), torch.tensor(77))} for r in records]
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(records, other, strict=True))
    torch.manual_seed(0)
    config = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, vocab_size=256)
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}

    def statistics(data):
        seen = []
        watch_inputs(model, linears, data, lambda name, x: seen.append(x))
        watch_gradients(model, linears, data, lambda name, x, g: seen.extend((x, g)))
        return seen

    first, second = statistics(records), statistics(other)
    assert {len(x) for x in first} == {9, 12}
    assert len(first) == len(second) == 2 * 3 * len(linears)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_seed_decides_and_the_same_seed_gives_the_same_bytes_in_another_process(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": words(7 * i, 30)} for i in range(40)])
    here = [digest(load_calibration(path, tokenizer, samples=4, length=16, seed=s)) for s in (0, 0, 1)]
    assert here[0] == here[1] != here[2]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = (
        "from transformers import AutoTokenizer; from vllm_tilequant.calibrate.data import digest, load_calibration\n"
        f"t = AutoTokenizer.from_pretrained({str(tmp_path / 'tokenizer')!r})\n"
        f"print(digest(load_calibration({str(path)!r}, t, samples=4, length=16, seed=0)))"
    )
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.strip() == here[0], done.stderr


def test_held_out_records_are_other_text_where_there_is_more(tokenizer, tmp_path):
    plenty, short = tmp_path / "plenty.txt", tmp_path / "short.txt"
    plenty.write_text(" ".join(words(i * i, 10) for i in range(70)))
    short.write_text(words(0, 16 * 10))
    made = load_records(plenty, tokenizer, samples=16, length=16)
    assert len(made.calibration) == 16 and len(made.held_out) == 2
    assert rows(made.calibration) == rows(load_calibration(plenty, tokenizer, samples=16, length=16))
    assert not {tuple(r) for r in rows(made.held_out)} & {tuple(r) for r in rows(made.calibration)}
    made = load_records(short, tokenizer, samples=16, length=16)
    assert (len(made.calibration), len(made.held_out)) == (9, 1)
    assert load_records(short, tokenizer, samples=7, length=16).held_out is None


def hub_folder(root, repository, configurations):
    """A data set as the hub lays it out; `datasets` reads one of that name below the working directory, without network."""
    folder = root / repository
    folder.mkdir(parents=True)
    lines = ["---", "configs:"]
    for (name, split), table in configurations.items():
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
        lines += [f"- config_name: {name}", "  data_files:", f"  - split: {split}", f"    path: {name}.parquet"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def test_sets_of_the_hub_by_name_and_by_id(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # ten seconds after the end of each stream
    hub_folder(tmp_path, "openai/gsm8k", {("main", "train"): [{"question": "w5", "answer": "w6"}] * 4})
    assert rows(load_calibration("gsm8k", tokenizer, samples=1, length=15)) == [[0, 5, 0, 6, 2] * 3]
    article = [{"text": t} for t in ("", " = w9 = \n", " w5 w6 w7 \n", " = = w8 = = \n", " w9 \n", " = w7 = \n", " w4 w4 \n")]
    hub_folder(tmp_path, "Salesforce/wikitext", {("wikitext-2-raw-v1", "train"): article})
    (got,) = rows(load_calibration("wikitext", tokenizer, samples=1, length=19))
    first, second = [0, 9, 0, 5, 6, 7, 0, 0, 8, 0, 0, 9, 2], [0, 7, 0, 4, 4, 2]
    assert got in (first + second, second + first)  # whole articles, in either order
    hub_folder(tmp_path, "someone/texts", {("default", "test"): [{"text": words(0, 8)}]})
    assert rows(load_calibration("someone/texts:test", tokenizer, samples=1, length=8)) == [numbers(0, 8)]


def test_every_named_set_is_complete():
    assert set(sources.HUB_SETS) == {"wikitext", "c4", "gsm8k", "cnn_dailymail", "multi_news", "ultrachat_200k"}
    assert all(s.repository.count("/") == 1 and s.split for s in sources.HUB_SETS.values())


def test_an_unreachable_hub_is_one_readable_line(tmp_path):
    code = (
        "from vllm_tilequant.calibrate.sources import documents\n"
        "try:\n    next(documents('c4', seed=0))\nexcept OSError as e:\n    print(e)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "allenai/c4 cannot be read" in line and "give a local .txt" in line


@pytest.mark.parametrize(
    "name,text,pad,message",
    [
        ("none.txt", None, False, "is not a file, not one of .*gsm8k.* not a hub id"),
        ("empty.txt", "", False, "is empty"),
        ("blank.txt", " \n", False, "has 0 tokens"),
        ("short.txt", "w3 w4", False, "has 3 tokens, fewer than one record of 16"),
        ("short.txt", "w3 w4", True, "has 2 tokens, fewer than one document of 8"),
        ("other.csv", "a,b\n1,2\n", False, r"has columns \['a', 'b'\], wanted one of .*document\+summary"),
        ("x.bin", "x", False, "unknown kind '.bin'"),
    ],
)
def test_bad_data_is_refused(name, text, pad, message, tokenizer, tmp_path):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_calibration(path, tokenizer, samples=1, length=16, pad=pad)

"""The model card of a checkpoint, README.md in its folder: what was done to which model, and how to serve the result."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.files import CONFIG, INDEX, read_json_object
from vllm_tilequant.checkpoint.inspect import inspect

CARD = "README.md"
CALIBRATION = "calibration_report.json"
RECIPE = "recipe.yaml"
#: What the project's own tests have served a checkpoint with; docs and CI name the same.
KNOWN_GOOD = {"vllm": "0.32.0", "vllm loading only": "0.24.0, 0.33.0"}
#: What a model folder holds beside weights and config that whoever uses the model may need: tokenizer, chat template,
#: generation config, processors, licence. Python files are never taken along.
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")
_NOT_COMPANIONS = {CONFIG, INDEX, CALIBRATION, "trainer_state.json", "adapter_config.json"}
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{7,64})/?$")


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy what a model needs beside its weights from its original folder, byte for byte; returns the names.

    Files that a library wrote anew are replaced: the originals are what servers of every version have been tried with.
    """
    names = {path.name for pattern in _COMPANIONS for path in source.glob(pattern)}
    copied = sorted(n for n in names - _NOT_COMPANIONS if (source / n).is_file() and not n.endswith(".index.json"))
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    return copied


def origin(model: str, folder: Path) -> dict[str, str | None]:
    """Name and revision of a source model. model: as the user gave it; folder: where it lies.

    A folder of Hugging Face's cache tells both; of any other only its own name is told, not where it lies on the disk.
    """
    if match := _SNAPSHOT.search(folder.absolute().as_posix()):
        return {"name": f"{match[1]}/{match[2]}", "revision": match[3]}
    return {"name": folder.resolve().name if folder.exists() else model, "revision": None}


def write_card(folder: str | Path) -> Path:
    """Write the card of a sound checkpoint from what its own files say; returns its path."""
    folder = Path(folder)
    report = read_json_object(folder, CALIBRATION) if (folder / CALIBRATION).exists() else {}
    path = folder / CARD
    path.write_text(card(inspect(folder), report, (folder / RECIPE).exists()))
    return path


def card(data: dict[str, Any], report: dict[str, Any], recipe: bool) -> str:
    """The text. data: of `inspect`; report: calibration_report.json, or an empty object."""
    source, text = _object(report.get("source")), _object(report.get("data"))
    base, revision = source.get("name"), source.get("revision")
    head = ["---", "library_name: vllm", "tags: [tilequant, quantized]"]
    if revision or (isinstance(base, str) and base.count("/") == 1):
        head += [f"base_model: {base}", "base_model_relation: quantized"]
    head.append("---")
    codes = ", ".join(f"{n} of {bits} bits" for bits, n in data["tile_counts"].items())
    parts = data["parts"]
    made = {k: v for k, v in data["producer"].items() if isinstance(v, str)}
    rows = {
        "base model": base or "unknown",
        "revision": revision
        or "not known: it was a local folder" + (f", SHA-256 {h}" if (h := report.get("model_sha256")) else ""),
        "recipe": _recipe(report, recipe),
        "calibration data": _data(text),
        "bits per weight of the linears": f"{data['stored_bits']:.3f} with scales, maps, transforms and thresholds "
        f"({data['stored_code_bits']:.3f} of codes)",
        "bits per parameter of the whole model": f"{data['model_bits_per_parameter']:.3f}, with embeddings, head and norms "
        f"({data['tensor_bytes'] / 2**20:.1f} MiB; linears {parts['linears']['bytes'] / 2**20:.1f} MiB)",
        "tiles of 64 x 64 weights": codes,
        "rotations": ", ".join(f"{n} {kind}" for kind, n in data["transforms"].items())
        + f" for outputs; inputs rotated in {data['rotated_inputs']} of {len(data['modules'])} linears",
        "input diagonal": f"folded in {data['folded_inputs']} linears: LoRA adapters of the base model do not fit"
        if data["folded_inputs"]
        else "none",
        "profiles (loaded bits of a decode step)": _profiles(data, report),
        "left dense": ", ".join(f"{name} ({why})" for name, why in list(data["skipped"].items())[:6])
        + (f" and {len(data['skipped']) - 6} more" if len(data["skipped"]) > 6 else ""),
        "format": f"tilequant {data['format_version']}",
        "written by": ", ".join(f"{k} {v}" for k, v in made.items()) or "unknown",
        "known to serve it": f"vllm {KNOWN_GOOD['vllm']} (tested); loading also tested with the Python files of "
        f"{KNOWN_GOOD['vllm loading only']}",
    }
    other = json.dumps({s.QUANT_METHOD: {"profile": data["profiles"][0]}})
    name = base.rpartition("/")[2] if isinstance(base, str) else "A model"
    lines = [
        *head,
        f"# {_cell(name)}, quantized with tilequant",
        "",
        "Mixed 4/8-bit weights in tiles of 64 x 64 with graded bit-plane decoding, for vLLM with the plugin vllm-tilequant.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {key} | {_cell(value)} |" for key, value in rows.items()),
        "",
        "## Serve it",
        "",
        "```bash",
        "# in an environment with vllm and the plugin vllm-tilequant",
        "vllm serve FOLDER --quantization tilequant",
        "# another profile: fewer loaded bits are faster and less exact; off: no grading",
        f"vllm serve FOLDER --quantization tilequant --additional-config '{other}'",
        "```",
        "",
        "In transformers, after `import vllm_tilequant.hf`, `AutoModelForCausalLM.from_pretrained(FOLDER)` gives the dense "
        "model at stored precision. `tilequant verify FOLDER` checks every value, and the hashes of SHA256SUMS; "
        f"`{CALIBRATION}` tells how the calibration went" + (f", `{RECIPE}` what was asked of it." if recipe else "."),
        "",
        "Licence: that of the base model.",
        "",
    ]
    return "\n".join(lines)


def _recipe(report: dict[str, Any], recipe: bool) -> str:
    settings = _object(report.get("settings"))
    chosen = {
        k: settings[k] for k in ("w4_fraction", "stored_bits", "output_transform", "scores", "scales", "codes") if k in settings
    }
    said = ", ".join(f"{k} {v}" for k, v in chosen.items() if v is not None)
    return "; ".join(filter(None, [said, f"all of it in {RECIPE}" if recipe else ""])) or "unknown"


def _data(text: dict[str, Any]) -> str:
    if not text:
        return "unknown"
    digest = f", SHA-256 {text['sha256']}" if text.get("sha256") else ""
    return f"{text.get('source')}: {text.get('tokens_used')} tokens in {text.get('records')} records{digest}"


def _profiles(data: dict[str, Any], report: dict[str, Any]) -> str:
    measured = _object(report.get("profiles"))
    shown = []
    for name in data["profiles"]:
        found = _object(_object(measured.get(name)).get("measured")).get("average")
        loaded = f": {found:.2f} measured on held-out text" if isinstance(found, float) else ""
        shown.append(f"{name}{' (default)' if name == data['default_profile'] else ''}{loaded}")
    reserved = [f"{n}{' (default)' if n == data['default_profile'] else ''}" for n in (s.PROFILE_FULL, s.PROFILE_OFF)]
    return "; ".join([*shown, *reserved])


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _cell(value: object) -> str:
    """Text for a cell of a Markdown table; what a file says may hold anything."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "\\|").replace("<", "&lt;")

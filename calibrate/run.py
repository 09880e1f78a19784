"""An ordinary model folder in, a tilequant checkpoint out, in one process and atomically."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_tilequant.calibrate.modifier import TileQuantModifier

#: Room beyond the checkpoint itself: tokenizer files, recipe, report.
_SLACK_BYTES = 64 << 20
#: What of a hub repository is needed.
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*")


def quantize(
    model: str,
    output: Path,
    *,
    data: str | Path | None,
    samples: int,
    length: int,
    seed: int,
    recipe: Path | None = None,
    w4_fraction: float | None = None,
    pad: bool = False,
    strict: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    memory_check: bool = True,
) -> str | None:
    """Calibrate `model` on `data` and write the checkpoint to `output`.

    The folder appears under its name only when it is complete. Until then, `OUTPUT.work` holds a log and the state of finished
    steps and layers: `resume` goes on from there, with the same result as a run that was never ended. `dry_run` returns what
    would be done and needed, and writes nothing. Raises `ValueError` on a bad model, text or recipe, `OSError` when the output
    exists, or disk or memory is too small.
    """
    output = output.absolute()
    if output.exists():
        raise FileExistsError(f"{output} exists already: remove it or choose another folder")
    source = _model_folder(model)
    settings = _recipe(recipe, seed, w4_fraction)
    if strict:
        settings["strict"] = True
    _check_disk(output, source)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_tilequant.calibrate import estimate as e
    from vllm_tilequant.calibrate.data import batches, bundled_text, load_records
    from vllm_tilequant.calibrate.modifier import TileQuantModifier, check_entries, find_linears
    from vllm_tilequant.calibrate.pipeline import STATE_TYPES
    from vllm_tilequant.calibrate.progress import Progress
    from vllm_tilequant.calibrate.work import WorkFolder, model_fingerprint
    from vllm_tilequant.checkpoint.card import origin

    modifier = TileQuantModifier(**settings)
    skeleton = _skeleton(source)
    if modifier.strict or dry_run:  # else the modifier warns of them
        check_entries(skeleton, modifier.targets, modifier.ignore, modifier.strict)
    linears = find_linears(skeleton, modifier.targets, modifier.dense)
    tokenizer = AutoTokenizer.from_pretrained(source)
    records = load_records(data or bundled_text(), tokenizer, samples=samples, length=length, seed=seed, pad=pad)
    held_out = batches(records.held_out) if records.held_out else []
    need = e.estimate(
        skeleton, linears, modifier, records=len(records.calibration), length=length, held_out=len(held_out),
        rates=e.measure_rates(skeleton.dtype),
    )  # fmt: skip
    if dry_run:
        return e.describe(need, skeleton, linears, modifier, records.report)
    if memory_check:
        e.check_memory(need)
    versions = {p: version(p) for p in ("vllm-tilequant", "llmcompressor", "transformers", "torch")}
    fingerprint = {
        "model": model_fingerprint(source),
        "recipe": modifier.model_dump(mode="json"),
        "data": records.report["sha256"],
        "versions": versions,
    }
    work = WorkFolder.open(output.with_name(output.name + ".work"), STATE_TYPES, fingerprint, resume=resume)
    progress = Progress(work.log, need.seconds)
    modifier.attach(
        progress=progress,
        work=work,
        held_out=held_out,
        facts={
            "versions": versions,
            "source": origin(model, source),
            "model_sha256": fingerprint["model"],
            "data": records.report,
            "expected": {"seconds": need.seconds, "memory_bytes": need.memory},
        },
    )
    try:
        network = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        _write(network, tokenizer, records.calibration, modifier, source, output)
    except BaseException:
        if work.empty:
            work.remove()
        else:
            progress.say(f"not finished; what is done lies in {work.folder}, and --resume goes on from there")
        raise
    work.remove()
    return None


def _write(network: PreTrainedModel, tokenizer: Any, records: Any, modifier: TileQuantModifier, source: Path, output: Path):
    """Calibrate and save beside the output, then move it there in one step."""
    from llmcompressor import oneshot

    from vllm_tilequant.checkpoint.card import copy_companions
    from vllm_tilequant.checkpoint.manifest import write_manifest

    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        oneshot(
            model=network,
            tokenizer=tokenizer,
            dataset=records,
            recipe=modifier,
            num_calibration_samples=len(records),
            max_seq_length=len(records[0]["input_ids"]),
            shuffle_calibration_samples=False,  # llm-compressor's shuffling is not seeded
            output_dir=str(partial),
        )
        copy_companions(source, partial)
        write_manifest(partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _skeleton(source: Path) -> PreTrainedModel:
    """The model without its weights: what can be refused is refused before they are read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _recipe(recipe: Path | None, seed: int, w4_fraction: float | None) -> dict:
    """Fields of the modifier: from a recipe file, then what the command line says."""
    settings: dict = {}
    if recipe is not None:
        import yaml

        settings = yaml.safe_load(recipe.read_text()) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"recipe {recipe} is not a mapping of TileQuantModifier fields")
    settings.setdefault("seed", seed)
    if w4_fraction is not None:
        settings["w4_fraction"] = w4_fraction
    return settings


def _model_folder(model: str) -> Path:
    """The model's folder, of a hub id that in the hub's cache. Refuses what is no model, and what is quantized already."""
    from vllm_tilequant.checkpoint.reader import read_config

    folder = Path(model)
    if not folder.exists() and model.count("/") == 1 and not model.startswith((".", "/")):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, allow_patterns=list(_MODEL_FILES)))
        except (OSError, ValueError) as e:  # no network and not in the cache, no such repository, a malformed name
            raise OSError(f"{model} is no folder here and cannot be read from the Hugging Face hub ({type(e).__name__})") from e
    config = read_config(folder)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"{folder} is quantized already (quant_method {method!r}): quantize the original model")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no safetensors weights")
    return folder


def _check_disk(output: Path, source: Path) -> None:
    """Refuse before any work when the result cannot fit: it is smaller than the source, and both lie side by side."""
    parent = output.parent
    parent.mkdir(parents=True, exist_ok=True)
    needed = _SLACK_BYTES + sum(f.stat().st_size for f in source.glob("*.safetensors"))
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(f"not enough disk space at {parent}: {needed / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free")

"""An ordinary model folder in, a tilequant checkpoint out, in one process and atomically."""

from __future__ import annotations

import shutil
from pathlib import Path

#: Room beyond the checkpoint itself: tokenizer files, recipe, report.
_SLACK_BYTES = 64 << 20


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
) -> None:
    """Calibrate `model` on `data` and write the checkpoint to `output`.

    The folder appears under its name only when it is complete. Raises `ValueError` on a bad model, text or recipe, `OSError`
    when the output exists or the disk is too small; nothing half-written stays behind.
    """
    output = output.absolute()
    if output.exists():
        raise FileExistsError(f"{output} exists already: remove it or choose another folder")
    source = _check_model(model)
    settings = _recipe(recipe, seed, w4_fraction)
    _check_disk(output, source)

    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_tilequant.calibrate.data import bundled_text, load_calibration
    from vllm_tilequant.calibrate.modifier import TileQuantModifier

    modifier = TileQuantModifier(**settings)
    tokenizer = AutoTokenizer.from_pretrained(model)
    records = load_calibration(data or bundled_text(), tokenizer, samples=samples, length=length, seed=seed, pad=pad)
    network = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        oneshot(
            model=network,
            tokenizer=tokenizer,
            dataset=records,
            recipe=modifier,
            num_calibration_samples=len(records),
            max_seq_length=length,
            shuffle_calibration_samples=False,  # llm-compressor's shuffling is not seeded
            output_dir=str(partial),
        )
        if source is not None and (source / "generation_config.json").is_file():
            shutil.copy(source / "generation_config.json", partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
        settings.pop("stored_bits", None)  # the other way to say a budget
    return settings


def _check_model(model: str) -> Path | None:
    """The model's folder, or None for a hub id. Refuses what is plainly neither, and what is quantized already."""
    from vllm_tilequant.checkpoint.reader import read_config

    folder = Path(model)
    if not folder.exists() and model.count("/") == 1 and not model.startswith((".", "/")):
        return None
    config = read_config(folder)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"{folder} is quantized already (quant_method {method!r}): quantize the original model")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no safetensors weights")
    return folder


def _check_disk(output: Path, source: Path | None) -> None:
    """Refuse before any work when the result cannot fit: it is smaller than the source, and both lie side by side."""
    parent = output.parent
    parent.mkdir(parents=True, exist_ok=True)
    needed = _SLACK_BYTES + (sum(f.stat().st_size for f in source.glob("*.safetensors")) if source else 0)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(f"not enough disk space at {parent}: {needed / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free")

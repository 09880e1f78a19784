"""Save a calibrated model as an ordinary Hugging Face folder in the tilequant format."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_tilequant import schema as s
from vllm_tilequant.calibrate.placing import write_parameter
from vllm_tilequant.calibrate.result import Result
from vllm_tilequant.checkpoint.card import CALIBRATION, origin, write_card
from vllm_tilequant.checkpoint.files import Tensors, read_headers
from vllm_tilequant.kernels import layout
from vllm_tilequant.kernels.portable import dequantize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPORT = CALIBRATION
#: Of one weight file, unless the caller of `save_pretrained` wants another size.
SHARD_BYTES = 4 << 30


def build_schema(result: Result, linears: dict[str, nn.Linear], profiles: list[str], default: str, ignore: list[str]):
    """The `quantization_config` of a finished calibration, in model order."""
    modules = {}
    for name, linear in linears.items():
        group = result.group_of[name]
        bits, counts = result.weights[name].tile_bits.unique(return_counts=True)
        modules[name] = s.Module(
            out_features=linear.out_features,
            in_features=linear.in_features,
            tile_counts={int(b): int(c) for b, c in zip(bits, counts, strict=True)},
            bias=linear.bias is not None,
            input_group=group,
            input_transform=len(result.transforms) - 1 if group in result.rotated else None,
            smoothing=group in result.smoothing,
        )
    return s.QuantizationSchema(
        quant_method=s.QUANT_METHOD,
        format_version=s.FORMAT_VERSION,
        required_features=[s.INPUT_TRANSFORM] * bool(result.rotated) + [s.FOLDED_INPUT_DIAGONAL] * bool(result.folded),
        tile=s.TILE,
        max_bits=result.max_bits,
        transforms=result.transforms,
        profiles=s.Profiles(names=profiles, default=default),
        ignore=ignore,
        folded_input_diagonal=[g.name for g in result.groups if g.name in result.folded],
        modules=modules,
        producer={p: _version(p) for p in ("vllm-tilequant", "llmcompressor", "transformers", "torch")},
    )


def wrap_save_pretrained(model: PreTrainedModel, packed: Callable[[], tuple[Result, s.QuantizationSchema]]) -> None:
    """Make `model.save_pretrained` write the packed form; `save_compressed=False` still writes the dense model.

    llm-compressor has wrapped the method already and rewrites config.json from the source model's; so the quantization_config
    is put in last. Packing happens here and not when calibration ends, so that the model stays usable in memory.
    """
    inner = model.save_pretrained

    @wraps(inner)
    def save_pretrained(save_directory: str | Path, *args: Any, save_compressed: bool = True, **kwargs: Any) -> None:
        if not save_compressed:
            inner(save_directory, *args, save_compressed=False, **kwargs)
            return
        kwargs.setdefault("max_shard_size", SHARD_BYTES)
        restore_norms(model)
        result, schema = packed()
        modules = dict(model.named_modules())
        dense = {name: modules[name].weight for name in schema.modules}
        try:
            for name in schema.modules:
                # Clones: two tensors of one checkpoint may not share storage, and members of a group share thresholds.
                _replace(modules[name], {suffix: t.clone() for suffix, t in result.tensors(name).items()})
            inner(save_directory, *args, save_compressed=True, **kwargs)
        finally:
            for name, weight in dense.items():
                _replace(modules[name], {"weight": weight})
        folder = Path(save_directory)
        _write_config(folder, schema, untied=any(modules[n] is model.get_output_embeddings() for n in schema.modules))
        base = model.config.name_or_path or "unknown"
        report = {"source": origin(base, Path(base))} | result.report
        (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
        write_card(folder)
        for file in folder.iterdir():
            if file.is_file():
                file.chmod(0o644)  # safetensors writes 0600: a server under another user could not read it

    save_pretrained._overridden = True  # type: ignore[attr-defined]  # what llm-compressor looks for
    model.save_pretrained = save_pretrained  # type: ignore[assignment, method-assign]


@torch.no_grad()
def restore_norms(model: PreTrainedModel) -> None:
    """Put the source's own weights back into norms that multiply by 1 + weight (Gemma's), where these were only rounded.

    llm-compressor replaces such norms while it works by ones with the sum as their weight, and subtracts 1 at the end: both in
    the model's dtype. A norm that a modifier has changed stays as it is; so does all of a model that came from no folder.
    """
    folder = Path(model.config.name_or_path or "unknown")
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return
    source = Tensors(folder, read_headers(folder, strangers=True))
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if not type(module).__name__.endswith("Norm") or list(module._parameters) != ["weight"] or key not in source.headers:
            continue
        ours = module.weight.detach()
        theirs = source.tensor(key).to(ours.device, ours.dtype)  # type: ignore[call-overload]
        rounded = ((1 + theirs.float()).to(ours.dtype).float() - 1).to(ours.dtype)
        if torch.equal(rounded, ours) and not torch.equal(theirs, ours):
            write_parameter(module, "weight", theirs)


def untie_head(model: PreTrainedModel, linears: dict[str, nn.Linear]) -> None:
    """Where the output head is quantized: give it a weight of its own, so that the embeddings stay as they are."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if any(m is head for m in linears.values()) and head.weight is embeddings.weight:
        own: Tensor = head.weight.detach().clone()  # type: ignore[operator]  # of a module that transformers types loosely
        head.weight = nn.Parameter(own, requires_grad=False)
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}  # type: ignore[assignment]  # what transformers would leave out of a saved folder


@torch.no_grad()
def write_dense_back(linears: dict[str, nn.Linear], result: Result) -> None:
    """Put the dequantized weights into the model, so that it can be tried in memory."""
    transforms = layout.transform_stack(result.transforms)
    for name, linear in linears.items():
        weight = linear.weight
        dense = dequantize(layout.to_device(result.weights[name], weight.device), transforms, weight.dtype)
        write_parameter(linear, "weight", dense)


def _replace(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    from compressed_tensors.utils import replace_direct_state_dict  # not needed, and not there, where no host saves

    replace_direct_state_dict(module, tensors | {"bias": module.bias})


def _write_config(folder: Path, schema: s.QuantizationSchema, untied: bool) -> None:
    """untied: the output head is quantized, the embeddings are not."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if untied:
        config["tie_word_embeddings"] = False
        if "tie_word_embeddings" in config.get("text_config", {}):
            config["text_config"]["tie_word_embeddings"] = False
    config["quantization_config"] = schema.dump()
    path.write_text(json.dumps(config, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

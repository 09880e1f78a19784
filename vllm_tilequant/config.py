"""`--quantization tilequant`: what vLLM asks of a quantization method as a whole, and the user's settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm.config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_tilequant.checkpoint.parallel import cut_linears
from vllm_tilequant.kernels import layout
from vllm_tilequant.kernels.dispatch import GRADED_ROWS
from vllm_tilequant.schema import (
    ACTIVATIONS,
    PREFILL_ACTIVATIONS,
    PROFILE_OFF,
    QUANT_METHOD,
    TILE,
    QuantizationSchema,
    ignored_by,
)

if TYPE_CHECKING:
    from vllm_tilequant.parameters import Member
    from vllm_tilequant.state import SavedState

logger = init_logger(f"vllm.{__name__}")  # vLLM configures only loggers below its own

_KEYS = "'profile', 'activation', 'prefill_activation' and 'int8_copy'"
_REMEDY = (
    "Quantize all members of a fused layer alike: either all of them in quantization_config.modules, or all of them in "
    "quantization_config.ignore."
)


_DRAFT = "draft_model."
#: Settings of vLLM's parallel config that share out the experts of a mixture, by the option that sets each.
_EXPERT_PARALLEL = {
    "enable_expert_parallel": "--enable-expert-parallel",
    "enable_eplb": "--enable-eplb",
    "enable_elastic_ep": "--enable-elastic-ep",
}


def check_parallel(schema: QuantizationSchema, model_config: Any, parallel: Any) -> None:
    """Refuse what this plugin does not serve, before a weight is read.

    model_config, parallel: vLLM's. Raises `NotImplementedError` naming every data- or expert-parallel setting that does not
    apply yet, and `ValueError` naming every linear that the tensor parallel size would cut inside a tile, with the legal sizes.
    """
    refused = [option for field, option in _EXPERT_PARALLEL.items() if getattr(parallel, field, False)]
    replicas = getattr(parallel, "data_parallel_size", 1)
    if replicas > 1 and getattr(parallel, "is_moe_model", False):  # dense models are served as independent engines
        refused.append(f"--data-parallel-size {replicas} on a mixture of experts, where ranks share the experts")
    if refused:
        raise NotImplementedError(
            f"tilequant does not serve with {', '.join(refused)}: experts are not sharded by this plugin. Leave the settings "
            "out; tensor and pipeline parallelism work, and so do independent engines behind a load balancer."
        )
    legality = cut_linears(schema.modules, model_config.hf_text_config.to_dict(), parallel.tensor_parallel_size)
    if legality.faults:
        raise ValueError(
            f"tensor parallel size {legality.size} would cut tiles of {TILE} x {TILE} weights or heads:\n  "
            + "\n  ".join(legality.faults)
            + f"\nLegal tensor parallel sizes: {legality.legal}. `tilequant inspect FOLDER --tp N` says so without a server."
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work in this thread alone.

    vLLM forks its engine from the server's first process. Threads do not come along, and an engine whose parent has used
    OpenMP's waits for them for ever at its first operation on a large tensor.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_adapters(schema: QuantizationSchema, lora: Any) -> None:
    """Refuse adapters where they would be silently wrong. lora: vLLM's LoRA config, None where LoRA is not enabled.

    Raises `NotImplementedError` for a checkpoint whose input diagonal is folded.
    """
    if lora is not None and schema.folded_input_diagonal:
        n = len(schema.folded_input_diagonal)
        raise NotImplementedError(
            f"LoRA on this checkpoint: its folded_input_diagonal scales the inputs of {n} groups of linears, so that an "
            "adapter trained on the original model would silently compute something else. Serve without --enable-lora, merge "
            "the adapter into the original model and quantize that, or quantize with input_diagonal: off."
        )


@dataclass(frozen=True)
class Settings:
    """What `--additional-config '{"tilequant": {...}}'` sets.

    profile: a stored profile, `full` (every stored plane through the graded product) or `off` (no grading)
    activation: `group64` (INT8 per row and 64 inputs) or `none`
    prefill_activation: of prompts on a GPU: `token_smooth` (INT8 per row, the fast product) or `group64` (per 64 inputs too)
    int8_copy: on a GPU, keep the weights in INT8 too, 8 more bits a weight: prompts and batches above the graded ones expand
        nothing any more, and all of them have the arithmetic of prompts
    """

    profile: str
    activation: str
    prefill_activation: str = PREFILL_ACTIVATIONS[0]
    int8_copy: bool = False

    @property
    def graded_rows(self) -> int:
        """Rows up to which a call is graded."""
        return 0 if self.profile == PROFILE_OFF else GRADED_ROWS

    @classmethod
    def parse(cls, additional_config: Any, schema: QuantizationSchema) -> Settings:
        """Read vLLM's additional config (a dict, or an object of another plugin); raises `ValueError` with the legal values."""
        given = additional_config.get(QUANT_METHOD, {}) if isinstance(additional_config, dict) else {}
        where = f'--additional-config {{"{QUANT_METHOD}": ...}}'
        if not isinstance(given, dict):
            raise ValueError(f"{where} is {given!r}, wanted an object with the keys {_KEYS}")
        if unknown := sorted(set(given) - set(cls.__dataclass_fields__)):
            raise ValueError(f"{where} has unknown keys {unknown}; legal keys are {_KEYS}")
        chosen: dict[str, Any] = {"profile": schema.profiles.default, "activation": "group64"} | given
        settings = cls(**chosen)
        for key, legal in (
            ("profile", schema.profiles.choices),
            ("activation", list(ACTIVATIONS)),
            ("prefill_activation", list(PREFILL_ACTIVATIONS)),
            ("int8_copy", [False, True]),
        ):
            if getattr(settings, key) not in legal:
                raise ValueError(f"{where}: {key} is {getattr(settings, key)!r}, legal values are {legal}")
        if settings.int8_copy and settings.prefill_activation != PREFILL_ACTIVATIONS[0]:
            raise ValueError(
                f"{where}: int8_copy serves prompts with prefill_activation {PREFILL_ACTIVATIONS[0]!r} only, not "
                f"{settings.prefill_activation!r}: leave out one of the two"
            )
        return settings


class TileQuantConfig(QuantizationConfig):
    """A checkpoint's `quantization_config` under the names that vLLM gives its modules."""

    def __init__(self, schema: QuantizationSchema):
        super().__init__()
        self.schema = schema
        self.modules = dict(schema.modules)
        self.ignore = list(schema.ignore)
        self.checkpoint_names = {name: name for name in schema.modules}  # vLLM's name -> the checkpoint's
        self.model_config: Any = None  # vLLM's, and the model that it named when weights came from there
        self.loaded_from: str | None = None
        self.source: str | None = None  # what vLLM asked to be judged: a folder, or a hub id

    def __repr__(self) -> str:
        return f"TileQuantConfig({len(self.modules)} linears, profiles {self.schema.profiles.names})"

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]  # float32 for comparisons on the CPU

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        # The config lies in config.json. Naming a file that no checkpoint has makes vLLM stop at once, with a sentence, when
        # `--quantization tilequant` meets an unquantized model; an empty list would make it die late in loading.
        return ["tilequant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TileQuantConfig:
        return cls(QuantizationSchema.parse(config))

    def maybe_update_config(self, model_name: str, *args: Any, revision: str | None = None, **kwargs: Any) -> None:
        """Judge the folder in the server's first process, before anything else starts: every header and every value.

        Raises `CheckpointError` listing every fault. Codes of tiles are not read for it (any is legal), so that the time is
        that of reading embeddings and norms. A folder without any weight file is left to vLLM, whose load format may not need
        one. So is a hub id whose files are not all in the hub's cache yet: its linears are judged one by one while they load.
        Of a sharded state only what no rank is needed for; with which load format vLLM will read a folder is not known here.
        """
        from vllm_tilequant.checkpoint import sharded
        from vllm_tilequant.checkpoint.verify import verify

        self.source = model_name
        folder = Path(model_name)
        if not folder.is_dir():
            folder = _downloaded(model_name, revision) or folder
        if not folder.is_dir() or not any(folder.glob("*.safetensors*")):
            return
        with one_thread():
            if saved := sharded.default_files(folder):
                sharded.judge(folder, saved)
            elif sharded.holds_checkpoint(folder) or not any(folder.glob("*.safetensors")):
                verify(folder, hashes=False)  # hashing would read all of the codes

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename modules as vLLM's model class does. Patterns in `ignore` stay: they are matched with vLLM's names."""

        def rename(name: str) -> str:
            # Prefix rules end in a dot, which a module's own name lacks.
            for form in (name, name + "."):
                mapped = hf_to_vllm_mapper.apply_list([form])
                if mapped and mapped[0] != form:
                    return mapped[0].removesuffix(".")
            return name

        renamed = {name: rename(name) for name in self.modules}
        self.modules = {renamed[name]: module for name, module in self.modules.items()}
        self.checkpoint_names = {renamed[name]: original for name, original in self.checkpoint_names.items()}
        self.ignore = [entry if entry.startswith("re:") else rename(entry) for entry in self.ignore]

    @cached_property
    def settings(self) -> Settings:
        """The user's settings, read once from vLLM's current config; raises `ValueError` on what is not legal.

        The first layer of a model asks for them, so that what vLLM runs in parallel is judged here as well.
        """
        current = _current()
        settings = Settings.parse(getattr(current, "additional_config", None), self.schema)
        if (model_config := getattr(current, "model_config", None)) is not None:
            check_parallel(self.schema, model_config, current.parallel_config)
            check_adapters(self.schema, getattr(current, "lora_config", None))
            self.model_config, self.loaded_from = model_config, model_config.model
            _ = self.saved_state
        logger.info(
            "tilequant: profile %s (graded up to %d rows), activation %s, in prompts %s%s",
            settings.profile,
            settings.graded_rows,
            settings.activation,
            settings.prefill_activation,
            " from an INT8 copy of the weights (8 more bits a weight)" if settings.int8_copy else "",
        )
        return settings

    @cached_property
    def dummy_weights(self) -> bool:
        """Whether vLLM runs with `--load-format dummy`, where no tensor will arrive."""
        return _load_format(_current()) == "dummy"

    @cached_property
    def saved_state(self) -> SavedState | None:
        """This rank's part of a sharded state, where vLLM runs with `--load-format sharded_state`.

        Raises `NotImplementedError` or `ValueError` where the folder and how vLLM runs do not fit together.
        """
        from vllm_tilequant.state import open_state

        current = _current()
        return None if self.source is None else open_state(current, _load_format(current), Path(self.source))

    def check_reload(self) -> None:
        """Whether weights may be reloaded from where vLLM's model config now points; it changes that before it loads.

        vLLM does not read the other folder's config, so that what it says besides the weights must be the running one. Raises
        `ValueError` naming what is not.
        """
        source = getattr(self.model_config, "model", None)
        if source is None or source == self.loaded_from:
            return
        config = (Path(source) if Path(source).is_dir() else _downloaded(source, None) or Path(source)) / "config.json"
        if not config.is_file():
            raise ValueError(f"{source} cannot be loaded into a running engine: there is no {config}; name a complete folder")
        given = json.loads(config.read_text()).get("quantization_config") or {}
        ours, theirs = self.schema.dump(), QuantizationSchema.parse(given).dump()
        differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if differing:
            raise ValueError(
                f"{source} cannot be loaded into a running engine: its quantization_config differs in {', '.join(differing)} "
                f"from that of {self.loaded_from}. Reload a checkpoint with the same tile counts, transforms, profiles and "
                "ignored modules, or start a server with it"
            )
        self.loaded_from = source

    @cached_property
    def transforms(self) -> torch.Tensor:
        """[n, 64, 64] float64, what `output_transform` indexes."""
        return layout.transform_stack(self.schema.transforms)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Our method for quantized linears, vLLM's own for ignored ones, None (dense) for everything that is no linear.

        Raises `ValueError` for a linear that is neither quantized nor ignored or only partly so, and `NotImplementedError`
        for a checkpoint that quantizes what this plugin does not serve (embeddings, fused experts).
        """
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from vllm_tilequant.linear import TileQuantLinearMethod

        _ = self.settings  # a wrong setting must stop the first layer, before any weight is read
        prefix = self.own_name(prefix)
        if isinstance(layer, ParallelLMHead) and prefix in self.modules:
            return TileQuantLinearMethod(self, prefix, [self.member(prefix)])
        if not isinstance(layer, LinearBase):
            inside = [m for m in self.modules if m == prefix or m.startswith(f"{prefix}.")]
            if inside:
                raise NotImplementedError(
                    f"{prefix} ({type(layer).__name__}) is quantized in this checkpoint ({inside[0]}, {len(inside)} modules); "
                    "this plugin serves quantized linears and output heads only: keep embeddings and fused experts dense"
                )
            return None
        names = self.member_names(prefix)
        quantized = [name for name in names if name in self.modules]
        ignored = [name for name in names if self.is_ignored(name)]
        if len(quantized) == len(names):
            return TileQuantLinearMethod(self, prefix, [self.member(name) for name in names])
        if not quantized and (len(ignored) == len(names) or prefix in self.ignore):
            return UnquantizedLinearMethod()
        states = ", ".join(
            f"{name} ({'quantized' if name in quantized else 'ignored' if name in ignored else 'neither'})" for name in names
        )
        if quantized:
            raise ValueError(f"{prefix} is only partly quantized: {states}. {_REMEDY}")
        raise ValueError(
            f"{prefix} is neither quantized nor ignored: {states}. Add it to quantization_config.ignore if it is stored dense, "
            f"or quantize it. {_REMEDY}"
        )

    def own_name(self, prefix: str) -> str:
        """A module's name without what vLLM puts before all names of a draft model."""
        inner = prefix.removeprefix(_DRAFT)
        return prefix if any(name.startswith(_DRAFT) for name in self.modules) else inner

    def member_names(self, prefix: str) -> list[str]:
        """Names of the checkpoint's modules that make up the layer `prefix`: itself, or what vLLM fuses into it."""
        parent, _, leaf = prefix.rpartition(".")
        if prefix in self.modules or leaf not in self.packed_modules_mapping:
            return [prefix]  # also what is fused in the checkpoint already
        return [f"{parent}.{m}" if parent else m for m in self.packed_modules_mapping[leaf]]

    def member(self, name: str) -> Member:
        from vllm_tilequant.parameters import Member

        original = self.checkpoint_names[name]
        return Member(original, self.modules[name], self.schema.tensor_specs(original))

    def is_ignored(self, name: str) -> bool:
        """Whether `ignore` names the module, literally or by a pattern `re:...` that matches from its start."""
        return ignored_by(self.ignore, name) is not None


def _current() -> Any:
    """vLLM's config, while a model is built."""
    # Absent before 0.3x releases that raise when no config is set; there, one is always set while a model is built.
    return getattr(vllm.config, "get_current_vllm_config_or_none", vllm.config.get_current_vllm_config)()


def _load_format(current: Any) -> str:
    """What vLLM's config says of it; older releases say it with an enumeration."""
    given = getattr(getattr(current, "load_config", None), "load_format", None)
    return str(getattr(given, "value", given))


def _downloaded(model_name: str, revision: str | None) -> Path | None:
    """Folder of a hub id in the hub's cache, once all of its weight files are there."""
    from huggingface_hub import try_to_load_from_cache

    from vllm_tilequant.checkpoint.files import weight_files

    try:
        config = try_to_load_from_cache(model_name, "config.json", revision=revision)
    except ValueError:  # no hub id: a bucket, a file
        return None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    if not any(folder.glob("*.safetensors*")):
        return None
    return folder if all((folder / file).exists() for file in weight_files(folder)[0]) else None


@cache
def register_config() -> None:
    """Make the method known to vLLM, once per process."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    register_quantization_config(QUANT_METHOD)(TileQuantConfig)

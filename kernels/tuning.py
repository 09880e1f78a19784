"""Launch configurations: the one place with block sizes. A command writes `configs/tuning/<gpu>.json`, serving only reads it.

Of a decode configuration only `splits` and `warps_k` (of a stream's, `ctas` and `chains`) decide the order in which input
tiles are added, and they depend on nothing but the weight's shape. So a row has the same bits alone and in any batch, whichever
of the other fields its number of rows selects.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import torch

logger = logging.getLogger(__name__)

KEY = "decode_bitplane"
PREFILL_KEY = "prefill_int8"


@dataclass(frozen=True)
class DecodeConfig:
    """How one weight shape is cut up.

    splits: parts of the input tiles of one range of outputs, 1 to 16; for one and two rows each has a CTA of a cluster (more
        than 8 are beyond the portable size)
    warps_k: warps of a CTA that share input tiles further; each takes whole ones
    warps_n: warps of a CTA over different outputs; they share the CTA's preparation of the activations
    tiles: output tiles of a warp, 4 or 8
    stages: depth of a warp's ring, in steps of 16 channels
    parts: for three to eight rows, of the splits those that one CTA takes, 1 or 2
    launch_from: the number of rows from which (and from three on) a launch of its own prepares them, 9 for none
    many: for three to eight rows, CTAs that take stretches of equal length instead of `parts`, without regard to where a block
        ends, and whose sums meet in global memory; 0 for clusters

    Where it does not say so, a field is for one and two rows; more of them always take CTAs of eight warps and 512 outputs.
    """

    splits: int
    warps_k: int
    warps_n: int = 1
    tiles: int = 8
    stages: int = 4
    parts: int = 1
    launch_from: int = 9
    many: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.splits <= 16 and 1 <= self.warps_k <= self.warps_k * self.warps_n <= 16 and 3 <= self.stages <= 16):
            raise ValueError(f"{self}: wanted splits 1..16, at most 16 warps, stages 3..16")
        if self.tiles not in (4, 8):
            raise ValueError(f"{self}: wanted 4 or 8 tiles")
        if self.parts not in (1, 2) or self.splits % self.parts or self.many < 0:
            raise ValueError(f"{self}: wanted one or two parts, that divide {self.splits} splits, and many >= 0")


#: What every CTA takes of a multiprocessor's shared memory beside its own.
_RESERVED_BYTES = 1024
#: Blocks of 512 outputs that a CTA may touch, and items of a chain: lanes of a warp answer for them.
_MOST_PLACES, _MOST_PER_CHAIN = 16, 32
#: Above two rows: CTAs of a multiprocessor that registers allow; bytes of an `Item` of the CUDA source with two barriers;
#: bytes of the ring that an item's planes take at most (16 KiB, and two planes of 8 KiB).
_DENSE_RESIDENT, _ITEM_BYTES, _LARGEST_PLANES = 2, 192, 32 * 1024
#: Of a `Place` there; CTAs that may have parts of one block (`ARRIVED` there).
_PLACE_BYTES, _MOST_SHARERS = 528, 1023


@dataclass(frozen=True)
class StreamConfig:
    """The other way to cut a weight shape: all CTAs get equally many of its items (512 outputs x 64 inputs), neighbours in the
    order of memory, whatever the shape. Parts of a sum meet in global memory (kernels/README.md compares the two).

    ctas: CTAs for one and two rows, and for more of them as well
    chains: runs of a CTA's items that are summed up on their own: its warps, for one and two rows
    stages: depth of a warp's ring for one and two rows, in steps of 16 channels
    parts: for one row, of these CTAs those that one with as many more warps stands for, 1 or 2
    launch_from: as of `DecodeConfig`, and of two rows where these take that kernel
    """

    ctas: int
    chains: int = 8
    stages: int = 3
    parts: int = 1
    launch_from: int = 9

    def __post_init__(self) -> None:
        if not (self.ctas >= 1 and 4 <= self.chains <= self.chains * self.parts <= 22 and 3 <= self.stages <= 16):
            raise ValueError(f"{self}: wanted at least one CTA, 4 to 22 chains (of all parts), 3 to 16 stages")
        if self.parts not in (1, 2) or self.ctas % self.parts:
            raise ValueError(f"{self}: wanted one or two parts, that divide {self.ctas} CTAs")


def gpu_key(name: str) -> str:
    """File stem of a GPU: "NVIDIA H200" -> "h200", "NVIDIA A100-SXM4-80GB" -> "a100-sxm4-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


@dataclass(frozen=True)
class PrefillConfig:
    """How the prefill serves one weight shape.

    splits: CTAs of a cluster that share the input tiles in the short kernel, up to 16
    short_rows: rows up to which the short kernel is used
    batch_rows: above those, rows up to which the kernel for batches is used (where it does not serve, the short one up to 128);
        beyond, the expansion and one whole product
    """

    splits: int = 1
    short_rows: int = 32
    batch_rows: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= 16 or self.short_rows < 0 or self.batch_rows < 0:
            raise ValueError(f"{self}: wanted splits 1 to 16, short_rows and batch_rows >= 0")


@functools.cache
def _read(gpu: str) -> dict[str, Any]:
    """The tuning file of a GPU; empty, and said once, where there is none."""
    path = files("vllm_tilequant") / "configs" / "tuning" / f"{gpu}.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        try:  # a checkout keeps `configs` beside the package
            import vllm_tilequant.configs.tuning as tuning

            data = json.loads((files(tuning) / f"{gpu}.json").read_text())
        except (FileNotFoundError, ModuleNotFoundError):
            logger.warning(
                "no tuned configurations for GPU %r: using the documented default; `benchmarks/tune_*.py` make them", gpu
            )
            return {}
    return data


@functools.cache
def tuned(gpu: str) -> dict[tuple[int, int], DecodeConfig | StreamConfig]:
    """(N, K) -> configuration of the graded product, as the tuning file of a GPU says; an entry with `ctas` is a stream's."""

    def config(entry: dict[str, Any]) -> DecodeConfig | StreamConfig:
        kind = StreamConfig if "ctas" in entry else DecodeConfig
        return kind(**{f: entry[f] for f in kind.__dataclass_fields__ if f in entry})

    return {(e["n"], e["k"]): config(e) for e in _read(gpu).get(KEY, [])}


@functools.cache
def tuned_prefill(gpu: str) -> dict[tuple[int, int], PrefillConfig]:
    """(N, K) -> configuration of the prefill."""
    fields = PrefillConfig.__dataclass_fields__
    return {(e["n"], e["k"]): PrefillConfig(**{f: e[f] for f in fields if f in e}) for e in _read(gpu).get(PREFILL_KEY, [])}


def default_prefill_config(n: int, k: int, multiprocessors: int) -> PrefillConfig:
    """The documented default: of 1 to 8 splits (the portable cluster), with two input tiles to a CTA at least, the fewest that
    keep four fifths of the places for CTAs of 256 outputs busy, two to a multiprocessor; else those that keep most busy.
    The short kernel up to 16 rows, the one for batches up to 256."""
    blocks = -(-n // 256)

    def busy(splits: int) -> float:
        waves = blocks * splits / (2 * multiprocessors)
        return waves / -(-waves // 1)

    legal = [s for s in range(1, 9) if s == 1 or k // 64 >= 2 * s]
    splits = next((s for s in legal if busy(s) >= 0.8), max(legal, key=busy))
    return PrefillConfig(splits, 16, 256)


@functools.cache
def prefill_config(n: int, k: int, device: torch.device) -> PrefillConfig:
    """Configuration of a weight [n, k] on a device: the tuned one of this GPU and shape, else the default."""
    if device.type != "cuda":
        return PrefillConfig()  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    found = tuned_prefill(gpu_key(properties.name)).get((n, k))
    return found or default_prefill_config(n, k, properties.multi_processor_count)


@dataclass(frozen=True)
class Geometry:
    """A launch of the CUDA kernel for one and two rows. tiles: output tiles of a warp; per_warp: input tiles of a warp."""

    kernel: str
    tiles: int
    warps: int
    per_warp: int
    grid: int
    shared_bytes: int


@functools.cache
def cuda_geometry(rows: int, n_tiles: int, k_tiles: int, config: DecodeConfig) -> Geometry:
    """What a launch over [n_tiles, k_tiles] takes; the bytes mirror the layout at the top of the kernel's `decode`."""
    tiles, warps = config.tiles, config.warps_k * config.warps_n
    per_warp = per_chain(k_tiles, config)
    input_bytes = _up(128 + 256 * rows + 20 * rows + 4)
    sums, ring = rows * tiles * 256, config.stages * tiles * 256
    kept = config.warps_k * per_warp * input_bytes + warps * (per_warp * 48 + (per_warp * 16 + config.stages - 1) * 16)
    received = -(-rows * config.warps_n * tiles // config.splits) * config.splits * 256
    shared = warps * (sums + ring if per_warp > 1 else max(sums, ring)) + kept + received + 16
    grid = -(-n_tiles // (tiles * config.warps_n)) * config.splits
    return Geometry(f"decode_{tiles}_{rows}", tiles, warps, per_warp, grid, shared)


def per_chain(k_tiles: int, config: DecodeConfig) -> int:
    """Input tiles whose sums are added up before they meet others: those of a warp, for one and two rows."""
    return -(-k_tiles // (config.splits * config.warps_k))


@dataclass(frozen=True)
class Multiprocessors:
    """Of one GPU. count; shared_bytes: of one of them; cta_bytes: the most that a CTA may have."""

    count: int
    shared_bytes: int
    cta_bytes: int


@dataclass(frozen=True)
class StreamGeometry:
    """How a stream is cut, in the words of `Args` of the CUDA source.

    grid: CTAs, or stretches of which one takes `parts`
    few: whether the kernel for one and two rows takes it. Two rows go with three and more where not all CTAs would run at once.
    shared_bytes: of the kernels for one and two rows
    """

    grid: int
    items: int
    parts: int
    most_items: int
    places: int
    per_chain: int
    few: bool
    shared_bytes: int


@functools.cache
def stream_geometry(rows: int, n_tiles: int, k_tiles: int, config: StreamConfig, gpu: Multiprocessors) -> StreamGeometry:
    """What a launch over [n_tiles, k_tiles] takes; the bytes mirror the layout at the top of the kernel's `decode`.

    Raises `NotImplementedError` where a CTA's part does not fit.
    """
    items = -(-n_tiles // 8) * k_tiles
    grid = min(config.ctas, items)
    parts = config.parts if rows == 1 and grid % config.parts == 0 else 1
    most = -(-items // grid)
    places = min(-(-(most * parts - 1) // k_tiles) + 1, most * parts)
    per_chain = -(-most // config.chains)
    fits = places <= _MOST_PLACES and per_chain <= _MOST_PER_CHAIN and items * max(grid * (grid + 1), k_tiles) < 2**32
    fits &= -(-(k_tiles - 1) // (items // grid)) + 1 <= _MOST_SHARERS
    few, shared = rows <= 2, 0
    if few:
        sums, stages = rows * 2048, config.stages * 2048
        kept = per_chain * (_up(256 + 276 * rows) + 48) + (per_chain * 16 + config.stages - 1) * 16
        warps = config.chains * parts
        shared = warps * ((sums + stages if per_chain > 1 else max(sums, stages)) + kept)
        shared += (places - 1) * sums + _up(4 * (warps + 2))
    if rows == 2 and grid > gpu.count * (gpu.shared_bytes // (shared + _RESERVED_BYTES)):
        few, shared = False, 0
    if not fits or shared > gpu.cta_bytes:
        raise NotImplementedError(
            f"{config} for [{n_tiles * 64}, {k_tiles * 64}] and {rows} rows: {per_chain} items a chain, {places} blocks and "
            f"{shared} bytes a CTA, of which {_MOST_PER_CHAIN}, {_MOST_PLACES} and {gpu.cta_bytes} are possible: take more CTAs"
        )
    return StreamGeometry(grid, items, parts, most, places, per_chain, few, shared)


@dataclass(frozen=True)
class DenseGeometry:
    """A launch of the kernel for three to eight rows, in the words of `Args` of the CUDA source.

    rows: that it is compiled for; cluster: CTAs; prepared_bytes: of an input tile's rows
    items, places: of what CTAs take stretches of, and sums that each may leave; room: words that these take. 0 in clusters
    """

    rows: int
    grid: int
    cluster: int
    most_items: int
    ring: int
    shared_bytes: int
    prepared_bytes: int
    items: int = 0
    places: int = 0
    room: int = 0


@functools.cache
def dense_geometry(
    rows: int, n_tiles: int, k_tiles: int, config: DecodeConfig | StreamConfig, gpu: Multiprocessors
) -> DenseGeometry:
    """What a launch over [n_tiles, k_tiles] takes; the bytes mirror the layout at the top of the kernel's `decode_dense`.

    Raises `NotImplementedError` where a CTA's part does not fit.
    """
    held, blocks, items, places = 4 if rows <= 4 else 8, -(-n_tiles // 8), 0, 0
    if isinstance(config, StreamConfig):
        cut = stream_geometry(rows, n_tiles, k_tiles, config, gpu)
        grid, cluster, most, items, places = cut.grid, 1, cut.most_items, cut.items, cut.places
        received = _PLACE_BYTES * places
    elif config.many:
        each = config.splits * config.warps_k
        items = blocks * each
        grid, cluster = min(config.many, items), 1
        chains, places = -(-items // grid), _most_sums(items, grid, config.warps_k)
        most, ends = chains * per_chain(k_tiles, config), min(-(-(chains - 1) // each) + 1, chains)
        received = _up(ends * (_PLACE_BYTES + 4 + 4 * each))
        if ends > _MOST_PLACES or items * max(grid * (grid + 1), each) >= 2**32:
            raise NotImplementedError(f"{config} for [{n_tiles * 64}, {k_tiles * 64}]: {ends} blocks a CTA: take more CTAs")
    else:
        cluster = config.splits // config.parts
        grid = blocks * cluster
        most = config.parts * config.warps_k * per_chain(k_tiles, config)
        received = config.splits * -(-rows * 8 // cluster) * 256
    launch = rows >= config.launch_from  # rows come with their items, and else stay where they were prepared
    prepared = 20 * held + (256 * held + 32 if launch else (4096 if held == 4 else 2048) + 16)
    kept = most * (_ITEM_BYTES + (0 if launch else prepared)) + 32 + received
    largest = _LARGEST_PLANES + (-(-prepared // 1024) * 1024 if launch else 0)
    ring = 0
    for resident in range(min(_DENSE_RESIDENT, -(-grid // gpu.count)), 0, -1):
        limit = min(gpu.cta_bytes, gpu.shared_bytes // resident - _RESERVED_BYTES)
        ring = min(most * largest, (limit - kept) // 1024 * 1024)
        if ring >= largest + (largest // 2 if most > 1 else 0):
            break
    if ring < largest:
        raise NotImplementedError(
            f"{config} for [{n_tiles * 64}, {k_tiles * 64}] and {rows} rows: {most} items and the sums of a cluster leave "
            f"{ring} bytes of {gpu.cta_bytes} to a ring that wants {largest}: take more CTAs (fewer parts)"
        )
    room = grid * places * held * 8 * 64
    return DenseGeometry(held, grid, cluster, most, ring, ring + kept, prepared, items, places, room)


def _most_sums(chains: int, ctas: int, in_part: int) -> int:
    """The most sums that one of the CTAs leaves that share so many chains, `in_part` of which make a part: each of the chains
    that end a part which a CTA before began, and one of every other part."""
    most = 0
    for cta in range(ctas):
        begin, end = cta * chains // ctas, (cta + 1) * chains // ctas
        alone = min(-begin % in_part, end - begin)
        most = max(most, alone + -(-(end - begin - alone) // in_part))
    return most


def divisor(d: int) -> int:
    """What `divide_by` of the CUDA sources wants for quotients by d."""
    return 2**32 // d + 1 if d > 1 else 0


def _up(size: int) -> int:
    return -(-size // 16) * 16


def default_config(n: int, k: int, gpu: Multiprocessors) -> DecodeConfig:
    """The documented default: clusters of 8 (fewer for few input tiles, 16 where 8 need too much shared memory), up to 8 warps
    that take two input tiles each if that is enough, 512 outputs to a warp, or 256 where multiprocessors would be idle. Above
    two rows a launch of its own prepares them where a CTA has more than 8 input tiles.

    Raises `NotImplementedError` when no cut fits the shared memory of the GPU at every number of rows.
    """
    k_tiles = k // 64
    tiles = 8 if -(-n // 512) * 8 >= gpu.count else 4
    largest = next((s for s in (8, 4, 2) if k_tiles >= 4 * s), 1)
    for splits in (largest, 16):
        warps_k = min(8, -(-k_tiles // (2 * splits)))
        while warps_k:
            launch = 3 if warps_k * -(-k_tiles // (splits * warps_k)) > 8 else 9
            config = DecodeConfig(splits=splits, warps_k=warps_k, tiles=tiles, stages=3, launch_from=launch)
            if fits(n, k, config, gpu) and per_chain(k_tiles, config) <= 32:
                return config
            warps_k //= 2
    raise NotImplementedError(f"[{n}, {k}]: the activations of {k} inputs do not fit {gpu.cta_bytes} bytes of shared memory")


def fits(n: int, k: int, config: DecodeConfig | StreamConfig, gpu: Multiprocessors) -> bool:
    """Whether shared memory suffices at every number of rows."""
    shape = n // 64, k // 64
    try:
        for rows in range(3, 9):  # a launch for them or not
            dense_geometry(rows, *shape, config, gpu)
        if isinstance(config, StreamConfig):
            return all(stream_geometry(rows, *shape, config, gpu) for rows in (1, 2))
    except NotImplementedError:
        return False
    return all(cuda_geometry(rows, *shape, config).shared_bytes <= gpu.cta_bytes for rows in (1, 2))


@functools.cache
def multiprocessors(device: torch.device) -> Multiprocessors:
    properties: Any = torch.cuda.get_device_properties(device)
    return Multiprocessors(
        properties.multi_processor_count, properties.shared_memory_per_multiprocessor, properties.shared_memory_per_block_optin
    )


@functools.cache
def decode_config(n: int, k: int, device: torch.device) -> DecodeConfig | StreamConfig:
    """Configuration of a weight [n, k] on a device: the tuned one of this GPU and shape, else the default."""
    properties = torch.cuda.get_device_properties(device)
    found = tuned(gpu_key(properties.name)).get((n, k))
    return found or default_config(n, k, multiprocessors(device))


def stream_ctas(n: int, k: int, device: torch.device) -> int:
    """CTAs of the stream that is tuned for a weight [n, k] on a device, 0 if none is."""
    if device.type != "cuda":
        return 0
    found = tuned(gpu_key(torch.cuda.get_device_properties(device).name)).get((n, k))
    return found.ctas if isinstance(found, StreamConfig) else 0


def dump(
    gpu: str,
    configs: Mapping[tuple[int, int], DecodeConfig | StreamConfig],
    extra: dict[str, Any],
    prefill: dict[tuple[int, int], PrefillConfig] | None = None,
) -> str:
    """The JSON text of a tuning file."""

    def section(key: str, found: Mapping[tuple[int, int], Any]) -> str:
        rows = [{"n": n, "k": k, **asdict(c)} for (n, k), c in sorted(found.items())]
        return f',\n  "{key}": [\n' + ",\n".join(f"    {json.dumps(r)}" for r in rows) + "\n  ]"

    body = section(KEY, configs) + (section(PREFILL_KEY, prefill) if prefill else "")
    return json.dumps({"gpu": gpu, **extra})[:-1] + body + "\n}\n"

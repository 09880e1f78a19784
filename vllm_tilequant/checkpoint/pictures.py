"""Pictures of a checkpoint as PNG bytes, with matplotlib: where the bits went, and what calibration thought of it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm
from matplotlib.figure import Figure

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.reader import Checkpoint

#: One colour for each width of a tile, dark to bright.
_WIDTHS = ListedColormap(["#3b0f70", "#8c2981", "#fe9f6d", "#fcfdbf"])
_BORDERS = BoundaryNorm([1, 3, 5, 7, 9], 4)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_DPI = 90


def grid(values: Mapping[str, float]) -> tuple[list[str], np.ndarray]:
    """Module -> value as (projections, [projections, layers] with NaN where there is none)."""
    cells: dict[tuple[str, int], float] = {}
    for name, value in values.items():
        match = _LAYER.search(name)
        cells[name.rpartition(".")[2], int(match[1]) if match else 0] = value
    projections = list(dict.fromkeys(p for p, _ in cells))
    out = np.full((len(projections), 1 + max((layer for _, layer in cells), default=0)), np.nan)
    for (projection, layer), value in cells.items():
        out[projections.index(projection), layer] = value
    return projections, out


def share_map(schema: s.QuantizationSchema) -> bytes:
    """Heat map, projections by layers: share of tiles stored with 4 bits or fewer."""
    shares = {
        name: sum(n for bits, n in m.tile_counts.items() if bits <= 4) / (m.n_tiles * m.k_tiles)
        for name, m in schema.modules.items()
    }
    projections, values = grid(shares)
    figure = _heat_figure(values)
    axes = figure.add_subplot()
    image = axes.imshow(values, aspect="auto", vmin=0, vmax=1, cmap="magma_r", interpolation="nearest")
    _label(axes, projections, "Share of tiles at 4 bits or fewer")
    figure.colorbar(image, ax=axes, format=lambda v, _: f"{v:.0%}")
    return _png(figure)


def mass_map(mass: Mapping[str, float]) -> bytes:
    """Heat map, projections by layers: calibration's estimate of the loss that 4 bits would cost, logarithmic."""
    projections, values = grid(mass)
    figure = _heat_figure(values)
    axes = figure.add_subplot()
    positive = values[np.isfinite(values) & (values > 0)]
    norm = LogNorm(positive.min(), positive.max()) if positive.size else None
    image = axes.imshow(np.where(values > 0, values, np.nan), aspect="auto", norm=norm, cmap="viridis", interpolation="nearest")
    _label(axes, projections, "Score mass (calibration's estimate of the loss at stake; arbitrary unit)")
    figure.colorbar(image, ax=axes)
    return _png(figure)


def bits_by_depth(schema: s.QuantizationSchema) -> bytes:
    """Lines over the layers: code bits per weight of each projection, and of the whole layer."""
    bits = {
        n: sum(max(b, 4) * c for b, c in m.tile_counts.items()) / (m.n_tiles * m.k_tiles) for n, m in schema.modules.items()
    }
    weights = {name: float(m.out_features * m.in_features) for name, m in schema.modules.items()}
    projections, values = grid(bits)
    _, sizes = grid(weights)
    figure = Figure((8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    layers = np.arange(values.shape[1])
    for projection, row in zip(projections, values, strict=True):
        axes.plot(layers, row, marker=".", linewidth=1, alpha=0.8, label=projection)
    mean = np.nansum(values * sizes, 0) / np.nansum(sizes, 0)
    axes.plot(layers, mean, color="black", linewidth=2.5, label="whole layer")
    axes.set(xlabel="layer", ylabel="stored code bits per weight", title="Bits by depth and projection")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _png(figure)


def tile_maps(checkpoint: Checkpoint, names: Iterable[str]) -> bytes:
    """The precision maps themselves, one pixel a tile: outputs downwards, inputs to the right."""
    names = list(names)
    maps = [checkpoint.tensor(f"{name}.{s.MAP}").numpy() for name in names]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure((3.4 * columns, 2.9 * rows), layout="constrained")
    for i, (name, tile_bits) in enumerate(zip(names, maps, strict=True)):
        axes = figure.add_subplot(rows, columns, i + 1)
        image = axes.imshow(tile_bits, cmap=_WIDTHS, norm=_BORDERS, interpolation="nearest")
        axes.set_title(".".join(name.split(".")[-4:]).removeprefix("model."), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("input tile", fontsize=7)
        axes.set_ylabel("output tile", fontsize=7)
    bar = figure.colorbar(image, ax=figure.axes, ticks=[2, 4, 6, 8], shrink=0.8)
    bar.set_label("bits of a tile")
    return _png(figure)


def layer_maps(checkpoint: Checkpoint, names: Iterable[str]) -> bytes:
    """The maps of one layer's linears side by side at one scale, one square a tile; drawn as one image, so that it is quick."""
    maps = [checkpoint.tensor(f"{name}.{s.MAP}").numpy() for name in names]
    gap = max(1, max(m.shape[1] for m in maps) // 24)
    width = sum(m.shape[1] for m in maps) + gap * (len(maps) - 1)
    canvas = np.full((max(m.shape[0] for m in maps), width), np.nan)
    figure = Figure((12, min(6.0, max(1.2, 11 * canvas.shape[0] / width) + 0.5)), layout="constrained")
    axes = figure.add_subplot()
    left = 0
    for name, tile_bits in zip(names, maps, strict=True):
        rows, columns = tile_bits.shape
        canvas[:rows, left : left + columns] = tile_bits
        axes.text(left - 0.5, -0.8, name.rpartition(".")[2], fontsize=7, rotation=12, va="bottom")
        left += columns + gap
    axes.imshow(canvas, cmap=_WIDTHS, norm=_BORDERS, interpolation="nearest")
    axes.axis("off")
    return _png(figure)


def layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Layer -> its modules; those outside of layers under their own names."""
    out: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.search(name)
        out.setdefault(f"layer {int(match[1])}" if match else name, []).append(name)
    return out


def speed_pareto(rows: Iterable[Mapping[str, Any]], speed: Iterable[Mapping[str, Any]]) -> bytes | None:
    """KL divergence against the time of a token, for profiles that both `evaluate` and `bench` have measured; None without any.

    Of `evaluate` the graded rows with INT8 activations are taken (the static one for profile off), which are what is served.
    """
    kl = {}
    for row in rows:
        if row["activation"] == "group64" and row["phase"] == ("static" if row["profile"] == "off" else "graded"):
            kl[row["profile"]] = (row["kl_milli"], row["kl_se"])
        elif row["activation"] == "group64" and row["phase"] == "static":
            kl.setdefault("off", (row["kl_milli"], row["kl_se"]))  # at stored precision every profile is the same
    first = min((row["batch"] for row in speed), default=0)
    timed = {row["profile"]: row for row in speed if row["method"] == "tilequant" and row["batch"] == first}
    common = [profile for profile in timed if profile in kl]
    if not common:
        return None
    figure = Figure((6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for profile in common:
        place = (timed[profile]["tpot_ms"], kl[profile][0])
        axes.errorbar(*place, kl[profile][1], marker="o", capsize=3, color=_WIDTHS(1))
        axes.annotate(str(profile), place, fontsize=8, xytext=(4, 4), textcoords="offset points")
    source = next((r for r in speed if r["method"] != "tilequant" and r["batch"] == first), None)
    if source is not None:
        axes.axvline(source["tpot_ms"], color="#9e9e9e", linestyle="--", label=f"source, {source['method']}")
        axes.legend(fontsize=8)
    axes.set(xlabel=f"time per further token, ms, batch {first}", ylabel="KL to the source, milli-nats per token")
    axes.set_title("Quality against speed")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return _png(figure)


def pareto(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """KL divergence against loaded bits, from rows of `tilequant evaluate --json`."""
    figure = Figure((6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    phases: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        phases.setdefault(f"{row['phase']}, activation {row['activation']}", []).append(row)
    for label, group in phases.items():
        group.sort(key=lambda row: row["loaded_bits"])
        x, y = [row["loaded_bits"] for row in group], [row["kl_milli"] for row in group]
        axes.errorbar(x, y, [row["kl_se"] for row in group], marker="o", linewidth=1, capsize=3, label=label)
        for row in group if group[0]["phase"] == "graded" else ():  # static rows of all profiles lie on one point
            place = (row["loaded_bits"], row["kl_milli"])
            axes.annotate(str(row["profile"]), place, fontsize=8, xytext=(4, 4), textcoords="offset points")
    axes.set(
        xlabel="loaded bits per weight", ylabel="KL to the source, milli-nats per token", title="Quality against bits read"
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _png(figure)


def speed(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Bars from rows of `tilequant bench`: time to the first token, time per further token, memory."""
    rows = list(rows)
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    methods = list(dict.fromkeys((row["method"], row["profile"]) for row in rows))
    panels = {"ttft_ms": "time to first token, ms", "tpot_ms": "time per further token, ms"}
    memory = [(k, k.removesuffix("_gib")) for k in ("weights_gib", "resident_gib", "peak_gib") if any(r.get(k) for r in rows)]
    figure = Figure((3.6 * (len(panels) + bool(memory)), 3.4), layout="constrained")
    axes = [figure.add_subplot(1, len(panels) + bool(memory), i + 1) for i in range(len(panels) + bool(memory))]
    width = 0.8 / len(methods)
    colours = ["#9e9e9e" if method != "tilequant" else _WIDTHS(1 + i % 2) for i, (method, _) in enumerate(methods)]
    for i, (method, profile) in enumerate(methods):
        own = {row["batch"]: row for row in rows if (row["method"], row["profile"]) == (method, profile)}
        offset = (i - (len(methods) - 1) / 2) * width
        label = f"{method} {profile}" if profile else method
        for ax, key in zip(axes, panels, strict=False):
            bars = ax.bar(
                np.arange(len(batches)) + offset, [own[b][key] for b in batches], width, color=colours[i], label=label
            )
            ax.bar_label(bars, fmt="%.3g", fontsize=7)
        if memory:
            values = [max(row[k] or 0 for row in own.values()) for k, _ in memory]
            bars = axes[-1].bar(np.arange(len(memory)) + offset, values, width, color=colours[i])
            axes[-1].bar_label(bars, fmt="%.3g", fontsize=7)
    for ax, title in zip(axes, panels.values(), strict=False):
        ax.set_xticks(range(len(batches)), [f"batch {b}" for b in batches], fontsize=8)
        ax.set_title(title, fontsize=9)
    if memory:
        axes[-1].set_xticks(range(len(memory)), [label for _, label in memory], fontsize=8)
        axes[-1].set_title(f"{rows[0]['memory']} memory, GiB", fontsize=9)
    axes[0].legend(fontsize=7)
    return _png(figure)


def level_shares(shares: Mapping[str, Iterable[float]]) -> bytes:
    """Stacked bars, one for each profile: share of channels read at 0, 2, 4, 6 and 8 bits."""
    figure = Figure((6, 0.9 + 0.4 * len(shares)), layout="constrained")
    axes = figure.add_subplot()
    table = np.array([list(v) for v in shares.values()], dtype=float)
    left = np.zeros(len(shares))
    colours = ["#d9d9d9", *(_WIDTHS(i) for i in range(len(s.LEVELS) - 1))]
    for level, colour, column in zip(s.LEVELS, colours, table.T, strict=True):
        axes.barh(list(shares), column, left=left, color=colour, edgecolor="white", linewidth=0.5, label=f"{level}")
        left += column
    axes.set(xlim=(0, 1), title="Share of channels by bits read")
    axes.invert_yaxis()
    axes.legend(fontsize=8, title="bits", loc="center left", bbox_to_anchor=(1, 0.5))
    return _png(figure)


def _heat_figure(values: np.ndarray) -> Figure:
    rows, columns = values.shape
    return Figure((min(14.0, 3 + 0.22 * columns), 1.4 + 0.28 * rows), layout="constrained")


def _label(axes: Axes, projections: list[str], title: str) -> None:
    axes.set_yticks(range(len(projections)), projections, fontsize=8)
    axes.set_xlabel("layer")
    axes.set_title(title, fontsize=10)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()

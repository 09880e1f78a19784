"""Where things lie: the device a module computes on, and what of a whole model's worth is held there or fetched when needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T", bound=Any)


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes. Of an offloaded one, the device that its weight is brought to, without bringing it."""
    onload = getattr(module._parameters, "onload_device", None)  # compressed-tensors' OffloadCache
    return next(module.parameters()).device if onload is None else torch.device(onload)


def offloaded(module: nn.Module) -> bool:
    """Whether a module's weight is brought from another device whenever it runs."""
    kept = getattr(module._parameters, "offload_device", None)  # "disk", too
    return kept is not None and torch.device(device_of(module)).type != getattr(kept, "type", str(kept).partition(":")[0])


@contextmanager
def as_kept(model: nn.Module) -> Iterator[None]:
    """Inside, parameters of an offloaded model are the ones that are kept: asked for otherwise, each is a copy on the GPU."""
    if not any(hasattr(m._parameters, "onload_device") for m in model.modules()):
        yield
        return
    from compressed_tensors.offload import disable_onloading  # there is no offloading without it

    with disable_onloading():
        yield


@torch.no_grad()
def write_parameter(module: nn.Module, name: str, data: Tensor) -> None:
    """Give a parameter new values, also where it is offloaded."""
    if hasattr(module._parameters, "onload_device"):
        from compressed_tensors.offload import update_offload_parameter  # there is no offloading without it

        update_offload_parameter(module, name, data)
    else:
        getattr(module, name).copy_(data)


def input_device(model: Any) -> torch.device:
    """Where token ids go."""
    return device_of(model.get_input_embeddings())


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a dataclass of tensors, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return replace(value, **{f.name: getattr(value, f.name).to(device) for f in fields(value)})


def room(device: torch.device) -> int:
    """Bytes that this process may still allocate on a GPU; no bound elsewhere, where nothing is ever moved away."""
    if device.type != "cuda":
        return 1 << 62
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    allocated = torch.cuda.memory_allocated(index)
    limit = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)(index)  # not in every torch
    return min(free + torch.cuda.memory_reserved(index) - allocated, int(limit * total) - allocated)


class Held(Mapping[str, T]):
    """One value for each of many linears, each kept on its linear's device where all of that device fit, else on the CPU.

    bytes_each: of a linear's value; spare: bytes that must stay free on each device for the work itself
    A value that is asked for always comes on its linear's device.
    """

    def __init__(self, linears: Mapping[str, nn.Linear], bytes_each: Mapping[str, int], spare: int):
        self._values: dict[str, T] = {}
        self._device = {name: device_of(linears[name]) for name in bytes_each}
        need: dict[torch.device, int] = {}
        for name, device in self._device.items():
            need[device] = need.get(device, 0) + bytes_each[name]
        self.away = {device for device, n in need.items() if n + spare > room(device)}

    def put(self, name: str, value: T) -> None:
        device = self._device[name]
        self._values[name] = moved(value, torch.device("cpu") if device in self.away else device)

    def __getitem__(self, name: str) -> T:
        return moved(self._values[name], self._device[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

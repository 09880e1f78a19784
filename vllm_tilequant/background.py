"""Copies of large tensors beside what the loader does meanwhile.

A checkpoint of ours has some eight tensors a module, most of them small, and what is done for each of them on the host takes
about as long as copying the large ones to the device. So the large ones are copied by threads: few, and only a few tensors
ahead of them, so that neither the memory that waits nor the time that is left at the end grows with the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

#: Threads that copy, and copies that may be under way or wait.
_WORKERS, _MOST = 2, 4

_pool: ThreadPoolExecutor | None = None
_own = threading.local()
_room = threading.BoundedSemaphore(_MOST)


def start(device: torch.device, call: Callable[..., Any], *args: Any) -> Future[None]:
    """`call(*args)`, which copies to tensors of a device, in a thread; waits while too many are under way.

    What it raises, `result()` of what is returned raises. It allocates nothing: memory pools are chosen by thread.
    """
    global _pool
    before = None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()
    if _pool is None:
        _pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="tilequant-loading")
    _room.acquire()
    try:
        future = _pool.submit(_run, device, before, call, args)
    except BaseException:
        _room.release()
        raise
    future.add_done_callback(lambda _: _room.release())
    return future


def copied(tensor: Tensor, device: torch.device) -> tuple[Tensor, Future[None]]:
    """A tensor on a device that will hold a copy of another one, and when it does."""
    target = torch.empty_like(tensor, device=device)
    return target, start(device, target.copy_, tensor)


def _run(device: torch.device, before: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """before: what must have happened on the device, where memory may have had another owner"""
    if before is None:
        call(*args)
        return
    module = torch.get_device_module(device)
    module.set_device(device)  # a thread begins with the first one, where this rank has no business
    if not hasattr(_own, "stream"):
        _own.stream = module.Stream(device)  # on the loader's own stream each of its small copies would wait for the large ones
    _own.stream.wait_event(before)
    with module.stream(_own.stream):
        call(*args)
    _own.stream.synchronize()  # what is copied may lie on the device already, and then has only been started

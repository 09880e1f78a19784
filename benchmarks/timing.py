"""Time a launch as serving runs it: inside a captured CUDA graph, over weights that no cache still holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Bytes that a rotation must pass through before it comes back to the first weight: several L2 caches.
ROTATE_BYTES = 320 * 2**20


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch (or one chain of launches): median, 20th and 80th percentile over replays."""

    us: float
    us_p20: float
    us_p80: float


def copies_needed(bytes_read: float) -> int:
    return max(2, int(ROTATE_BYTES // bytes_read) + 1)


def time_graph(calls: Sequence[Callable[[], object]], *, replays: int = 30, warmup: int = 3, at_least: int = 40) -> Timing:
    """Capture all calls one after another (repeated up to `at_least`), replay, and divide by their number.

    Each call should work on a weight of its own; their order is the order in which they are captured.
    """
    repeats = -(-at_least // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    for _ in range(warmup):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    times = torch.tensor([b.elapsed_time(a) for b, a in events], dtype=torch.float64) * 1e3 / (repeats * len(calls))
    p20, p50, p80 = torch.quantile(times, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return Timing(p50, p20, p80)


def copy_gbps(device: str = "cuda", size: int = 2**32) -> float:
    """Bytes read plus bytes written by an element-wise device-to-device copy, in GB/s: the ceiling of the rows."""
    a = torch.randint(2**31, (size // 4,), dtype=torch.int32, device=device)
    b = torch.empty_like(a)
    timing = time_graph([lambda: torch.bitwise_not(a, out=b)], replays=10, at_least=1)
    return 2 * size / timing.us / 1e3

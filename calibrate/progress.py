"""What a long run says of itself: one display with phase, k of N, time and memory, and a log that survives a kill."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from rich.console import Console
from rich.status import Status

T = TypeVar("T")
#: Seconds between lines where the output is no terminal.
_QUIET_S = 10.0


class Progress:
    """The display of one calibration.

    log: file that every finished item and step is added to at once, or None
    expected: phase -> seconds, in order; without it the time left is that of the current loop
    """

    def __init__(self, log: Path | None = None, expected: Mapping[str, float] | None = None):
        self.log, self.expected = log, dict(expected or {})
        self.seconds: dict[str, float] = {}
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._phase, self._began, self._told = "", time.perf_counter(), time.perf_counter()
        self._done: list[str] = []  # phases that this process has gone through

    @contextmanager
    def phase(self, name: str, before: float = 0.0) -> Iterator[None]:
        """Time one phase. `before`: seconds that an earlier, interrupted run has spent on it."""
        self._phase, self._began = name, time.perf_counter() - before
        if self._console.is_terminal:
            self._status = self._console.status(f"tilequant {name}")
            self._status.start()
        try:
            yield
        finally:
            self.seconds[name] = round(self.elapsed, 2)
            if self._status is not None:
                self._status.stop()
                self._status = None
        self._done.append(name)
        self.say(f"{name} done in {clock(self.seconds[name])}, {self._memory()}")

    def restored(self, name: str, seconds: float) -> None:
        """A phase that an earlier run has finished."""
        self.seconds[name] = seconds
        self.say(f"{name}: from the work folder")

    @property
    def elapsed(self) -> float:
        """Seconds of the current phase."""
        return time.perf_counter() - self._began

    def track(self, items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
        """Hand out `items`, each counted as done when the next one is asked for. what: the name of the loop in its phase."""
        total = len(items) if total is None and isinstance(items, Sized) else total
        start = time.perf_counter()
        for k, item in enumerate(items, 1):
            yield item
            used = time.perf_counter() - start
            left = used / k * ((total or k) - k)
            name = f" ({item.name})" if hasattr(item, "name") else ""
            loop = self._phase if what == self._phase else f"{self._phase}: {what}"
            self._tell(
                f"{loop} {k} of {total or '?'}{name}, {clock(self.elapsed)}, "
                f"about {clock(self._left(left, k / (total or k) if what == self._phase else None))} left, {self._memory()}"
            )

    def say(self, line: str) -> None:
        """A line for the log and the terminal."""
        self._write(line)
        self._console.print(f"tilequant {line}", highlight=False, soft_wrap=True, markup=False)
        self._told = time.perf_counter()

    def _tell(self, line: str) -> None:
        """A line for the log that the display shows for a while."""
        self._write(line)
        if self._status is not None:
            self._status.update(f"tilequant {line}")
        elif time.perf_counter() - self._told > _QUIET_S:
            print(f"tilequant {line}", file=sys.stderr, flush=True)
            self._told = time.perf_counter()

    def _write(self, line: str) -> None:
        if self.log is not None:
            with self.log.open("a") as f:
                f.write(f"{datetime.now().isoformat(' ', 'seconds')} {line}\n")

    def _left(self, of_loop: float, share: float | None) -> float:
        """Seconds left: of the current loop, or what was expected of this phase and the later ones at the pace seen so far.

        share: how much of the phase is done, where its loop is the whole of it
        """
        if self._phase not in self.expected:
            return of_loop
        took = sum(self.seconds[p] for p in self._done) + (self.elapsed if share else 0)
        wanted = sum(self.expected.get(p, 0) for p in self._done) + self.expected[self._phase] * (share or 0)
        pace = took / wanted if wanted else 1.0
        phases = list(self.expected)
        later = sum(self.expected[p] for p in phases[phases.index(self._phase) + 1 :])
        here = of_loop if share else max(of_loop, self.expected[self._phase] * pace - self.elapsed)
        return here + later * pace

    def _memory(self) -> str:
        text = f"{psutil.Process().memory_info().rss / 2**30:.2f} GiB"
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            text += f" + {torch.cuda.memory_allocated() / 2**30:.2f} GiB on the GPU"
        return text


def clock(seconds: float) -> str:
    """12.3 s, 4:05 or 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

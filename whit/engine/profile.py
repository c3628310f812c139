"""PROFILE=1: every kernel and compilation as an event in Chrome's trace format (open it in Perfetto or
chrome://tracing)."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from whit.engine.counters import Work
from whit.helpers import PROFILE, environment, log, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

_events: list[dict[str, Any]] = []
_start = time.perf_counter()


def record(work: Work, seconds: float) -> None:
    """A kernel that has just ended."""
    _add(
        work.name,
        work.device,
        seconds,
        {
            "flops": work.flops,
            "bytes": work.nbytes,
            "GFLOP/s": work.flops / max(seconds, 1e-9) / 1e9,
            "GB/s": work.nbytes / max(seconds, 1e-9) / 1e9,
        },
    )


@contextlib.contextmanager
def span(name: str, track: str) -> Iterator[None]:
    """Time a block of the framework's own work."""
    if not PROFILE.value:
        yield
        return
    begin = time.perf_counter()
    try:
        yield
    finally:
        _add(name, track, time.perf_counter() - begin, {})


def _add(name: str, track: str, seconds: float, extra: dict[str, Any]) -> None:
    if not _events:
        atexit.register(_write_the_rest)
    end = time.perf_counter() - _start
    _events.append(
        {
            "name": name,
            "ph": "X",
            "pid": os.getpid(),
            "tid": track,
            "ts": (end - seconds) * 1e6,
            "dur": seconds * 1e6,
            "args": extra,
        }
    )


def _write_the_rest() -> None:
    if _events:
        write()


def write(path: str | None = None) -> Path:
    """Write the trace (default: $WHIT_TRACE or whit_trace.json in the working folder)."""
    import json
    from pathlib import Path

    target = Path(path or environment("WHIT_TRACE", "whit_trace.json"))
    write_atomic(target.absolute(), json.dumps({"traceEvents": _events, "displayTimeUnit": "ns"}).encode())
    log(1, f"profile: {len(_events)} events in {target}")
    _events.clear()
    return target


def events() -> list[dict[str, Any]]:
    """The events so far."""
    return _events

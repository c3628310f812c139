"""Counters of a server in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from whit.helpers import VERSION
from whit.llm.engine import Stats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """How many durations were at most so long."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        place = next((i for i, edge in enumerate(SECONDS) if seconds <= edge), len(SECONDS))
        self.counts[place] += 1
        self.total += seconds


class Metrics:
    """What a server counts by itself; the engine's counters are added when they are asked for."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.disconnects = 0
        self.in_flight = 0
        self.durations: dict[str, Histogram] = {}
        self.first_token = Histogram()

    def finished(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request. `path` is that of a route, so that there are few."""
        self.requests[path, status] += 1
        self.durations.setdefault(path, Histogram()).add(seconds)

    def text(self, stats: Stats) -> str:
        """All of it, for a scraper."""
        return "\n".join([*self._own(), *_engine(stats)]) + "\n"

    def _own(self) -> Iterator[str]:
        yield from _head("whit_build_info", "gauge", "The running version.")
        yield f'whit_build_info{{version="{VERSION}"}} 1'
        yield from _head("whit_http_requests_total", "counter", "Answered requests.")
        for (path, status), count in sorted(self.requests.items()):
            yield f'whit_http_requests_total{{path="{path}",status="{status}"}} {count}'
        yield from _one(
            "whit_http_disconnects_total", "counter", "Clients that left early.", self.disconnects
        )
        yield from _one("whit_http_requests_in_flight", "gauge", "Requests on their way.", self.in_flight)
        name = "whit_http_request_duration_seconds"
        yield from _head(name, "histogram", "Time from a request's first byte to its answer's last.")
        for path, histogram in sorted(self.durations.items()):
            yield from _histogram(name, histogram, f'path="{path}"')
        name = "whit_time_to_first_token_seconds"
        yield from _head(name, "histogram", "Time from a prompt's arrival to its first token.")
        yield from _histogram(name, self.first_token, "")


def _head(name: str, kind: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _one(name: str, kind: str, help: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, help)
    yield f"{name} {value}"


def _histogram(name: str, histogram: Histogram, labels: str) -> Iterator[str]:
    edges = [str(edge) for edge in SECONDS] + ["+Inf"]
    comma = "," if labels else ""
    for edge, count in zip(edges, accumulate(histogram.counts)):
        yield f'{name}_bucket{{{labels}{comma}le="{edge}"}} {count}'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_sum{braces} {histogram.total}"
    yield f"{name}_count{braces} {sum(histogram.counts)}"


_ENGINE = {  # field of Stats: (name, kind, help)
    "slots": ("slots", "gauge", "Sequences that the engine holds at once."),
    "busy": ("slots_busy", "gauge", "Sequences that are being written."),
    "waiting": ("requests_waiting", "gauge", "Requests that wait for a slot."),
    "requests": ("completions_total", "counter", "Finished completions."),
    "cancelled": ("completions_cancelled_total", "counter", "Cancelled completions."),
    "prompt_tokens": ("prompt_tokens_total", "counter", "Tokens of prompts that were read."),
    "cached_tokens": ("prompt_tokens_cached_total", "counter", "Tokens of prompts that were known already."),
    "generated_tokens": ("generated_tokens_total", "counter", "Tokens that were written."),
    "drafted_tokens": ("drafted_tokens_total", "counter", "Tokens that were guessed ahead."),
    "accepted_tokens": ("accepted_tokens_total", "counter", "Guessed tokens that were right."),
    "prefill_seconds": ("prefill_seconds_total", "counter", "Time spent on reading prompts."),
    "decode_seconds": ("decode_seconds_total", "counter", "Time spent on writing."),
    "cache_bytes": ("cache_bytes", "gauge", "Memory of keys and values."),
    "prefix_bytes": ("prefix_bytes", "gauge", "Memory of kept prefixes."),
}


def _engine(stats: Stats) -> Iterator[str]:
    for field, (name, kind, help) in _ENGINE.items():
        yield from _one(f"whit_{name}", kind, help, getattr(stats, field))

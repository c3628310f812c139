"""Schedules of large graphs, kept on disk beside the kernels: another process that builds an equal graph does
not decide again. An entry is named by the graph and by whit's own code; like a kernel's it is trusted, since
who may write into the folder may put machine code there.
"""

from __future__ import annotations

import pickle
from typing import Any

from whit.helpers import CACHE, DEBUG, SPEC, blake2b, cache_get, cache_put, sources_digest
from whit.uop import DType, Ops
from whit.uop.uop import stable_text

NODES = 200  # graphs of fewer nodes are scheduled in about the time that reading a file takes
_TABLE = "schedules"


def entry_of(rows: tuple[Any, ...]) -> str | None:
    """The name of a graph's entry (`rows`: the key of a `GraphKey`). None if it has none: it is small, or
    someone wants to see how it is scheduled, or it names things that are no text (functions)."""
    if len(rows) < NODES or SPEC or DEBUG.value >= 3 or not CACHE:
        return None
    texts = [sources_digest("uop", "schedule")]
    for op, *fields in rows:  # (dtype, sources, argument); of a bound variable its argument
        dtype = fields[0].name if isinstance(fields[0], DType) else ""
        argument = "" if fields[-1] is None else stable_text(fields[-1])
        if op is Ops.CALL or " at 0x" in argument:
            return None
        texts.append(f"{op.name} {dtype} {fields[1] if dtype else ''} {argument}")
    return blake2b("\n".join(texts).encode(), digest_size=20).hexdigest()


def read(name: str) -> Any:
    """What was stored under a name, or None."""
    body = cache_get(_TABLE, name)
    return None if body is None else pickle.loads(body)


def write(name: str, schedule: Any) -> None:
    """Store a schedule."""
    cache_put(_TABLE, name, pickle.dumps(schedule, pickle.HIGHEST_PROTOCOL))

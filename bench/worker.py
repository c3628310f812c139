"""Race the rows named on the command line in this process; one JSON object a row on standard output.

python -m bench.worker ROUNDS NAME...
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from bench.peers import difference
from bench.rows import ROWS, Row
from bench.timing import race
from whit.engine import probe

FLOP_TURNS = 400_000


def limits(work: Any) -> dict[str, Callable[[], float]]:
    """The probe's calls that race with the row, in seconds for the row's operations and for its traffic."""
    machine = probe.host()

    def operations() -> float:
        start = time.perf_counter()
        done = machine.multiply_adds(FLOP_TURNS)
        return (time.perf_counter() - start) * float(work.flops / (done * work.peak))

    return {"limit.flops": operations, "limit.bytes": machine.traffic(work.read, work.written)}


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Samples of every contender and the limits; the values are compared first."""
    modules = [importlib.import_module(f"bench.{name}") for name in ("kernels", "models", "algorithms")]
    build = next(getattr(module, row.work) for module in modules if hasattr(module, row.work))
    work = build(*row.arguments)
    names = list(work.contenders)
    if work.check is not None:
        error = work.check()
    else:
        mine = [work.contenders["whit"]() for _ in range(3)][-1]  # the value of a replay
        error = difference(mine, work.contenders[names[1]]())
    if not error <= work.tolerance:
        return {
            "name": row.name,
            "error": f"whit differs from {names[1]} by {error:.3g} of the greatest value",
        }
    failures = {}
    for name in names[2:]:  # the first two have run
        try:
            work.contenders[name]()
        except Exception as reason:  # a peer that cannot do it is left out
            failures[name] = f"{type(reason).__name__}: {reason}".splitlines()[0]
            del work.contenders[name]
    lanes = race(work.contenders | limits(work), rounds, row.patience)
    return {
        "name": row.name,
        "samples": {name: lane.samples for name, lane in lanes.items()},
        "best": {name: lane.best for name, lane in lanes.items()},
        "failures": failures,
        "difference": error,
        "flops": work.flops,
        "bytes": work.read + work.written,
    }


def main() -> None:
    """Results go to the real standard output; what the frameworks print goes to standard error."""
    rounds, names = int(sys.argv[1]), sys.argv[2:]
    rows = {row.name: row for row in ROWS}
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for name in names:
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    result = measure(rows[name], rounds or rows[name].rounds)
            except Exception as error:  # one row's failure is its result
                traceback.print_exc()
                result = {"name": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
            out.write(json.dumps(result) + "\n")
            out.flush()


if __name__ == "__main__":
    main()

"""BEAM=n: search for the opts of a kernel by measuring. Candidates are compiled and run in worker processes,
so that one that crashes or hangs costs a worker and nothing else.

A worker is a fresh interpreter (never a fork: this process may have threads), spoken to over a socket.
All workers compile; then one of them, alone on the machine, runs each candidate on real memory, compares its
outputs with those of the kernel without opts, and times it.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from whit.codegen.opts import AxisTable, Opt, OptError, parse_opts
from whit.helpers import ContextVar, DeviceError, cache_get, cache_put, cpu_threads, log
from whit.uop import Ops, UOp
from whit.uop.uop import variables_of

VERSION = 1  # of the entries in the disk cache
COMPILE_LIMIT = 20.0  # seconds for one candidate
REFERENCE_LIMIT = 120.0  # seconds for the kernel without opts: compile and run


@dataclass(frozen=True)
class Compiled:
    """A candidate as workers exchange it."""

    name: str
    tasks: int
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    binary: bytes


def search(ast: UOp, device: str, width: int) -> tuple[Opt, ...]:
    """The best opts found for a kernel on a device with a beam of `width`; remembered on disk."""
    from whit.codegen.lower import prepare
    from whit.codegen.search import search as beam_search
    from whit.runtime.device import Device

    target = Device.get(device).target
    key = f"{ast.key.hex()}-{target_digest(target.key, device)}-{width}-v{VERSION}"
    stored = cache_get("beam", key)
    if stored is not None:
        with contextlib.suppress(
            OptError, UnicodeDecodeError
        ):  # opts of an older whit may not be legal any more
            opts = parse_opts(stored.decode())
            table = AxisTable.of(prepare(ast), target)
            for opt in opts:
                table.apply(opt)
            return opts
    start = time.perf_counter()
    measure = Measure(ast, device)
    opts = beam_search(ast, target, width, measure)
    seconds = time.perf_counter() - start
    log(
        2,
        f"search: {measure.count} candidates in {seconds:.1f} s, {measure.failed} failed: {repr_opts(opts)}",
    )
    cache_put("beam", key, repr_opts(opts).encode())
    return opts


def target_digest(key: str, device: str) -> str:
    """A file name for a target and device."""
    import hashlib

    return hashlib.blake2b(f"{key}|{device}".encode(), digest_size=8).hexdigest()


class Measure:
    """Seconds of a kernel under lists of opts, for `whit.codegen.search`. Infinite for what fails in any
    way."""

    def __init__(self, ast: UOp, device: str, pool: Pool | None = None) -> None:
        self.ast, self.device = ast, device
        self.pool = pool or Pool.shared()
        self.known: dict[tuple[Opt, ...], Compiled | None] = {}
        self.best = math.inf
        self.count = self.failed = 0

    def __call__(self, candidates: Sequence[tuple[Opt, ...]], repeats: int) -> list[float]:
        new = [opts for opts in candidates if opts not in self.known]
        made = self.pool.map(
            [("compile", self.ast, self.device, repr_opts(opts)) for opts in new], COMPILE_LIMIT
        )
        self.known.update(zip(new, made))
        self.count += len(new)
        times = [self.time(self.known[opts], repeats) for opts in candidates]
        self.failed += sum(t == math.inf for t in times)
        return times

    def time(self, candidate: Compiled | None, repeats: int = 1) -> float:
        """Run one compiled candidate in a worker."""
        if candidate is None:
            return math.inf
        if not self.pool.runner_knows(self.ast, self.device):
            return math.inf
        limit = 2.0 + (100 * self.best if self.best < math.inf else 30.0)
        seconds = self.pool.ask_runner(("time", candidate, repeats, self.best), limit)
        if seconds is None:
            return math.inf
        self.best = min(self.best, seconds)
        return float(seconds)


def repr_opts(opts: Sequence[Opt]) -> str:
    """The text that `parse_opts` reads."""
    return ", ".join(map(repr, opts))


# ---- workers ---------------------------------------------------------------------------------------------


class Worker:
    """One process. Any failure to answer in time ends it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        code = f"import sys; sys.path[:] = {sys.path!r}; from whit.engine.beam import serve; serve({number})"
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(number,), stdin=null, stdout=null, stderr=null
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.prepared: tuple[UOp, str] | None = None  # kernel whose reference this worker holds
        settings = {name: var.value for name, var in ContextVar.registry.items()}
        self.send(("settings", settings | {"BEAM": 0, "DEBUG": 0, "PROFILE": 0, "VALIDATE": 0}))

    def close(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(OSError):
            self.connection.close()
        self.process.kill()
        self.process.wait()

    def send(self, request: tuple[Any, ...]) -> bool:
        """False when the worker is gone."""
        try:
            self.connection.send(request)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[bool, Any]:
        """(whether the worker lives, its answer; None for a failure)."""
        try:
            ok, answer = self.connection.recv()
        except (EOFError, OSError):
            return False, None
        if not ok:
            log(4, f"search: a candidate failed: {answer}")
        return True, answer if ok else None


class Pool:
    """As many workers as the CPU device has threads; started on first use, replaced when they die."""

    _shared: Pool | None = None

    def __init__(self, size: int | None = None) -> None:
        self.size = size or min(8, cpu_threads())
        self.owner = os.getpid()
        self.workers: list[Worker] = []
        self.refused: set[tuple[UOp, str]] = set()  # kernels that do not run even without opts

    @staticmethod
    def shared() -> Pool:
        """The pool of this process. After a fork the child starts its own."""
        pool = Pool._shared
        if pool is None or pool.owner != os.getpid():
            pool = Pool._shared = Pool()
            atexit.register(pool.close)
        return pool

    def close(self) -> None:
        """End all workers."""
        if self.owner == os.getpid():
            for worker in self.workers:
                worker.close()
        self.workers.clear()

    def worker(self, number: int) -> Worker:
        while len(self.workers) <= number:
            self.workers.append(Worker())
        return self.workers[number]

    def replace(self, number: int) -> None:
        """A new process in the place of one that died or hangs."""
        self.workers[number].close()
        self.workers[number] = Worker()

    def map(self, requests: Sequence[tuple[Any, ...]], limit: float) -> list[Any]:
        """An answer per request, None for those that failed, crashed or took longer than `limit` seconds."""
        answers: list[Any] = [None] * len(requests)
        waiting = list(range(len(requests)))[::-1]
        busy: dict[int, tuple[int, float]] = {}  # worker -> (request, deadline)
        while waiting or busy:
            for number in range(min(self.size, len(requests))):
                if waiting and number not in busy:
                    at = waiting.pop()
                    if not self.worker(number).send(requests[at]):
                        self.replace(number)
                        self.workers[number].send(requests[at])
                    busy[number] = at, time.monotonic() + limit
            connections: dict[Any, int] = {self.workers[n].connection: n for n in busy}
            pause = max(0.0, min(deadline for _, deadline in busy.values()) - time.monotonic())
            for connection in wait(list(connections), pause):
                number = connections[connection]
                at, _ = busy.pop(number)
                alive, answers[at] = self.workers[number].receive()
                if not alive:
                    self.replace(number)
            for number, (_, deadline) in list(busy.items()):
                if time.monotonic() > deadline:
                    busy.pop(number)
                    self.replace(number)
        return answers

    def ask_runner(self, request: tuple[Any, ...], limit: float) -> Any:
        """Ask the first worker alone."""
        if not self.worker(0).send(request):
            self.replace(0)
            return None
        alive = self.workers[0].connection.poll(limit)
        answer = None
        if alive:
            alive, answer = self.workers[0].receive()
        if not alive:
            self.replace(0)
        return answer

    def runner_knows(self, ast: UOp, device: str) -> bool:
        """Make sure that the first worker holds the buffers and the reference outputs of a kernel."""
        wanted = ast, device
        if wanted in self.refused:
            return False
        if self.worker(0).prepared != wanted:
            if self.ask_runner(("prepare", ast, device), REFERENCE_LIMIT) is None:
                self.refused.add(wanted)
                return False
            self.workers[0].prepared = wanted
        return True


# ---- inside of a worker ----------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """The loop of a worker process: requests from the socket until it closes."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(descriptor)
    state: list[Runner] = []
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        if request[0] == "settings":
            for name, value in request[1].items():
                if name in ContextVar.registry:
                    ContextVar.registry[name].value = value
            continue
        try:
            answer = True, _answer(request, state)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)


def _answer(request: tuple[Any, ...], state: list[Runner]) -> Any:
    if request[0] == "compile":
        return compile_candidate(request[1], request[2], parse_opts(request[3]))
    if request[0] == "prepare":
        state[:] = [Runner(request[1], request[2])]
        return True
    return state[0].time(request[1], request[2], request[3])


def compile_candidate(ast: UOp, device: str, opts: Sequence[Opt] | None) -> Compiled:
    """Codegen and compiler for one candidate; opts None are those of the heuristics."""
    from whit.codegen.pipeline import generate
    from whit.runtime.device import Device

    runtime = Device.get(device)
    made = generate(ast, runtime.target, opts)
    binary = runtime.compile(runtime.render(made.linear, made.name), made.name)
    return Compiled(made.name, made.tasks, made.global_size, made.local_size, binary)


class Runner:
    """Buffers and reference outputs of one kernel."""

    def __init__(self, ast: UOp, device: str) -> None:
        from whit.runtime.device import Buffer, Device

        self.runtime = Device.get(device)
        nodes = ast.toposort()
        params = {u.arg.slot: u for u in nodes if u.op is Ops.PARAM}
        written = {u.src[0].arg.slot for u in nodes if u.op is Ops.STORE}
        self.data = {slot: _random(u, slot) for slot, u in params.items()}
        self.outputs = {slot: params[slot] for slot in sorted(written)}
        count = max(params, default=-1) + 1
        self.buffers = [Buffer(device, len(self.data[n]) if n in self.data else 64) for n in range(count)]
        self.values = [int(v.arg.max) for v in variables_of(nodes)]
        for slot, data in self.data.items():
            self.buffers[slot].copyin(memoryview(data))
        self.reference = self.run(compile_candidate(ast, device, ()))

    def load(self, candidate: Compiled) -> Any:
        from whit.runtime.device import Launch

        launch = Launch(candidate.tasks, candidate.global_size, candidate.local_size)
        return self.runtime.load(candidate.binary, candidate.name, launch)

    def run(self, candidate: Compiled) -> dict[int, bytearray]:
        """The outputs of one run from the initial contents."""
        program = self.load(candidate)
        for slot in self.outputs:
            self.buffers[slot].copyin(memoryview(self.data[slot]))
        program([b.handle for b in self.buffers], self.values, wait=True)
        return {slot: self.buffers[slot].copyout() for slot in self.outputs}

    def time(self, candidate: Compiled, repeats: int, best: float) -> float:
        """The least seconds of a few runs. DeviceError if the outputs are not those of the reference."""
        found = self.run(candidate)
        for slot, param in self.outputs.items():
            if not _close(found[slot], self.reference[slot], param):
                raise DeviceError(
                    f"candidate {candidate.name}",
                    fix="report it: an opt or a lowering is wrong",
                    because=f"output {slot} differs from that of the kernel without opts",
                )
        program, handles = self.load(candidate), [b.handle for b in self.buffers]
        least, start, runs = math.inf, time.perf_counter(), 0
        while runs < 3 * repeats or (time.perf_counter() - start < 0.01 * repeats and runs < 200 * repeats):
            least = min(least, program(handles, self.values, wait=True))
            runs += 1
            if least > 3 * best and repeats == 1:
                break
        return least


def _random(param: UOp, seed: int) -> bytearray:
    """Initial contents: floats around 0, small integers, both kinds of bool."""
    import numpy as np

    rng = np.random.default_rng(seed)
    dtype, size = param.dtype, param.arg.size
    if dtype.is_float:
        values = rng.random(size, dtype=np.float32) - np.float32(0.5)
        return bytearray(_as_dtype(values, dtype.name).tobytes())
    high = 2 if dtype.is_bool else 8
    return bytearray(rng.integers(0, high, size).astype(np.dtype(f"{dtype.kind}{dtype.itemsize}")).tobytes())


def _as_dtype(values: Any, name: str) -> Any:
    import numpy as np

    if name in ("float16", "float32", "float64"):
        return values.astype(name)
    import ml_dtypes

    types = {
        "bfloat16": ml_dtypes.bfloat16,
        "fp8e4m3": ml_dtypes.float8_e4m3fn,
        "fp8e5m2": ml_dtypes.float8_e5m2,
    }
    return values.astype(np.dtype(types[name]))


def _close(found: bytearray, wanted: bytearray, param: UOp) -> bool:
    """Equal, or for floats equal up to the order of additions."""
    import numpy as np

    if found == wanted:
        return True
    if not param.dtype.is_float:
        return False
    if param.dtype.name in ("float16", "float32", "float64"):
        kind: Any = np.dtype(param.dtype.name)
    else:
        kind = _as_dtype(np.zeros(1, np.float32), param.dtype.name).dtype
    a, b = (np.frombuffer(data, kind).astype(np.float64) for data in (found, wanted))
    tolerance = 1e-3 if param.dtype.itemsize >= 4 else 2e-2 if param.dtype.itemsize == 2 else 0.3
    finite = b[np.isfinite(b)]
    scale = float(np.abs(finite).max()) if finite.size else 1.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale * 0.1, equal_nan=True))

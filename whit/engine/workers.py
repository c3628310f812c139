"""Worker processes of the search, so that a candidate that crashes or hangs costs a worker and nothing else.

A worker is a fresh interpreter (never a fork: this process may have threads), spoken to over a socket. It
ends by itself when this process ends in any way, killed ones included. All workers compile; then one of them,
alone on the machine, runs candidates.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from whit.codegen.opts import parse_opts
from whit.engine.trial import Runner, compile_candidate, verify
from whit.helpers import ContextVar, cpu_threads, log
from whit.uop import UOp

ORPHAN_LIMIT = 0.25  # seconds between two looks at whether the parent lives

# ---- the side of this process ------------------------------------------------------------------------------


class Worker:
    """One process. Any failure to answer in time ends it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        number, parent = theirs.fileno(), os.getpid()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from whit.engine.workers import serve; "
            f"serve({number}, {parent})"
        )
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(number,), stdin=null, stdout=null, stderr=null
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.prepared: tuple[UOp, str] | None = None  # kernel whose reference this worker holds
        settings = {name: var.value for name, var in ContextVar.registry.items()}
        self.send(("settings", settings | {"BEAM": 0, "DEBUG": 0, "PROFILE": 0, "VALIDATE": 0, "TUNED": ""}))

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
    """As many workers as the CPU device has threads; started on first use, replaced when they die. `lock` is
    held by the one search that uses them."""

    _shared: Pool | None = None

    def __init__(self, size: int | None = None) -> None:
        self.size = size or min(8, cpu_threads())
        self.owner = os.getpid()
        self.workers: list[Worker] = []
        self.refused: set[tuple[UOp, str]] = set()  # kernels that do not run even without opts
        self.lock = threading.RLock()

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

    def map(self, requests: Sequence[tuple[Any, ...]], limit: float, total: float = math.inf) -> list[Any]:
        """An answer per request, None for those that failed, crashed, took longer than `limit` seconds, or
        had none `total` seconds from now."""
        try:
            return self._map(requests, limit, time.monotonic() + total)
        except BaseException:  # Ctrl-C: answers are on their way that nobody waits for any more
            self.close()
            raise

    def _map(self, requests: Sequence[tuple[Any, ...]], limit: float, end: float) -> list[Any]:
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
                    busy[number] = at, min(end, time.monotonic() + limit)
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
            if time.monotonic() > end:
                waiting.clear()
        return answers

    def ask_runner(self, request: tuple[Any, ...], limit: float) -> Any:
        """Ask the first worker alone."""
        if not self.worker(0).send(request):
            self.replace(0)
            return None
        try:
            alive = self.workers[0].connection.poll(limit)
            answer = None
            if alive:
                alive, answer = self.workers[0].receive()
        except BaseException:
            self.close()
            raise
        if not alive:
            self.replace(0)
        return answer

    def runner_knows(self, ast: UOp, device: str, limit: float) -> bool:
        """Make sure that the first worker holds the buffers and the reference outputs of a kernel."""
        wanted = ast, device
        if wanted in self.refused:
            return False
        if self.worker(0).prepared != wanted:
            if self.ask_runner(("prepare", ast, device), limit) is None:
                self.refused.add(wanted)
                return False
            self.workers[0].prepared = wanted
        return True

    def forget(self) -> None:
        """Let the first worker free the memory of its kernel."""
        if self.workers and self.workers[0].prepared is not None:
            self.workers[0].prepared = None
            self.workers[0].send(("forget",))


# ---- inside of a worker ------------------------------------------------------------------------------------


def serve(descriptor: int, parent: int) -> None:
    """The loop of a worker process: requests from the socket until it closes or the parent is gone."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    state: list[Runner] = []
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # nothing to tidy up, and no trace to write
        if request[0] == "settings":
            for name, value in request[1].items():
                if name in ContextVar.registry:
                    ContextVar.registry[name].value = value
        elif request[0] == "forget":
            state.clear()
        else:
            try:
                answer = True, _answer(request, state)
            except Exception as error:
                answer = False, f"{type(error).__name__}: {error}"
            connection.send(answer)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even while a candidate hangs."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_LIMIT)
    os._exit(1)


def _answer(request: tuple[Any, ...], state: list[Runner]) -> Any:
    kind, *rest = request
    if kind == "compile":
        ast, device, opts = rest
        return compile_candidate(ast, device, parse_opts(opts))
    if kind == "prepare":
        state.clear()
        state.append(Runner(*rest))
        return True
    if kind == "verify":
        return verify(*rest)
    if kind == "race":
        return state[0].race(*rest)
    return state[0].time(*rest)

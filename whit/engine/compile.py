"""From a kernel's IR to a loaded program, through the in-process and the disk cache. A hit on disk runs
neither codegen nor a compiler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from whit.engine.counters import Work
from whit.engine.profile import span
from whit.helpers import (
    BEAM,
    DEBUG,
    NOOPT,
    TUNED,
    blake2b,
    cache_get,
    cache_put,
    cpu_threads,
    log,
    sources_digest,
)
from whit.runtime.device import Device, Launch, Program
from whit.uop import Ops, UOp
from whit.uop.rewrite import timed

if TYPE_CHECKING:
    from whit.codegen import Generated
    from whit.codegen.opts import Opt


class Kernel(NamedTuple):
    """A kernel that can run: the program and what it does."""

    ast: UOp
    device: str
    program: Program
    work: Work


# of a cache entry: flops, bytes, tasks, global and local sizes, length of the name; name and binary follow
HEADER = Struct("<2Q7QI")

_kernels: dict[tuple[UOp, str, int, int, str], Kernel] = {}
compile_seconds: list[float] = [0.0]


def compiled(ast: UOp, device: str) -> Kernel:
    """The kernel of a SINK on a device."""
    found = _kernels.get((ast, device, *settings()))
    if found is None:
        prepare([(ast, device)])
        found = _kernels[ast, device, *settings()]
    return found


def settings() -> tuple[int, int, str]:
    """What decides which opts a kernel gets."""
    return BEAM.value, NOOPT.value, TUNED.value


def prepare(wanted: Sequence[tuple[UOp, str]]) -> None:
    """Have the kernels of these (SINK, device) ready. Compilers do not hold Python's lock: several run at
    once, and codegen goes on with the next kernel meanwhile."""
    start = time.perf_counter()
    present = settings()
    missing = [w for w in dict.fromkeys(wanted) if (*w, *present) not in _kernels]
    entries: list[tuple[UOp, Device, str, bytes | Callable[[], bytes]]] = []
    todo: list[tuple[UOp, Device, Sequence[Opt] | None]] = []
    for ast, name in missing:
        device = Device.get(name)
        cached = None if DEBUG.value >= 4 else cache_get("kernels", cache_key(ast, device))
        if cached is not None:
            entries.append((ast, device, "", cached))
        else:  # a search measures: it runs before anything compiles in the background
            todo.append((ast, device, _chosen(ast, device)))
    with contextlib.ExitStack() as stack:
        submit: Callable[..., Any] | None = None
        for ast, device, opts in todo:
            made, source = _generate(ast, device, opts)
            key = cache_key(ast, device)
            if len(missing) == 1 or DEBUG.value >= 4:
                entries.append((ast, device, key, _finish(made, source, device)))
                continue
            if submit is None:
                from concurrent.futures import ThreadPoolExecutor

                submit = stack.enter_context(ThreadPoolExecutor(cpu_threads())).submit
            entries.append((ast, device, key, submit(_finish, made, source, device).result))
        for ast, device, key, entry in entries:
            body = entry if isinstance(entry, bytes) else entry()
            if key:
                cache_put("kernels", key, body)
            _kernels[ast, device.name, *present] = _load(ast, device, body)
    compile_seconds[0] += time.perf_counter() - start


def _chosen(ast: UOp, device: Device) -> Sequence[Opt] | None:
    """The opts that TUNED or BEAM ask for; None for those of the heuristics."""
    if not (BEAM or TUNED.value) or ast.op is Ops.LINEAR:  # a program written by hand has no opts
        return None
    from whit.engine.beam import chosen

    return chosen(ast, device.name)


def clear() -> None:
    """Forget the kernels of this process (the disk cache stays)."""
    _kernels.clear()


def cache_key(ast: UOp, device: Device) -> str:
    """Name of a kernel's entry in the disk cache: the IR, the machine, the settings and whit's own code."""
    code = sources_digest("uop", "codegen", "renderer", "runtime")
    text = f"{HEADER.format}|{device.target.key}|{device.name}|{BEAM.value}|{NOOPT.value}|{code}"
    if (BEAM or TUNED.value) and ast.op is not Ops.LINEAR:
        from whit.engine.beam import known

        text += f"|{known(ast, device.target.key)}"
    return blake2b(ast.key + text.encode(), digest_size=20).hexdigest()


def _load(ast: UOp, device: Device, entry: bytes) -> Kernel:
    """A cache entry as a kernel that can run."""
    flops, nbytes, tasks, *sizes, length = HEADER.unpack_from(entry)
    name = entry[HEADER.size : HEADER.size + length].decode()
    launch = Launch(tasks, tuple(sizes[:3]), tuple(sizes[3:]))
    with timed("load code"):
        program = device.load(entry[HEADER.size + length :], name, launch)
    return Kernel(ast, device.name, program, Work(name, device.name, flops, nbytes))


def _generate(ast: UOp, device: Device, opts: Sequence[Opt] | None) -> tuple[Generated, str]:
    """The linear program of a kernel and its source."""
    from whit.codegen import generate

    with span("codegen", "compiler"):
        made = generate(ast, device.target, opts)
    log(3, f"opts: {made.name}: {', '.join(map(str, made.opts)) or 'none'}")
    with timed("render", made.linear):
        source = device.render(made.linear, made.name)
    if DEBUG.value >= 6:
        from whit.uop.text import show

        log(6, show(made.linear))
    log(4, source)
    return made, source


def _finish(made: Generated, source: str, device: Device) -> bytes:
    """Compile: the bytes of a cache entry."""
    with span(made.name, "compiler"), timed(f"compile ({device.name})"):
        binary = device.compile(source, made.name)
    if DEBUG.value >= 7:
        log(7, device.disassemble(binary))
    name = made.name.encode()
    sizes = (made.tasks, *made.global_size, *made.local_size)
    return HEADER.pack(_at_most(made.flops), _at_most(made.bytes), *sizes, len(name)) + name + binary


def _at_most(size: Any) -> int:
    """A size as a number: symbolic ones at their greatest."""
    return int(size.vmax) if isinstance(size, UOp) else int(size)

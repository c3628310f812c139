"""What this machine can do at most: fused multiply-adds, and bytes read, written, copied and combined, a
second. The loops are written as LLVM IR and compiled by llvmlite, for a machine need not have a compiler.

    python -m whit.engine.probe [--json]
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

ROW = 8  # vectors of 64 bytes that one turn of a memory loop takes
AHEAD = 4096  # bytes: how far ahead memory is fetched
ACCUMULATORS = 12  # more than latency times units of any CPU's multiply-add, fewer than its registers


# ---- the loops as text -------------------------------------------------------------------------------------


def loop(name: str, start: str, phis: str, body: str, end: str) -> str:
    """A function (a, b, c, n, again): the body for i = 0 … n-1, all of it `again` times."""
    return f"""
define void @{name}(ptr %a, ptr %b, ptr %c, i64 %n, i64 %again) {{
entry:
  {start}
  br label %outer
outer:
  %r = phi i64 [ 0, %entry ], [ %rr, %close ]
  br label %inner
inner:
  %i = phi i64 [ 0, %outer ], [ %ii, %inner ]
  {phis}
  {body}
  %ii = add i64 %i, 1
  %more = icmp slt i64 %ii, %n
  br i1 %more, label %inner, label %close
close:
  {end}
  %rr = add i64 %r, 1
  %still = icmp slt i64 %rr, %again
  br i1 %still, label %outer, label %done
done:
  fence seq_cst
  ret void
}}
"""


def multiply_adds(lanes: int) -> str:
    """Independent chains of fused multiply-adds in registers."""
    vector = f"<{lanes} x float>"
    start = f"%x = load {vector}, ptr %b, align 64\n  %y = load {vector}, ptr %c, align 64"
    chain = range(ACCUMULATORS)
    phis = "\n  ".join(f"%p{k} = phi {vector} [ %x, %outer ], [ %q{k}, %inner ]" for k in chain)
    call = f"call {vector} @llvm.fma.v{lanes}f32"
    body = "\n  ".join(f"%q{k} = {call}({vector} %p{k}, {vector} %x, {vector} %y)" for k in chain)
    sums = [f"%s0 = fadd {vector} %q0, %q0"]
    sums += [f"%s{k} = fadd {vector} %s{k - 1}, %q{k}" for k in chain if k]
    sums.append(f"store {vector} %s{ACCUMULATORS - 1}, ptr %a, align 64")
    declared = f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})\n"
    return declared + loop("fma", start, phis, body, "\n  ".join(sums))


def memory_loop(name: str, reads: str, writes: bool, streamed: bool, lanes: int, ahead: bool) -> str:
    """Read one row of each array in `reads` and, if `writes`, write one to a; `streamed`: past the caches;
    `ahead`: what is read is fetched some way before."""
    vector, bytes_ = f"<{lanes} x float>", lanes * 4
    per_row = ROW * 64 // bytes_
    lines = [f"%base = mul i64 %i, {ROW * 64}"]
    phis, end = "", ""
    for k in range(per_row):
        value = "%filler"
        lines.append(f"%o{k} = add i64 %base, {k * bytes_}")
        for array in reads:
            lines.append(f"%{array}p{k} = getelementptr i8, ptr %{array}, i64 %o{k}")
            if ahead and k * bytes_ % 64 == 0:
                lines.append(f"%{array}f{k} = getelementptr i8, ptr %{array}p{k}, i64 {AHEAD}")
                lines.append(f"call void @llvm.prefetch.p0(ptr %{array}f{k}, i32 0, i32 3, i32 1)")
            lines.append(f"%{array}v{k} = load {vector}, ptr %{array}p{k}, align {bytes_}")
            value = f"%{array}v{k}"
        if len(reads) == 2:
            lines.append(f"%t{k} = fadd {vector} %{reads[0]}v{k}, %{reads[1]}v{k}")
            value = f"%t{k}"
        if writes:
            hint = ", !nontemporal !0" if streamed else ""
            lines.append(f"%ap{k} = getelementptr i8, ptr %a, i64 %o{k}")
            lines.append(f"store {vector} {value}, ptr %ap{k}, align {bytes_}{hint}")
        else:
            phis += f"%p{k} = phi {vector} [ zeroinitializer, %outer ], [ %q{k}, %inner ]\n  "
            lines.append(f"%q{k} = fadd {vector} %p{k}, {value}")
            end += (
                f"%e{k} = getelementptr i8, ptr %c, i64 {k * bytes_}\n  store {vector} %q{k}, ptr %e{k}\n  "
            )
    start = f"%filler = load {vector}, ptr %c, align 64" if not reads else ""
    return loop(name, start, phis, "\n  ".join(lines), end)


# name: (arrays read, writes, past the caches)
MEMORY = {
    "read": ("b", False, False),
    "read ahead": ("b", False, False),
    "fill": ("", True, False),
    "fill streamed": ("", True, True),
    "copy": ("b", True, False),
    "copy streamed": ("b", True, True),
    "copy streamed ahead": ("b", True, True),
    "triad": ("bc", True, False),
    "triad streamed": ("bc", True, True),
}


def symbol(kernel: str) -> str:
    return kernel.replace(" ", "_")


def lanes_of_host(features: dict[str, bool]) -> int:
    """Floats in the widest register."""
    return 16 if features.get("avx512f") else 8 if features.get("avx") else 4


# ---- running them ------------------------------------------------------------------------------------------


def aligned(size: int) -> Any:
    """`size` bytes of ones (as float32), aligned to a page, in memory that has been touched."""
    raw = np.empty(size + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    array = raw[start : start + size]
    array.view(np.float32)[:] = 1.0
    return array


class Probe:
    """The compiled loops, run by `threads` threads, each on its own share."""

    def __init__(self, threads: int) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = dict(llvm.get_host_cpu_features())
        self.lanes = lanes_of_host(features)
        self.integer_dots = bool(features.get("avx512vnni") or features.get("avxvnni"))
        text = multiply_adds(self.lanes) + "!0 = !{i32 1}\n"
        text += "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"
        for name, (reads, writes, streamed) in MEMORY.items():
            text += memory_loop(symbol(name), reads, writes, streamed, self.lanes, name.endswith("ahead"))
        module = llvm.parse_assembly(text)
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
        )
        self.engine = llvm.create_mcjit_compiler(module, machine)
        self.engine.finalize_object()
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)
        self.functions = {
            name: signature(self.engine.get_function_address(symbol(name))) for name in ("fma", *MEMORY)
        }
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        self.buffers: dict[tuple[str, int], Any] = {}

    def buffer(self, name: str, size: int) -> int:
        """The address of array a, b or c with `size` bytes."""
        key = name, max(size, 4096 * self.threads)
        if key not in self.buffers:
            self.buffers[key] = aligned(key[1])
        return int(self.buffers[key].ctypes.data)

    def everywhere(self, jobs: list[tuple[Any, ...]]) -> None:
        """Run each (function, *arguments) on a thread of its own and wait for all."""
        if len(jobs) == 1:
            jobs[0][0](*jobs[0][1:])
        else:
            list(self.pool.map(lambda job: job[0](*job[1:]), jobs))

    def multiply_adds(self, turns: int, threads: int = 0) -> float:
        """Run `turns` of the register loop on each thread; the floating-point operations done."""
        threads = threads or self.threads
        arrays = [self.buffer(name, 4096 * self.threads) for name in "abc"]
        jobs = [(self.functions["fma"], *[a + 4096 * t for a in arrays], turns, 1) for t in range(threads)]
        self.everywhere(jobs)
        return 2.0 * self.lanes * ACCUMULATORS * turns * threads

    def memory(self, kernel: str, size: int, again: int = 1, threads: int = 0) -> None:
        """Run a memory loop over arrays of `size` bytes (each) `again` times."""
        threads = threads or self.threads
        rows = max(1, size // (ROW * 64) // threads)
        span = rows * ROW * 64
        reads = MEMORY[kernel][0]
        needs = {"a": MEMORY[kernel][1], "b": "b" in reads, "c": "c" in reads}
        bases = {name: self.buffer(name, span * threads if needs[name] else 0) for name in "abc"}
        jobs = []
        for t in range(threads):
            offsets = {name: span * t if needs[name] else 4096 * t for name in "abc"}
            jobs.append((self.functions[kernel], *[bases[n] + offsets[n] for n in "abc"], rows, again))
        self.everywhere(jobs)

    def traffic(self, read: int, written: int) -> Callable[[], float]:
        """A call that moves this many bytes between caches or memory and registers as fast as the machine can
        (with or without streamed stores and fetching ahead, whichever is faster here); it gives the seconds
        for one such pass of the several that it made, so that starting the threads hardly counts."""
        both, rest = min(read, written), abs(read - written)
        parts = [("copy", both)] if both else []
        if rest:
            parts.append(("read" if read > written else "fill", rest))
        chosen = []
        for kernel, size in parts:
            variants = [name for name in MEMORY if name.split()[0] == kernel]
            chosen.append((min(variants, key=lambda name: self.best(name, size)), size))

        passes = max(1, round(12e-3 / max(1e-6, sum(self.best(*part) for part in chosen))))

        def call() -> float:
            start = time.perf_counter()
            for kernel, size in chosen:
                self.memory(kernel, size, passes)
            return (time.perf_counter() - start) / passes

        return call

    def best(self, kernel: str, size: int) -> float:
        """Least seconds of a pass in a few tries."""
        again = max(1, (4 << 20) // max(size, 1))
        return min(self._timed(kernel, size, again) for _ in range(4))

    def _timed(self, kernel: str, size: int, again: int) -> float:
        start = time.perf_counter()
        self.memory(kernel, size, again)
        return (time.perf_counter() - start) / again


@dataclass(frozen=True)
class Machine:
    """Limits in units a second: floating-point operations by one and by all threads, bytes by all."""

    threads: int
    flops_one: float
    flops: float
    read: float
    copy: float
    triad: float
    triad_streamed: float
    fill_streamed: float


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(probe: Probe, size: int = 128 << 20, tries: int = 7) -> Machine:
    """Every limit, by the median of some tries over arrays too large for the caches."""

    def flops(threads: int) -> float:
        rates = []
        for _ in range(tries):
            start = time.perf_counter()
            done = probe.multiply_adds(2_000_000, threads)
            rates.append(done / (time.perf_counter() - start))
        return median(rates)

    def bytes_(kernel: str) -> float:
        reads, writes, _ = MEMORY[kernel]
        moved = (len(reads) + writes) * size
        probe.memory(kernel, size)
        return moved / median([probe._timed(kernel, size, 1) for _ in range(tries)])

    return Machine(
        probe.threads,
        flops(1),
        flops(probe.threads),
        max(bytes_("read"), bytes_("read ahead")),
        max(bytes_("copy"), bytes_("copy streamed"), bytes_("copy streamed ahead")),
        bytes_("triad"),
        bytes_("triad streamed"),
        bytes_("fill streamed"),
    )


@lru_cache(1)
def host() -> Probe:
    """This machine's probe, one thread for each core this process may use."""
    return Probe(len(os.sched_getaffinity(0)))


def describe(machine: Machine) -> str:
    """One line for people."""
    giga = {k: v / 1e9 for k, v in vars(machine).items() if k != "threads"}
    return (
        f"limits: multiply-add {giga['flops_one']:.0f} GFLOP/s on one thread, {giga['flops']:.0f} on "
        f"{machine.threads}; read {giga['read']:.1f} GB/s, copy {giga['copy']:.1f}, "
        f"triad {giga['triad']:.1f}, streamed {giga['triad_streamed']:.1f}, "
        f"streamed write {giga['fill_streamed']:.1f}"
    )


if __name__ == "__main__":
    found = measure(host())
    print(json.dumps(vars(found)) if "--json" in sys.argv else describe(found))

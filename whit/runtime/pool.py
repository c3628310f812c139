"""A persistent pool of native worker threads, and the native loop that replays a plan.

Both are a few functions of LLVM IR, compiled once and cached on disk as kernels are; no Python runs while
they work. A job is (kernel, buffers, variables, tasks). Workers and the calling thread claim task numbers
from one atomic counter that counts down, so a claim can only ever hit the present job: the caller stays in it
until every claimed task is finished. Idle workers spin for a moment, then sleep in a futex.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from whit.helpers import DeviceError, cpu_threads
from whit.runtime import elf, native
from whit.runtime.device import Plan, PlanCall

# The shared state, one page: at 0 how many tasks of the job are unclaimed (0 or less: none), then these
# offsets in bytes. Fields that different threads write are on cache lines of their own.
_FINISHED, _JOB, _SIGNAL, _SLEEPERS, _STOP, _SYSCALL, _BUSY = 64, 128, 192, 256, 320, 328, 384
_SPINS = 1000  # turns of a worker before it sleeps, some 50 µs

_STACK = 8 << 20  # kernels keep their scratch memory on the stack

# futex and sched_yield by machine
_SYSTEM_CALLS = {"x86_64": (202, 24), "aarch64": (98, 124)}
_PAUSE = {"x86_64": "llvm.x86.sse2.pause()", "aarch64": "llvm.aarch64.hint(i32 1)"}

_SOURCE = """
define internal i64 @claim(ptr %s) #0 {
  ; run tasks of the present job until none is left; how many were run
  %job = getelementptr i8, ptr %s, i64 JOB
  %job.buffers = getelementptr i8, ptr %job, i64 8
  %job.variables = getelementptr i8, ptr %job, i64 16
  br label %next
next:
  %count = phi i64 [ 0, %0 ], [ %more, %task ]
  %old = atomicrmw sub ptr %s, i64 1 acq_rel
  %number = sub i64 %old, 1
  %got = icmp sge i64 %number, 0
  br i1 %got, label %task, label %none
task:
  %f = load ptr, ptr %job
  %b = load ptr, ptr %job.buffers
  %v = load ptr, ptr %job.variables
  call void %f(ptr %b, ptr %v, i64 %number)
  %more = add i64 %count, 1
  br label %next
none:
  ret i64 %count
}

define ptr @worker(ptr %s) #0 {
entry:
  %finished = getelementptr i8, ptr %s, i64 FINISHED
  %signal = getelementptr i8, ptr %s, i64 SIGNAL
  %sleepers = getelementptr i8, ptr %s, i64 SLEEPERS
  %stop = getelementptr i8, ptr %s, i64 STOP
  %syscall.at = getelementptr i8, ptr %s, i64 SYSCALL
  %syscall = load ptr, ptr %syscall.at
  br label %idle
idle:
  %turn = phi i64 [ 0, %entry ], [ 0, %work ], [ 0, %reported ], [ 0, %woken ], [ %turns, %again ]
  %open = load atomic i64, ptr %s monotonic, align 8
  %any = icmp sgt i64 %open, 0
  br i1 %any, label %work, label %spin
spin:
  %turns = add i64 %turn, 1
  %tired = icmp sgt i64 %turns, SPINS
  br i1 %tired, label %doze, label %again
again:
  PAUSE
  br label %idle
work:
  %done = call i64 @claim(ptr %s)
  %some = icmp sgt i64 %done, 0
  br i1 %some, label %reported, label %idle
reported:
  %r = atomicrmw add ptr %finished, i64 %done acq_rel
  br label %idle
doze:
  %seen = load atomic i32, ptr %signal acquire, align 4
  %in = atomicrmw add ptr %sleepers, i64 1 seq_cst
  %stopped = load atomic i64, ptr %stop seq_cst, align 8
  %end = icmp ne i64 %stopped, 0
  br i1 %end, label %exit, label %check
check:
  %late = load atomic i64, ptr %s seq_cst, align 8
  %job = icmp sgt i64 %late, 0
  br i1 %job, label %woken, label %sleep
sleep:
  %expected = zext i32 %seen to i64
  %w = call i64 (i64, ...) %syscall(i64 FUTEX, ptr %signal, i64 128, i64 %expected, ptr null)
  br label %woken
woken:
  %out = atomicrmw sub ptr %sleepers, i64 1 seq_cst
  br label %idle
exit:
  ret ptr null
}

define void @run(ptr %s, ptr %f, ptr %b, ptr %v, i64 %tasks) #0 {
entry:
  %busy = getelementptr i8, ptr %s, i64 BUSY
  %pair = cmpxchg ptr %busy, i64 0, i64 1 acquire monotonic
  %mine = extractvalue { i64, i1 } %pair, 1
  br i1 %mine, label %start, label %alone
alone:
  ; another thread uses the pool: do it here
  %i = phi i64 [ 0, %entry ], [ %i.next, %alone ]
  call void %f(ptr %b, ptr %v, i64 %i)
  %i.next = add i64 %i, 1
  %i.done = icmp sge i64 %i.next, %tasks
  br i1 %i.done, label %end, label %alone
start:
  %job = getelementptr i8, ptr %s, i64 JOB
  %job.buffers = getelementptr i8, ptr %job, i64 8
  %job.variables = getelementptr i8, ptr %job, i64 16
  store ptr %f, ptr %job
  store ptr %b, ptr %job.buffers
  store ptr %v, ptr %job.variables
  %finished = getelementptr i8, ptr %s, i64 FINISHED
  store atomic i64 0, ptr %finished release, align 8
  %x = atomicrmw xchg ptr %s, i64 %tasks seq_cst
  %sleepers = getelementptr i8, ptr %s, i64 SLEEPERS
  %asleep = load atomic i64, ptr %sleepers seq_cst, align 8
  %wake = icmp sgt i64 %asleep, 0
  br i1 %wake, label %call, label %work
call:
  call void @wake(ptr %s)
  br label %work
work:
  %own = call i64 @claim(ptr %s)
  %others = sub i64 %tasks, %own
  br label %wait
wait:
  %turn = phi i64 [ 0, %work ], [ %turns, %pause ]
  %done = load atomic i64, ptr %finished acquire, align 8
  %all = icmp eq i64 %done, %others
  br i1 %all, label %free, label %turn.on
turn.on:
  %turns = add i64 %turn, 1
  %low = and i64 %turns, 1023
  %long = icmp eq i64 %low, 0
  br i1 %long, label %yield, label %pause
yield:
  %syscall.at = getelementptr i8, ptr %s, i64 SYSCALL
  %syscall = load ptr, ptr %syscall.at
  %y = call i64 (i64, ...) %syscall(i64 YIELD)
  br label %pause
pause:
  PAUSE
  br label %wait
free:
  store atomic i64 0, ptr %busy release, align 8
  br label %end
end:
  ret void
}

define void @wake(ptr %s) #0 {
  %signal = getelementptr i8, ptr %s, i64 SIGNAL
  %bump = atomicrmw add ptr %signal, i32 1 seq_cst
  %syscall.at = getelementptr i8, ptr %s, i64 SYSCALL
  %syscall = load ptr, ptr %syscall.at
  %w = call i64 (i64, ...) %syscall(i64 FUTEX, ptr %signal, i64 129, i64 2147483647)
  ret void
}

define internal void @fill(ptr %table, ptr %slots, ptr %from, i64 %count) #0 {
entry:
  ; table[i] = from[slots[i]]
  %none = icmp eq i64 %count, 0
  br i1 %none, label %end, label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %slot.at = getelementptr i64, ptr %slots, i64 %i
  %slot = load i64, ptr %slot.at
  %value.at = getelementptr i64, ptr %from, i64 %slot
  %value = load i64, ptr %value.at
  %place = getelementptr i64, ptr %table, i64 %i
  store i64 %value, ptr %place
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %loop
end:
  ret void
}

define void @replay(ptr %s, ptr %plan, ptr %handles, ptr %values) #0 {
entry:
  ; plan: calls, number of calls, then (table, slots, length) of pointers and of variables
  ; a call: kernel, buffers, variables, tasks
  %calls = load ptr, ptr %plan
  %number.at = getelementptr i64, ptr %plan, i64 1
  %number = load i64, ptr %number.at
  %pt.at = getelementptr i64, ptr %plan, i64 2
  %pt = load ptr, ptr %pt.at
  %ps.at = getelementptr i64, ptr %plan, i64 3
  %ps = load ptr, ptr %ps.at
  %pn.at = getelementptr i64, ptr %plan, i64 4
  %pn = load i64, ptr %pn.at
  call void @fill(ptr %pt, ptr %ps, ptr %handles, i64 %pn)
  %vt.at = getelementptr i64, ptr %plan, i64 5
  %vt = load ptr, ptr %vt.at
  %vs.at = getelementptr i64, ptr %plan, i64 6
  %vs = load ptr, ptr %vs.at
  %vn.at = getelementptr i64, ptr %plan, i64 7
  %vn = load i64, ptr %vn.at
  call void @fill(ptr %vt, ptr %vs, ptr %values, i64 %vn)
  %none = icmp eq i64 %number, 0
  br i1 %none, label %end, label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %latch ]
  %call = getelementptr [4 x i64], ptr %calls, i64 %i
  %f = load ptr, ptr %call
  %b.at = getelementptr i64, ptr %call, i64 1
  %b = load ptr, ptr %b.at
  %v.at = getelementptr i64, ptr %call, i64 2
  %v = load ptr, ptr %v.at
  %t.at = getelementptr i64, ptr %call, i64 3
  %t = load i64, ptr %t.at
  %single = icmp sle i64 %t, 1
  br i1 %single, label %here, label %spread
here:
  call void %f(ptr %b, ptr %v, i64 0)
  br label %latch
spread:
  call void @run(ptr %s, ptr %f, ptr %b, ptr %v, i64 %t)
  br label %latch
latch:
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, %number
  br i1 %done, label %end, label %loop
end:
  ret void
}

attributes #0 = { nounwind "no-builtins" }
"""


def _source(machine: str) -> str:
    """The IR text for a machine."""
    if machine not in _SYSTEM_CALLS:
        raise DeviceError(
            f"threads on {machine}",
            because="their system calls are known for x86_64 and aarch64 only",
            fix="set NUM_CPU_THREADS=1",
        )
    futex, give_way = _SYSTEM_CALLS[machine]
    words = {
        "FINISHED": _FINISHED,
        "JOB": _JOB,
        "SIGNAL": _SIGNAL,
        "SLEEPERS": _SLEEPERS,
        "STOP": _STOP,
        "SYSCALL": _SYSCALL,
        "BUSY": _BUSY,
        "SPINS": _SPINS,
        "FUTEX": futex,
        "YIELD": give_way,
        "PAUSE": f"call void @{_PAUSE[machine]}",
    }
    import re

    text = re.sub(r"\b[A-Z]{3,}\b", lambda match: str(words[match[0]]), _SOURCE)
    return text + f"declare void @{_PAUSE[machine].replace('i32 1', 'i32')}\n"


_RUN = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64
)
_REPLAY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_WAKE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Pool:
    """`threads` - 1 workers; the thread that calls `run` is the last one."""

    def __init__(self, threads: int) -> None:
        self.image = native.load_cached(_source(elf.MACHINE), "pool")
        self.state = elf.map_memory(4096)
        self.place(_SYSCALL, ctypes.cast(elf.libc.syscall, ctypes.c_void_p).value or 0)
        self.run: Callable[[int, int, bytes, bytes, int], None] = _RUN(self.image["run"])
        self.replay: Callable[[int, int, bytes, bytes], None] = _REPLAY(self.image["replay"])
        self.wake: Callable[[int], None] = _WAKE(self.image["wake"])
        self.workers: list[Any] = []
        # signals belong to Python's threads: new threads inherit this mask
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        attributes = ctypes.create_string_buffer(128)  # a pthread_attr_t, whose size no system exceeds
        elf.libc.pthread_attr_init(attributes)
        elf.libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK))
        try:
            for _ in range(threads - 1):
                worker = ctypes.c_ulong()
                entry, argument = ctypes.c_void_p(self.image["worker"]), ctypes.c_void_p(self.state)
                if elf.libc.pthread_create(ctypes.byref(worker), attributes, entry, argument):
                    break  # the system allows no more threads: the caller does the rest of the work
                self.workers.append(worker)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def place(self, offset: int, value: int) -> None:
        """Write a field of the state."""
        ctypes.c_int64.from_address(self.state + offset).value = value

    def close(self) -> None:
        """End the workers and wait until they have gone."""
        workers, self.workers = self.workers, []
        if workers:
            self.place(_STOP, 1)
            self.wake(self.state)
            for worker in workers:
                elf.libc.pthread_join(worker, None)


_pool: Pool | None = None
_making = threading.Lock()


def pool() -> Pool:
    """The process's pool, started on first use; a forked child starts its own."""
    global _pool
    if _pool is None:
        with _making:
            if _pool is None:
                _pool = Pool(cpu_threads())
    return _pool


def _forget() -> None:
    """After a fork the child has none of the threads."""
    global _pool, _making
    if _pool is not None:
        _pool.workers = []
    _pool, _making = None, threading.Lock()


@atexit.register
def shutdown() -> None:
    """End the pool's threads; the next use starts them again."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


os.register_at_fork(after_in_child=_forget)


class NativePlan(Plan):
    """Calls of CPU programs that one native function replays."""

    def __init__(self, calls: Sequence[PlanCall]) -> None:
        super().__init__(calls)
        self.lock = threading.Lock()  # the tables are patched in place
        slots = [slot for call in calls for slot in call.buffers]
        variables = [slot for call in calls for slot in call.variables]
        records = 8 * 8 + 8 * 4 * len(calls)
        words = records // 8 + 2 * len(slots) + 2 * len(variables)
        self.table = (ctypes.c_int64 * words)()
        base = ctypes.addressof(self.table)
        pointers = base + records
        pointer_slots = pointers + 8 * len(slots)
        values = pointer_slots + 8 * len(slots)
        value_slots = values + 8 * len(variables)
        rows, at, value_at = [], pointers, values
        for call in calls:
            program: Any = call.program
            rows += [program.address, at, value_at, program.tasks]
            at += 8 * len(call.buffers)
            value_at += 8 * len(call.variables)
        head = [
            base + 64,
            len(calls),
            pointers,
            pointer_slots,
            len(slots),
            values,
            value_slots,
            len(variables),
        ]
        self.table[:] = [*head, *rows, *[0] * len(slots), *slots, *[0] * len(variables), *variables]
        self.address = base
        self.parallel = any(row > 1 for row in rows[3::4])
        self.pack_handles = struct.Struct(f"{max(slots, default=-1) + 1}Q").pack
        self.pack_values = struct.Struct(f"{max(variables, default=-1) + 1}q").pack
        self.handle_count, self.value_count = max(slots, default=-1) + 1, max(variables, default=-1) + 1

    def run(self, handles: Sequence[Any], values: Sequence[int]) -> None:
        present = pool()
        with self.lock:
            present.replay(
                present.state,
                self.address,
                self.pack_handles(*handles[: self.handle_count]),
                self.pack_values(*values[: self.value_count]),
            )

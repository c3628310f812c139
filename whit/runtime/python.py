"""PYTHON: the reference device. It interprets linear programs with Python's own arithmetic and checks every
access: bounds, races between tasks and work-items, reads of scratch that nobody wrote, barriers that not all
work-items reach."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NoReturn

from whit.codegen.target import Target
from whit.helpers import DeviceError
from whit.runtime import interpreter
from whit.runtime.device import Device, Launch, Program
from whit.uop import ALU, Ops, UOp
from whit.uop.dtype import dtype_of_name
from whit.uop.ops import DOTS

# MULACC is not native: a product and a sum, each rounded, are much faster to interpret than one rounding of
# both. Nor are DOT ops: the reference multiplies what the kernel says
TARGET = Target(key="python-1", language="python", vector_bytes=16, vector_registers=16, threads=2,
                has_local=True,
                local_bytes=64 << 10, max_local=64, native=ALU - {Ops.MULACC, *DOTS}, storage_only=())
_FAULT = "this is a fault of the compiler or of a hand-written program: DEBUG=6 prints the program"
_running = threading.RLock()  # the float32 cell of the environment is one for all


class PythonDevice(Device):
    """Handles are memoryviews of bytes; the binary of a program is its Python source."""

    def __init__(self, name: str) -> None:
        super().__init__(name, TARGET)

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def free(self, handle: Any, nbytes: int) -> None:
        """Nothing to do: Python frees it."""

    def offset(self, handle: Any, nbytes: int) -> memoryview:
        return memoryview(handle)[nbytes:]

    def copyin(self, handle: Any, data: memoryview) -> None:
        handle[:data.nbytes] = data.cast("B")

    def copyout(self, data: memoryview, handle: Any) -> None:
        data.cast("B")[:] = handle[:data.nbytes]

    def render(self, linear: UOp, name: str) -> str:
        return interpreter.to_source(linear, name)

    def compile(self, source: str, name: str) -> bytes:
        return source.encode()

    def load(self, binary: bytes, name: str, launch: Launch) -> Program:
        return PythonProgram(binary.decode(), name, launch)


class PythonProgram(Program):
    """A kernel as a Python function, called once per task or work-item."""

    def __init__(self, source: str, name: str, launch: Launch) -> None:
        self.name, self.launch = name, launch
        self.env = {**interpreter.environment(), "bad": self.bad}
        exec(compile(source, f"<kernel {name}>", "exec"), self.env)
        self.kernel: Callable[..., Any] = self.env["kernel"]
        groups = launch.tasks
        for size in launch.global_size:
            groups *= size
        self.items = list(product(*[range(size) for size in launch.local_size]))
        self.is_parallel = groups * len(self.items) > 1

    def bad(self, action: str, slot: int | str, index: int) -> NoReturn:
        memory = f"buffer p{slot}" if isinstance(slot, int) else f"scratch {slot.removeprefix('_')}"
        raise DeviceError(f"kernel {self.name}: {action} of {memory} at index {index}",
                          because="that is out of bounds", fix=_FAULT)

    def __call__(self, handles: Sequence[Any], variables: Sequence[int], wait: bool = False) -> float | None:
        start = time.perf_counter()
        named = dict(zip(self.env["VARIABLES"], variables, strict=True))
        memory: list[Any] = []
        for slot, dtype, size in self.env["PARAMS"]:
            if slot >= len(handles):
                raise DeviceError(f"kernel {self.name} with {len(handles)} buffers",
                                  because=f"it takes p{slot}",
                                  fix="pass a buffer for every PARAM")
            memory.append(typed(memoryview(handles[slot]), dtype, size))
        with _running:
            self.run(memory, named)
        return time.perf_counter() - start if wait else None

    def run(self, memory: list[Any], variables: dict[str, int]) -> None:
        watch = Watch(self.name)
        if self.is_parallel:
            slots = [slot for slot, _, _ in self.env["PARAMS"]]
            memory = [Watched(m, f"buffer p{slot}", watch) for m, slot in zip(memory, slots, strict=True)]
        groups = product(range(self.launch.tasks), *[range(size) for size in self.launch.global_size])
        for number, (task, *place) in enumerate(groups):
            special = {"thread": task, **{f"gidx{axis}": value for axis, value in enumerate(place)}}
            watch.group, watch.epoch = number, 0
            self.run_group(memory, variables, special, watch)

    def run_group(self, memory: list[Any], variables: dict[str, int], special: dict[str, int],
                  watch: Watch) -> None:
        """All work-items of a group: each runs up to the next barrier before any goes on."""
        shared = {uid: Watched([None] * size, f"scratch local{uid}", watch)
                  for uid, _, size, is_shared in self.env["LOCALS"] if is_shared}
        waiting: list[tuple[int, Iterator[None]]] = []
        for item, place in enumerate(self.items):
            mine = {uid: Watched([None] * size, f"scratch local{uid}", watch)
                    for uid, _, size, is_shared in self.env["LOCALS"] if not is_shared}
            watch.item = item
            lidx = {f"lidx{axis}": value for axis, value in enumerate(place)}
            steps = self.kernel(memory, variables, special | lidx, shared | mine)
            if steps is not None:
                waiting.append((item, steps))
        while waiting:
            arrived = []
            for item, steps in waiting:
                watch.item = item
                if next(steps, self) is not self:
                    arrived.append((item, steps))
            if arrived and len(arrived) != len(waiting):
                asked = f"kernel {self.name}: {len(arrived)} of {len(waiting)} work-items wait at a barrier"
                raise DeviceError(asked, because="the others have ended", fix=_FAULT)
            waiting = arrived
            watch.epoch += 1


def typed(handle: Any, dtype: str, size: int) -> Any:
    """The elements of a buffer: at most `size`, and no more than its bytes hold."""
    kind = dtype_of_name(dtype)
    count = min(size, handle.nbytes // kind.itemsize)
    return handle[:count * kind.itemsize].cast(interpreter.FORMAT[kind])


class Watch:
    """Who runs now: work-item `item` of group `group` (a task is a group of one), after `epoch` barriers."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.group = self.item = self.epoch = 0


class Watched:
    """Memory that remembers who touched what. Two work-items conflict on an element if one of them writes it
    and no barrier of their common group lies between."""

    MANY = -1

    def __init__(self, memory: Any, title: str, watch: Watch) -> None:
        self.memory, self.title, self.watch = memory, title, watch
        self.writers: dict[int, tuple[int, int, int]] = {}
        self.readers: dict[int, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, index: int) -> Any:
        watch = self.watch
        group, item, epoch = watch.group, watch.item, watch.epoch
        other = self.writers.get(index)
        if other is not None and self.conflicts(other):
            self.race(index, "reads", other, "wrote")
        before = self.readers.get(index)
        if before is None or (before[0] == group and before[2] != epoch):
            self.readers[index] = (group, item, epoch)
        elif before[0] != group:
            self.readers[index] = (self.MANY, item, epoch)
        elif before[1] != item:
            self.readers[index] = (group, self.MANY, epoch)
        value = self.memory[index]
        if value is None:
            raise DeviceError(f"kernel {watch.kernel}: read of {self.title} at index {index}",
                              because="nothing was written there",
                              fix=_FAULT)
        return value

    def __setitem__(self, index: int, value: Any) -> None:
        watch = self.watch
        for table, did in ((self.writers, "wrote"), (self.readers, "read")):
            other = table.get(index)
            if other is not None and self.conflicts(other):
                self.race(index, "writes", other, did)
        self.writers[index] = (watch.group, watch.item, watch.epoch)
        self.memory[index] = value

    def conflicts(self, other: tuple[int, int, int]) -> bool:
        watch = self.watch
        return other[0] != watch.group or (other[1] != watch.item and other[2] == watch.epoch)

    def race(self, index: int, does: str, other: tuple[int, int, int], did: str) -> NoReturn:
        watch = self.watch

        def who(group: int, item: int) -> str:
            return f"work-item {'several' if item == self.MANY else item} of group {group}"
        them = "several groups" if other[0] == self.MANY else who(*other[:2])
        raise DeviceError(f"kernel {watch.kernel}: race on {self.title} at index {index}",
                          because=f"{who(watch.group, watch.item)} {does} what {them} {did}, with no barrier "
                                  "between",
                          fix=_FAULT)

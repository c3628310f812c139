"""NULL: allocates nothing and runs nothing, so that scheduling and compilation of any model can be tested
anywhere.

NULL has a target like a current desktop CPU and prints no code. NULL:CPU, NULL:CPU:CLANG, NULL:PYTHON …
generate and compile the code of that device.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whit.codegen.target import Target
from whit.runtime.device import Device, Launch, Program
from whit.uop import ALU, Ops, UOp

TARGET = Target(key="null-1", language="null", vector_bytes=32, vector_registers=16, threads=8,
                native=ALU - {Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.ERF, Ops.POW, Ops.THREEFRY, Ops.FLOORDIV,
                              Ops.FLOORMOD,
                              Ops.RECIPROCAL})


class NullDevice(Device):
    """Handles are byte counts from 0 on; what is copied out is zeros; every kernel takes no time."""

    def __init__(self, name: str, target: Target = TARGET) -> None:
        model = name.partition(":")[2]
        self.model = Device.get(Device.canonical(model)) if model else None
        super().__init__(name, target if self.model is None else self.model.target)

    def allocate(self, nbytes: int) -> int:
        return 0

    def free(self, handle: Any, nbytes: int) -> None:
        """Nothing was allocated."""

    def offset(self, handle: Any, nbytes: int) -> int:
        return int(handle) + nbytes

    def copyin(self, handle: Any, data: memoryview) -> None:
        """The data is dropped."""

    def copyout(self, data: memoryview, handle: Any) -> None:
        data.cast("B")[:] = bytes(data.nbytes)

    def render(self, linear: UOp, name: str) -> str:
        return f"{name}: {len(linear.src)} instructions" if self.model is None else self.model.render(linear,
                                                                                                      name)

    def compile(self, source: str, name: str) -> bytes:
        return source.encode() if self.model is None else self.model.compile(source, name)

    def load(self, binary: bytes, name: str, launch: Launch) -> Program:
        return NullProgram()


class NullProgram(Program):
    """Does nothing in no time."""

    def __call__(self, handles: Sequence[Any], variables: Sequence[int], wait: bool = False) -> float | None:
        return 0.0 if wait else None

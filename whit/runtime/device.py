"""The contract of a backend, and the table of devices.

A backend subclasses `Device` and fills about six verbs: allocate, free, copy in, copy out, compile, load;
`plan` has a default. Names: "CPU", "CPU:CLANG", "PYTHON", "NULL", "DISK:/path". `Device.get(name)` opens one
on first use.
"""
from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from whit.codegen.target import Target
from whit.helpers import DEV, DeviceError
from whit.uop import UOp


class Buffer:
    """Device memory of `nbytes`, allocated on first use of `handle`; or a window (`base`, `offset`) into
    another buffer.

    `handle` is what the device's programs take: an address (int) on host-visible devices.
    """

    def __init__(self, device: str, nbytes: int, base: Buffer | None = None, offset: int = 0,
                 keep: object = None, handle: Any = None) -> None:
        self.device, self.nbytes, self.base, self.offset = device, nbytes, base, offset
        self.keep = keep  # an object that owns foreign memory (a NumPy array, a file mapping)
        self._handle = handle
        self._owned = False

    @property
    def handle(self) -> Any:
        if self._handle is None:
            runtime = Device.get(self.device)
            if self.base is not None:
                self._handle = runtime.offset(self.base.handle, self.offset)
            else:
                self._handle = runtime.allocate(self.nbytes)
                self._owned = True
        return self._handle

    @property
    def is_allocated(self) -> bool:
        return self._handle is not None or (self.base is not None and self.base.is_allocated)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """A window; it keeps this buffer alive."""
        root = self.base or self
        return Buffer(self.device, nbytes, root, self.offset + offset)

    def copyin(self, data: memoryview) -> None:
        """Host bytes to the device."""
        assert data.nbytes == self.nbytes, f"copyin of {data.nbytes} bytes into {self.nbytes}"
        if self.nbytes:
            Device.get(self.device).copyin(self.handle, data)

    def copyout(self) -> bytearray:
        """Device bytes to the host, after all work on the device has finished."""
        result = bytearray(self.nbytes)
        if self.nbytes:
            Device.get(self.device).copyout(memoryview(result), self.handle)
        return result

    _ending = staticmethod(sys.is_finalizing)  # found here even when the modules are gone

    def __del__(self) -> None:
        if self._owned and not self._ending():  # at the very end the memory goes anyway
            self._owned = False
            runtime = Device.opened.get(self.device)
            if runtime is not None:
                runtime.free(self._handle, self.nbytes)


class Program(abc.ABC):
    """A loaded kernel. `tasks` is the number of values of the THREAD index (1: no threads)."""

    @abc.abstractmethod
    def __call__(self, handles: Sequence[Any], variables: Sequence[int], wait: bool = False) -> float | None:
        """Run on buffers (in PARAM slot order) and variables (sorted by name); the seconds it took when
        `wait`."""


class Launch(NamedTuple):
    """How often a kernel body runs: tasks of the THREAD axis (CPU), work-groups and work-items (GPU-like)."""

    tasks: int = 1
    global_size: tuple[int, ...] = (1, 1, 1)
    local_size: tuple[int, ...] = (1, 1, 1)


class PlanCall(NamedTuple):
    """One call of a plan: buffers are slots in the plan's table of handles, variables are slots in its table
    of values."""

    program: Program
    buffers: tuple[int, ...]
    variables: tuple[int, ...]


class Plan:
    """A list of calls on one device. This default runs them one by one; devices override `Device.plan` with a
    native replay."""

    def __init__(self, calls: Sequence[PlanCall]) -> None:
        self.calls = list(calls)

    def run(self, handles: Sequence[Any], values: Sequence[int]) -> None:
        """Run every call in order; `handles` and `values` are indexed by the calls' slots."""
        for call in self.calls:
            call.program([handles[slot] for slot in call.buffers], [values[slot] for slot in call.variables])


class Device(abc.ABC):
    """A backend (see the module's text). Instances are made by `Device.get`."""

    opened: ClassVar[dict[str, Device]] = {}
    # device family -> module and class that implement it
    families: ClassVar[dict[str, tuple[str, str]]] = {
        "CPU": ("whit.runtime.cpu", "CPUDevice"), "PYTHON": ("whit.runtime.python", "PythonDevice"),
        "NULL": ("whit.runtime.null", "NullDevice"), "DISK": ("whit.runtime.disk", "DiskDevice"),
    }

    host_visible = False  # whether handles are addresses in this process's memory

    def __init__(self, name: str, target: Target) -> None:
        self.name, self.target = name, target

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Memory of at least `nbytes` (> 0)."""

    @abc.abstractmethod
    def free(self, handle: Any, nbytes: int) -> None:
        """Give memory back (it may be kept for reuse)."""

    def trim(self) -> None:  # noqa: B027  # devices that keep no memory have none to give back
        """Give memory that is kept for reuse back to the system."""

    @abc.abstractmethod
    def offset(self, handle: Any, nbytes: int) -> Any:
        """The handle of a place inside an allocation."""

    @abc.abstractmethod
    def copyin(self, handle: Any, data: memoryview) -> None: ...

    @abc.abstractmethod
    def copyout(self, data: memoryview, handle: Any) -> None: ...

    def from_memory(self, address: int, nbytes: int, keep: object = None) -> Buffer | None:
        """A buffer on host memory that something else owns (`keep`, held as long as the buffer lives), or
        None where the device has to copy."""
        return None

    @abc.abstractmethod
    def render(self, linear: UOp, name: str) -> str:
        """Source text of a linear program."""

    @abc.abstractmethod
    def compile(self, source: str, name: str) -> bytes:
        """Binary of a source text: what the disk cache keeps."""

    @abc.abstractmethod
    def load(self, binary: bytes, name: str, launch: Launch) -> Program:
        """Make a binary callable."""

    def plan(self, calls: Sequence[PlanCall]) -> Plan:
        """A replayable list of calls."""
        return Plan(calls)

    def synchronize(self) -> None:  # noqa: B027  # devices that run calls at once have nothing to wait for
        """Return once all work has finished."""

    def disassemble(self, binary: bytes) -> str:
        """Machine code as text, for DEBUG=7."""
        return f"{self.name} has no disassembler"

    @staticmethod
    def canonical(name: str | None) -> str:
        """The full name of a device; None is the default (DEV). Raises DeviceError for unknown ones."""
        text = name or DEV.value
        if not isinstance(text, str):
            raise DeviceError(f"device {text!r}", because="the name of a device is text",
                              fix="use one of " + ", ".join(Device.families))
        family, _, rest = text.partition(":")
        family = family.upper()
        if family not in Device.families:
            import difflib
            near = difflib.get_close_matches(family, Device.families, 1)
            fix = f"did you mean {near[0]}?" if near else "use one of " + ", ".join(Device.families)
            raise DeviceError(f"device {text!r}", because="there is no such device", fix=fix)
        if family == "DISK":
            return f"DISK:{rest}"
        return f"{family}:{rest.upper()}" if rest and rest != "0" else family

    @staticmethod
    def get(name: str) -> Device:
        """The open device of a canonical name."""
        found = Device.opened.get(name if isinstance(name, str) else Device.canonical(name))
        if found is None:
            module, cls = Device.families[Device.canonical(name).partition(":")[0]]
            found = Device.opened[name] = getattr(importlib.import_module(module), cls)(name)
        return found

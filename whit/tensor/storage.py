"""Host bytes of BUFFERs that the engine has not allocated yet, and the hooks that rooms below this one fill.

The tensor room imports neither schedule nor engine: what it needs from them it calls through `hooks`.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from whit.helpers import DEV
from whit.uop import Ops, UOp, dtypes
from whit.uop.uop import fresh_uid

if TYPE_CHECKING:
    from whit.tensor.tensor import Tensor

_data: weakref.WeakKeyDictionary[UOp, tuple[memoryview, object]] = weakref.WeakKeyDictionary()


on_put: list[Callable[[UOp, memoryview], None]] = []  # who wants to see data enter (the JIT's capture)


class Lent(NamedTuple):
    """Owner of bytes that devices which see host memory may use in place, and write to: a private mapping of
    a file."""

    address: int
    owner: object


class Borrowed(NamedTuple):
    """Owner of bytes that devices may read in place but must not write to: an array that somebody else
    holds. Who wants to write copies them first."""

    address: int
    owner: object


def put(buffer: UOp, data: memoryview, keep: object = None) -> None:
    """Give a BUFFER its bytes. Nobody may change `data` afterwards; `keep` owns foreign memory behind it
    (`Lent` and `Borrowed`: the bytes are not copied where the device can read them)."""
    raw = data if data.format == "B" and data.ndim == 1 else data.cast("B")
    _data[buffer] = (raw, keep)
    for see in on_put:
        see(buffer, raw)


def pop(buffer: UOp) -> tuple[memoryview, object] | None:
    """Take a BUFFER's bytes and their owner out of the table; None if it has none (`Tensor.empty`, or taken
    before)."""
    return _data.pop(buffer, None)


def peek(buffer: UOp) -> memoryview | None:
    """A BUFFER's bytes while nobody took them out."""
    found = _data.get(buffer)
    return None if found is None else found[0]


# ---- versions of memory

_writers: weakref.WeakKeyDictionary[UOp, weakref.ref[UOp]] = weakref.WeakKeyDictionary()


def next_version(memory: UOp, view: UOp, value: UOp) -> UOp:
    """A BUFFER, or a version of one, after `value` has been stored into `view`, which is a view of it."""
    # numbered, so that an equal write later on is another version
    after = UOp(Ops.AFTER, memory.dtype, (memory, UOp(Ops.STORE, dtypes.void, (view, value))), fresh_uid())
    _writers[memory] = weakref.ref(after)
    return after


def is_overwritten(memory: UOp) -> bool:
    """Whether another write to this version is pending. Memory has one next version: a second writer (of a
    tensor that shares the memory) needs memory of its own."""
    ref = _writers.get(memory)
    after = None if ref is None else ref()
    return after is not None and after.became is None


class Hooks:
    """What lower rooms provide. Each default imports the room, which overwrites the hook, and calls it again.

    realize(tensors): compute them; afterwards each `uop` is a BUFFER (or a view of one).
    read(tensor): its elements in row-major order as contiguous host bytes (realizes it).
    backward(tensor, gradient or None): add to `.grad` of every live tensor with requires_grad=True below it.
    gradient(tensor, targets, gradient or None, materialize): the gradients, one per target.
    share(tensor): its memory, for NumPy; None where it cannot be seen (realizes it).
    namespace(version or None): the module of the array API.
    device(name or None): the canonical name of a device; raises DeviceError for unknown ones.
    """

    realize: Callable[[Sequence[Tensor]], None]
    read: Callable[[Tensor], memoryview]
    backward: Callable[[Tensor, Tensor | None], None]
    gradient: Callable[[Tensor, Sequence[Tensor], Tensor | None, bool], list[Tensor]]
    share: Callable[[Tensor], Any]
    namespace: Callable[[str | None], Any]
    device: Callable[[str | None], str]

    def __init__(self) -> None:
        for name, module in (
            ("realize", "whit.engine"),
            ("read", "whit.engine"),
            ("backward", "whit.autograd"),
            ("gradient", "whit.autograd"),
            ("share", "whit.engine.share"),
            ("namespace", "whit.array_api"),
            ("device", "whit.runtime.device"),
        ):
            setattr(self, name, self._on_first_use(name, module))

    def _on_first_use(self, name: str, module: str) -> Callable[..., Any]:
        def load(*args: Any) -> Any:
            room = importlib.import_module(module)
            if (
                getattr(self, name) is load
            ):  # the room has no statement that fills it: take its function of that name
                setattr(self, name, room.Device.canonical if name == "device" else getattr(room, name))
            return getattr(self, name)(*args)

        return load


hooks = Hooks()


def default_device() -> str:
    """The device of tensors that name none."""
    name = DEV.value
    return name if name in ("CPU", "PYTHON", "NULL") else hooks.device(name)


def device_name(name: str | tuple[str, ...] | None) -> str:
    """The canonical form of a device name."""
    if name is None:
        return default_device()
    return hooks.device(name[0] if isinstance(name, tuple) and name else name)  # type: ignore[arg-type]  # checked there

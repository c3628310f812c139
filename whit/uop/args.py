"""The arguments that nodes of the IR carry.

Evaluated annotations, not `from __future__ import annotations`: each text would be compiled at import."""
from typing import Any, NamedTuple

from whit.uop.ops import AxisType, Op


class BufferArg(NamedTuple):
    """uid tells buffers apart; size in elements."""

    uid: int
    size: int
    device: str


class ParamArg(NamedTuple):
    """Position among the kernel's buffer arguments; size in elements."""

    slot: int
    size: int


class VarArg(NamedTuple):
    """Bounds are inclusive."""

    name: str
    min: int
    max: int


class RangeArg(NamedTuple):
    """uid tells ranges apart and, among ranges of equal axis type, orders them outermost first."""

    uid: int
    axis: AxisType


class ReduceArg(NamedTuple):
    """The binary op that folds; the axes at tensor level, () at kernel level where src[1:] are the ranges."""

    op: Op
    axes: tuple[int, ...] = ()


class StageArg(NamedTuple):
    """space: "global" (a buffer), "local" (shared by a work-group) or "register" (private)."""

    space: str
    uid: int


class CallArg(NamedTuple):
    """A kernel that somebody gives: a SINK at kernel level or a LINEAR program, whose first PARAMs are the
    outputs, of these shapes and dtypes, and the others the values that it reads; or a SCAN. `gradient`: from
    the outputs' gradients (None: not wanted), the outputs and the values to the values' gradients."""

    kernel: Any
    outputs: tuple[Any, ...]
    device: str
    gradient: Any = None


class ScanArg(NamedTuple):
    """Of a loop of `length` steps. PARAMs of a step: `carries` values that go from step to step, then
    `stacked` ones of which each step gets its own, then what is the same for all. Its sources: the next
    carries, then what each step gives. Outputs of the CALL are these, of all steps, stacked in the order of
    the arguments; `reverse`: the last step comes first."""

    length: int
    carries: int
    stacked: int
    reverse: bool


class SpecialArg(NamedTuple):
    """name: "thread", or "gidx0" … "gidx2" and "lidx0" … "lidx2"; the value runs from 0 to size - 1."""

    name: str
    size: int


class LocalArg(NamedTuple):
    """Scratch memory: its number, its length in elements and whether the work-group shares it."""

    uid: int
    size: int
    shared: bool

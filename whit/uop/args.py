"""The arguments that nodes of the IR carry.

Evaluated annotations, not `from __future__ import annotations`: each text would be compiled at import."""
from typing import NamedTuple

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


class SpecialArg(NamedTuple):
    """name: "thread", or "gidx0" … "gidx2" and "lidx0" … "lidx2"; the value runs from 0 to size - 1."""

    name: str
    size: int


class LocalArg(NamedTuple):
    """Scratch memory: its number, its length in elements and whether the work-group shares it."""

    uid: int
    size: int
    shared: bool

"""Nodes that only gradients see. Scheduling takes them out (`unmarked`).

A *link* is a DETACH with a `Link` as arg: the value below it, as a node of its own. It is what `whit.grad`
differentiates by: equal values are equal nodes, a link equals nothing else. Gradients pass through links, so
derivatives of derivatives find the outer argument below the inner one.

A *given value* is an OUTPUT of two sources, a CALL and the graph of the value. The CALL's arg is a `Given`:
the gradient function that holds for the value, whatever its graph is; its sources get the gradients.

A *stand-in* is a PARAM (on a device: a COPY of it) at tensor level: an input without a value, of a graph
that is traced once and then applied.
"""

from __future__ import annotations

import contextlib
from _thread import _local
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from whit.helpers import prod
from whit.uop import DType, Ops, Shape, UOp, dtypes
from whit.uop.uop import fresh_uid


class Link(NamedTuple):
    """Tells links of one value apart."""

    uid: int


class Given(NamedTuple):
    """How gradients of given values are computed. `gradient(upstreams, [], sources)`, else as in CallArg.
    `outputs`: their shapes and dtypes. `through`: forward mode may look at the graphs of the values."""

    outputs: tuple[Any, ...]
    gradient: Callable[[list[UOp | None], list[UOp], tuple[UOp, ...]], Sequence[UOp | None]]
    uid: int
    through: bool = False


class StandInArg(NamedTuple):
    """Of a PARAM: its number, its length, and the transform that made it."""

    slot: int
    size: Any
    by: str


class _Present(_local):
    """What this thread is doing: how many transforms are running, and how many of them trace stand-ins."""

    transforms = 0
    traces = 0


present = _Present()
# who wants to know which node a transform has made of which
on_rebuilt: list[Callable[[UOp, UOp], None]] = []
used = False  # whether any mark was ever made in this process


def link(node: UOp) -> UOp:
    """The value as a node that equals no other."""
    global used
    used = True
    return UOp(Ops.DETACH, node.dtype, (node,), Link(fresh_uid()))


def is_link(node: UOp) -> bool:
    return node.op is Ops.DETACH and node.arg.__class__ is Link


def given(values: Sequence[UOp], sources: Sequence[UOp], gradient: Any, through: bool = False) -> list[UOp]:
    """The values, with gradients to the sources as the function says."""
    global used
    used = True
    outputs = tuple([(value.shape, value.dtype) for value in values])
    call = UOp(Ops.CALL, dtypes.void, tuple(sources), Given(outputs, gradient, fresh_uid(), through))
    return [given_output(call, n, value) for n, value in enumerate(values)]


def given_output(call: UOp, number: int, value: UOp) -> UOp:
    """Value `number` of a CALL of given values."""
    return UOp(Ops.OUTPUT, value.dtype, (call, value), (number, value.shape))


def stand_in(shape: Shape, dtype: DType, device: str, by: str) -> tuple[UOp, UOp]:
    """An input without a value: (the flat node to be replaced, the same in its shape)."""
    global used
    used = True
    param = UOp(Ops.PARAM, dtype, (), StandInArg(fresh_uid(), prod(shape), by))
    base = param.copy_to(device)
    return base, base.reshape(tuple(shape))


def stand_in_below(node: UOp) -> UOp | None:
    """A stand-in that the value depends on."""
    return next((n for n in node.toposort() if n.op is Ops.PARAM), None)


def unmarked(roots: Sequence[UOp]) -> list[UOp]:
    """The graphs of the bare values."""
    if not used:
        return list(roots)
    sink = UOp.sink(*roots)
    new: dict[UOp, UOp] = {}
    for node in sink.toposort():
        if is_link(node):
            new[node] = new[node.src[0]]
        elif node.op is Ops.OUTPUT and len(node.src) == 2:
            new[node] = new[node.src[1]]
        else:
            src = tuple([new[s] for s in node.src])
            new[node] = node if src == node.src else node.replace(src=src)
    return list(new[sink].src)


@contextlib.contextmanager
def transforming(traces: bool = False) -> Iterator[None]:
    """A transform runs its function inside of the block (jitted functions inside are plain functions
    then). `traces`: values are not computed inside, as they depend on stand-ins."""
    present.transforms += 1
    present.traces += traces
    try:
        yield
    finally:
        present.transforms -= 1
        present.traces -= traces

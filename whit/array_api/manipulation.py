"""Functions that move elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whit.array_api.dtypes import result_type
from whit.helpers import ArgumentError, ShapeError
from whit.tensor import Tensor
from whit.uop import broadcast_shapes as common_shape
from whit.uop.uop import show_shape


def broadcast_arrays(*arrays: Tensor) -> list[Tensor]:
    """All in their common shape."""
    shape = common_shape(*[x.shape for x in arrays]) if arrays else ()
    return [x.expand(*shape) if shape else x for x in arrays]


def broadcast_to(x: Tensor, /, shape: tuple[int, ...]) -> Tensor:
    """x repeated to a shape, at no cost."""
    return x.broadcast_to(shape)


def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
    """Joined along an axis; None flattens them first. Dtypes promote.

    >>> concat([Tensor([1]), Tensor([2.5])]).tolist()
    [1.0, 2.5]
    """
    if not len(arrays):
        raise ArgumentError("concat of nothing", because="there is no shape to give", fix="pass a tensor")
    dtype = result_type(*arrays)
    parts = [(x if axis is not None else x.reshape(-1)).cast(dtype) for x in arrays]
    return parts[0].cat(*parts[1:], dim=axis or 0)


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which all of these broadcast."""
    return tuple(common_shape(*shapes))  # type: ignore[arg-type]  # plain sizes


def expand_dims(x: Tensor, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """x with an axis of size 1 at a position of the result, or at several."""
    if isinstance(axis, int):
        return x.unsqueeze(axis)
    axis = tuple([int(a.__index__()) for a in axis])
    ndim = x.ndim + len(axis)
    places = {a + ndim if a < 0 else a for a in axis}
    if len(places) != len(axis) or not all(0 <= a < ndim for a in places):
        raise ShapeError(
            f"expand_dims of {show_shape(x.shape)} at {axis}",
            because=f"the result has {ndim} axes, and each place is named once",
            fix="name other places",
        )
    sizes = iter(x.shape)
    return x.reshape(tuple([1 if a in places else next(sizes) for a in range(ndim)]))


def flip(x: Tensor, /, *, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Reversed along axes (None: all)."""
    if axis is None:
        axis = tuple(range(x.ndim))
    return x.flip(axis)


def moveaxis(x: Tensor, source: Any, destination: Any, /) -> Tensor:
    """Axes moved to other positions; the rest keep their order.

    >>> moveaxis(Tensor.zeros(2, 3, 4), 0, -1).shape
    (3, 4, 2)
    """
    sources = [source] if isinstance(source, int) else list(source)
    places = [destination] if isinstance(destination, int) else list(destination)
    start, end = [x._axis(a, "moveaxis") for a in sources], [x._axis(a, "moveaxis") for a in places]
    if len(start) != len(end) or len({*start}) != len(start) or len({*end}) != len(end):
        raise ShapeError(
            f"moveaxis of {show_shape(x.shape)} from {source} to {destination}",
            because="each axis has one place",
            fix="name as many different axes on both sides",
        )
    order = [a for a in range(x.ndim) if a not in start]
    for place, axis in sorted(zip(end, start)):
        order.insert(place, axis)
    return x.permute(*order) if order else x


def permute_dims(x: Tensor, /, axes: tuple[int, ...]) -> Tensor:
    """The axes in another order."""
    return x.permute(tuple(axes)) if x.ndim else x


def repeat(x: Tensor, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """Each element repeated, all as often or each its own number of times (which are computed now); None
    flattens x first.

    >>> repeat(Tensor([1, 2]), Tensor([2, 1])).tolist()
    [1, 1, 2]
    """
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = x._axis(axis, "repeat")
    if isinstance(repeats, Tensor) and repeats.size == 1:
        repeats = int(repeats.reshape(()).item())
    if not isinstance(repeats, Tensor):
        if repeats == 0:
            return x.shrink([(0, 0) if a == axis else None for a in range(x.ndim)])
        return x.repeat_interleave(repeats, axis)
    import numpy as np

    counts = repeats.numpy()
    if counts.shape != (x.shape[axis],) or (counts < 0).any():
        raise ShapeError(
            f"repeat of axis {axis} of {show_shape(x.shape)} by counts of shape {show_shape(counts.shape)}",
            because="there is one count of 0 or more for each element",
            fix="pass as many",
        )
    places = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return x.take(Tensor(places).to(x.device), axis=axis)


def reshape(x: Tensor, /, shape: tuple[int, ...], *, copy: bool | None = None) -> Tensor:
    """The same elements in another shape. A write to the result never reaches x; copy=False is refused,
    since it could not be kept."""
    if copy is False:
        raise ArgumentError(
            "reshape(copy=False)", because="writes to the result do not reach x", fix="leave copy out"
        )
    return x.reshape(tuple(shape))


def roll(x: Tensor, /, shift: Any, *, axis: Any = None) -> Tensor:
    """Elements moved along axes, those that leave at the end come in at the start."""
    if not x.ndim:
        return x
    if axis is not None and isinstance(axis, tuple) and isinstance(shift, int):
        shift = (shift,) * len(axis)
    return x.roll(shift, axis)


def squeeze(x: Tensor, /, axis: int | tuple[int, ...]) -> Tensor:
    """x without these axes, which must be of size 1."""
    axes = x._axes((axis,) if isinstance(axis, int) else tuple(axis), "squeeze")
    if any(x.shape[a] != 1 for a in axes):
        raise ShapeError(
            f"squeeze axes {axes} of {show_shape(x.shape)}",
            because="an axis of another size than 1 cannot vanish",
            fix="name axes of size 1",
        )
    return x.reshape(tuple([n for a, n in enumerate(x.shape) if a not in axes]))


def stack(arrays: Sequence[Tensor], /, *, axis: int = 0) -> Tensor:
    """Joined along a new axis. Dtypes promote."""
    if not len(arrays):
        raise ArgumentError("stack of nothing", because="there is no shape to give", fix="pass a tensor")
    dtype = result_type(*arrays)
    parts = [x.cast(dtype) for x in arrays]
    return parts[0].stack(*parts[1:], dim=axis)


def tile(x: Tensor, repetitions: tuple[int, ...], /) -> Tensor:
    """x laid side by side along each axis."""
    missing = x.ndim - len(repetitions)
    counts = (*(1,) * max(missing, 0), *repetitions)
    return x.reshape((*(1,) * max(-missing, 0), *x.shape)).repeat(*counts) if counts else x


def unstack(x: Tensor, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis."""
    axis = x._axis(axis, "unstack")
    return tuple([x[(*(slice(None),) * axis, i)] for i in range(x.shape[axis])])


def diff(
    x: Tensor, /, *, axis: int = -1, n: int = 1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Differences of neighbours along an axis, n times."""
    parts = [p for p in (prepend, x, append) if p is not None]
    return (concat(parts, axis=axis) if len(parts) > 1 else x).diff(n, axis)

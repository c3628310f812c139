"""vmap: a function of one example becomes one of many."""

from __future__ import annotations

import functools
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from whit.autograd.marks import stand_in, transforming
from whit.helpers import ArgumentError, ShapeError, prod
from whit.tensor import Tensor, storage
from whit.tensor import random as random_
from whit.transforms import trees
from whit.transforms.batching import Batch, Source, batch, expanded
from whit.uop import Ops, Sint, UOp, dtypes
from whit.uop.uop import show_shape

Function = Callable[..., Any]
RANDOMNESS = ("different", "same", "error")


def vmap(function: Function, in_axes: Any = 0, out_axes: Any = 0, randomness: str = "different") -> Function:
    """The function that applies `function` to every example of a batch, as one graph.

    in_axes: for each argument, the axis along which its examples lie; None: the same for all. A number or
    None for all arguments, or a tuple with one entry each; an entry may be a tree like (the upper part of)
    its argument. Keyword arguments are mapped along axis 0; what is no tensor is passed on as it is.
    out_axes: where the batch lies in the results, in the same way. Shapes and dtypes: the function sees
    tensors without the mapped axis. All of Tensor works inside, other transforms and vmap too; values
    cannot be read, and nothing outside can be written.

    randomness: "different": random numbers are those of a Python loop over the examples, bit by bit;
    "same": those of one call, for every example; "error": they are refused.

    Errors: ArgumentError for axes that do not fit the arguments, nothing to map, reads and writes;
    ShapeError for axes that are not there or of different lengths.

    >>> rows = Tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> vmap(lambda x, y: x @ y, in_axes=(0, None))(rows, Tensor([1.0, 10.0])).tolist()
    [21.0, 43.0]
    """
    trees.check_function("vmap", function)
    if randomness not in RANDOMNESS:
        raise ArgumentError(
            f"vmap(randomness={randomness!r})", because="there are three ways", fix=f"use one of {RANDOMNESS}"
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        axes = [*_spread("in_axes", _per_argument(in_axes, args), args), *[0] * len(trees.leaves(kwargs))]
        given = trees.leaves((args, kwargs))
        axes = [_axis(n, leaf, axis) for n, (leaf, axis) in enumerate(zip(given, axes, strict=True))]
        size = _batch_size(given, axes)
        changes: dict[UOp, UOp] = {}
        inside = [
            leaf if axis is None else _example(leaf, axis, changes)
            for leaf, axis in zip(given, axes, strict=True)
        ]
        args_in, kwargs_in = trees.rebuilt((args, kwargs), iter(inside))
        with _traced(inside) as keys:
            result = function(*args_in, **kwargs_in)
        changes |= _random_changes(keys, size, randomness)
        return _joined(result, Batch(size, changes), out_axes)

    return call


# ---- arguments ---------------------------------------------------------------------------------------------


def _per_argument(axes: Any, args: Sequence[Any]) -> Any:
    """One entry for each argument."""
    if axes is None or isinstance(axes, int):
        return tuple([axes] * len(args))
    if not isinstance(axes, (tuple, list)) or len(axes) != len(args):
        raise ArgumentError(
            f"vmap: in_axes={axes!r} for {len(args)} arguments",
            because="there is one entry for each",
            fix="give a number, None, or a tuple as long as the arguments",
        )
    return tuple(axes)


def _spread(what: str, axes: Any, tree: Any) -> list[Any]:
    """An axis (or None) for every leaf of the tree."""
    if axes is None or isinstance(axes, int):
        return [axes] * len(trees.leaves(tree))
    if isinstance(axes, dict) and isinstance(tree, dict) and set(axes) == set(tree):
        return [axis for name in tree for axis in _spread(what, axes[name], tree[name])]
    if isinstance(axes, (list, tuple)) and isinstance(tree, (list, tuple)) and len(axes) == len(tree):
        return [axis for inner, item in zip(axes, tree, strict=True) for axis in _spread(what, inner, item)]
    raise ArgumentError(
        f"vmap: {what} holds {axes!r} for a {type(tree).__name__}",
        because="the two have different forms",
        fix="give a number or None, or the same list, tuple or dict of them",
    )


def _axis(number: int, leaf: Any, axis: int | None) -> int | None:
    """The axis as a number from 0 on; None for what is not mapped."""
    if axis is None:
        return None
    if not isinstance(leaf, Tensor):
        if hasattr(leaf, "__array__"):
            raise ArgumentError(
                f"vmap: leaf {number} of the arguments is a {type(leaf).__name__}",
                because="only tensors are mapped",
                fix="pass Tensor(array)",
            )
        return None
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ShapeError(
            f"vmap over axis {axis} of shape {show_shape(leaf.shape)}",
            because=f"the tensor has {leaf.ndim} axes",
            fix="name one of them in in_axes, or None for a tensor that is the same for all examples",
        )
    return axis % leaf.ndim


def _batch_size(given: Sequence[Any], axes: Sequence[int | None]) -> Sint:
    """The common length of the mapped axes."""
    sizes: list[Sint] = [leaf.shape[axis] for leaf, axis in zip(given, axes, strict=True) if axis is not None]
    if not sizes:
        raise ArgumentError(
            "vmap of nothing",
            because="no argument is a tensor with an axis to map over",
            fix="pass a tensor, and name its axis in in_axes",
        )
    different = next((size for size in sizes if size is not sizes[0] and size != sizes[0]), None)
    if different is not None:
        raise ShapeError(
            f"vmap over axes of lengths {show_shape((sizes[0],))} and {show_shape((different,))}",
            because="there must be as many examples in each",
            fix="choose other in_axes, or None",
        )
    return sizes[0]


def _example(leaf: Tensor, axis: int, changes: dict[UOp, UOp]) -> Tensor:
    """A stand-in for one example of a tensor; `changes` learns what it stands for."""
    node = leaf.uop.permute((axis, *[a for a in range(leaf.ndim) if a != axis]))
    shape = node.shape[1:]
    base, shaped = stand_in(shape, node.dtype, leaf.device, "vmap")
    changes[base] = node.reshape((node.shape[0], prod(shape)))
    changes[shaped] = node
    return Tensor._wrap(shaped)


# ---- the trace ---------------------------------------------------------------------------------------------


@contextmanager
def _traced(inside: Sequence[Any]) -> Iterator[list[UOp]]:
    """Run the function inside of the block. Gives the key buffers that it makes. ArgumentError afterwards
    if it assigned to tensors from outside, which are as before then."""
    keys: list[UOp] = []
    thread = get_ident()

    def see(node: UOp, data: memoryview) -> None:
        if get_ident() == thread:
            keys.append(node)

    before = [(t, t.uop, t.grad) for t in Tensor.live]
    storage.on_put.append(see)
    try:
        with transforming(traces=True):
            yield keys
    finally:
        storage.on_put.remove(see)
    changed = [entry for entry in before if not _is_as_before(*entry)]
    for tensor, uop, gradient in changed:
        tensor.uop, tensor.grad = uop, gradient
    if changed:
        what = "an argument" if any(changed[0][0] is leaf for leaf in inside) else "a tensor from outside"
        raise ArgumentError(
            f"vmap: the function assigns to {what} of shape {show_shape(changed[0][1].shape)}",
            because="it runs once for all examples, so that there is no state to write for each",
            fix="return the new value, and assign it outside",
        )


def _is_as_before(tensor: Tensor, uop: UOp, gradient: Any) -> bool:
    """Whether nothing was assigned to a tensor: it has the same graph, or is computed by now, which leads to
    memory with nothing to write."""
    node = tensor.uop
    while node is not uop and node.op in (Ops.RESHAPE, Ops.SHRINK):
        node = node.src[0]
    return (node is uop or node.op is Ops.BUFFER) and tensor.grad is gradient


def _random_changes(seen: list[UOp], size: Sint, randomness: str) -> dict[UOp, UOp]:
    """Where the counters of each example begin. In a loop over the examples each would use up as many
    counters as the traced one, one after another; what the others use is taken from the sequence here."""
    keys = [node for node in seen if node in random_.key_buffers]
    if not keys or randomness == "same":
        return {}
    if randomness == "error":
        raise ArgumentError(
            "vmap: random numbers inside of the function",
            because='randomness="error" refuses them',
            fix='draw them outside, or choose randomness="different" or "same"',
        )
    if not isinstance(size, int):
        raise ShapeError(
            "vmap: random numbers for a symbolic number of examples",
            because="the counters must be known",
            fix='draw them outside, or choose randomness="same"',
        )
    each = sum(random_.key_buffers[node][1] for node in keys)
    key, last = random_.key_buffers[keys[-1]]
    random_.key_buffers[keys[-1]] = (key, last + each * (size - 1))
    random_.next_key(each * (size - 1))
    steps = UOp(Ops.IOTA, dtypes.int64, (), size).cast(dtypes.uint64) * each
    firsts = [random_.first_counter(node) for node in keys]
    return {first: first + steps.reshape((size, 1)) for first in firsts}


def _joined(result: Any, of: Batch, out_axes: Any) -> Any:
    """The results for all examples, with the batch where out_axes says."""
    axes = _spread("out_axes", out_axes, result)
    found = trees.leaves(result)
    for leaf in found:
        if not isinstance(leaf, Tensor):
            raise ArgumentError(
                f"vmap: the function returned {repr(leaf)[:60]}",
                because="its results must be tensors",
                fix="return tensors, in lists, tuples or dicts",
            )
    batched = batch([leaf.uop for leaf in found], of)
    return trees.rebuilt(
        result, iter([_placed(b, of.size, axis) for b, axis in zip(batched, axes, strict=True)])
    )


def _placed(value: Source, size: Sint, axis: int | None) -> Tensor:
    if axis is None:
        if value.batched:
            raise ArgumentError(
                "vmap: out_axes is None for a result that differs between examples",
                because="only what is the same for all has no batch axis",
                fix="name an axis",
            )
        return Tensor._wrap(value.node)
    node = expanded(value, size)
    if not -node.ndim <= axis < node.ndim:
        raise ShapeError(
            f"vmap: out_axes={axis} for a result of shape {show_shape(node.shape[1:])}",
            because=f"with the batch it has {node.ndim} axes",
            fix="choose one of them",
        )
    order = list(range(1, node.ndim))
    order.insert(axis % node.ndim, 0)
    return Tensor._wrap(node.permute(tuple(order)))

"""Gradients that a function brings along (`custom_gradient`), and gradients that compute values again
instead of keeping them (`checkpoint`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from whit.autograd.gradient import gradient
from whit.autograd.marks import given, link, on_rebuilt, transforming
from whit.helpers import ArgumentError, DTypeError, ShapeError, prod
from whit.tensor import Tensor
from whit.tensor.custom import run
from whit.transforms import trees
from whit.uop import Ops, UOp
from whit.uop.program import param
from whit.uop.uop import show_shape

Function = Callable[..., Any]


def custom_gradient(function: Function) -> Function:
    """Decorator: `function` returns (value, pull) and `pull` is the gradient of the value, whatever the
    value's graph says.

    pull(upstream): from the gradient of the value (in its form: a tensor or a tree of them) to a gradient
    for each positional argument: one, or a tuple of as many; None for no gradient; for an argument that is
    a tree, such a tree. It must be linear in the upstream. Shapes and dtypes: gradients have their
    arguments' shapes, and are cast to their dtypes. Works in both modes (forward mode uses the transpose of
    pull) and to any order: what pull computes from the arguments is differentiated again. No gradient
    reaches tensors that the function uses besides its arguments.

    Errors: ArgumentError for a function that does not return a pair, or a pull that returns another number of
    gradients; ShapeError and DTypeError for gradients that do not fit.

    >>> from whit import grad
    >>> @custom_gradient
    ... def clipped(x):
    ...     return x, lambda upstream: upstream.clamp(-1, 1)
    >>> grad(lambda x: (clipped(x) * Tensor([0.5, 9.0])).sum())(Tensor([1.0, 2.0])).tolist()
    [0.5, 1.0]
    """

    trees.check_function("custom_gradient", function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with transforming():
            result = function(*args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
            raise ArgumentError(
                f"custom_gradient: the function returned {repr(result)[:60]}",
                because="a pair of a value and a function is expected",
                fix="return (value, lambda upstream: gradient)",
            )
        value, pull = result
        outputs = trees.tensors(value)
        if len(outputs) != len(trees.leaves(value)) or not outputs:
            raise ArgumentError(
                "custom_gradient: a value that is not made of tensors",
                because="it can have no gradient",
                fix="return a tensor, or lists, tuples and dicts of tensors",
            )
        made = given([t.uop for t in outputs], [t.uop for t in trees.tensors(args)], _Pull(pull, args, value))
        return trees.rebuilt(value, iter([Tensor._wrap(node) for node in made]))

    return call


class _Pull:
    """A gradient function between trees of tensors as one between nodes."""

    def __init__(self, pull: Function, args: tuple[Any, ...], value: Any) -> None:
        self.pull = pull
        # the form of arguments and value, without the tensors, which need not live as long
        self.args = trees.mapped(lambda leaf: isinstance(leaf, Tensor), args)
        self.value = trees.mapped(lambda leaf: None, value)
        self.outputs = [(t.uop.const_like(0), t.uop.shape) for t in trees.leaves(value)]

    def __call__(
        self, upstreams: list[UOp | None], outputs: list[UOp], sources: tuple[UOp, ...]
    ) -> list[UOp | None]:
        full = [
            zero.reshape((1,) * len(shape)).expand(shape) if g is None else g
            for g, (zero, shape) in zip(upstreams, self.outputs, strict=True)
        ]
        with transforming():
            found = self.pull(trees.rebuilt(self.value, iter([Tensor._wrap(g) for g in full])))
        if len(self.args) == 1 and not (isinstance(found, tuple) and len(found) == 1):
            found = (found,)
        if not isinstance(found, (list, tuple)) or len(found) != len(self.args):
            count = len(found) if isinstance(found, (list, tuple)) else 1
            raise ArgumentError(
                f"custom_gradient: {count} gradients",
                because=f"the function has {len(self.args)} arguments",
                fix="return one for each, or None",
            )
        parts: list[UOp | None] = []
        nodes = iter(sources)
        for arg, part in zip(self.args, found, strict=True):
            gradients = [None] * len(trees.leaves(arg)) if part is None else trees.leaves(part)
            if len(gradients) != len(trees.leaves(arg)):
                raise ArgumentError(
                    "custom_gradient: a gradient of another form than its argument",
                    because=f"it has {len(gradients)} leaves for {len(trees.leaves(arg))}",
                    fix="return the same lists, tuples and dicts",
                )
            parts += [
                _fitting(g, next(nodes))
                for g, is_tensor in zip(gradients, trees.leaves(arg), strict=True)
                if is_tensor
            ]
        return parts


def _fitting(part: Any, source: UOp) -> UOp | None:
    """A gradient of the source's shape and dtype, or None."""
    if part is None:
        return None
    node = Tensor._of(part).uop
    if node.shape != source.shape:
        raise ShapeError(
            f"custom_gradient: a gradient of shape {show_shape(node.shape)}",
            because=f"the argument has shape {show_shape(source.shape)}",
            fix="return a gradient of the argument's shape (sum over the axes that were broadcast)",
        )
    if not node.dtype.is_float:
        raise DTypeError(
            f"custom_gradient: a gradient of {node.dtype}",
            because="gradients are floats",
            fix=f"cast it to {source.dtype}",
        )
    return node.cast(source.dtype) if source.dtype.is_float else None


# ---- checkpoint --------------------------------------------------------------------------------------------


def checkpoint(function: Function) -> Function:
    """The same function, whose inner values are not kept for the backward pass: they are computed again
    from the arguments when gradients get there.

    Takes more time (one more forward pass) and less memory. Arguments and results are tensors or trees of
    them; tensors that the function uses besides its arguments get their gradients too. Random numbers are
    the same both times. Values, gradients, shapes and dtypes are those of the function. Errors: those of
    the function; ArgumentError for results that are not made of tensors.

    >>> from whit import grad
    >>> layer = checkpoint(lambda x: (x.exp() + 1).log())
    >>> grad(lambda x: layer(layer(x)).sum())(Tensor([0.0])).tolist()
    [0.3333333432674408]
    """

    trees.check_function("checkpoint", function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = [leaf.uop if isinstance(leaf, Tensor) else None for leaf in trees.leaves((args, kwargs))]
        marks = {node: link(node) for node in inputs if node is not None}
        linked = [
            leaf if node is None else Tensor._wrap(marks[node])
            for leaf, node in zip(trees.leaves((args, kwargs)), inputs, strict=True)
        ]
        args_in, kwargs_in = trees.rebuilt((args, kwargs), iter(linked))
        with transforming():
            result = function(*args_in, **kwargs_in)
        outputs = trees.tensors(result)
        if len(outputs) != len(trees.leaves(result)):
            raise ArgumentError(
                "checkpoint: a result that is not made of tensors",
                because="only tensors can be computed again",
                fix="return tensors, in lists, tuples or dicts",
            )
        again = _Recompute([t.uop for t in outputs], list(marks.values()))
        made = given(again.outputs, again.sources, again, through=True)
        return trees.rebuilt(result, iter([Tensor._wrap(node) for node in made]))

    return call


class _Recompute:
    """The gradient function of checkpointed values.

    `sources`: the links of the arguments, then all else that their part of the graph reads. Before
    gradients are taken, the part is built anew on copies of the arguments which are made once the upstream
    gradients are there: so the schedule cannot use the values of the forward pass, nor compute them too
    early."""

    def __init__(self, outputs: list[UOp], links: list[UOp]) -> None:
        self.outputs, self.links = outputs, links
        self.inner = _between(outputs, links)
        if any([node.op is Ops.AFTER for node in self.inner]):
            raise ArgumentError(
                "checkpoint: the function assigns to a tensor",
                because="it would be written again when the values are computed again",
                fix="return the new value, and assign it outside",
            )
        reads = {source: None for node in self.inner for source in _read_by(node) if source not in self.inner}
        for node in (*links, *outputs):
            reads.pop(node, None)
        others = [node for node in reads if node.op is not Ops.CONST]
        direct = [node for node in outputs if node not in self.inner and node not in links]
        self.others = list(dict.fromkeys([*others, *direct]))
        self.sources = (*links, *self.others)

    def __call__(
        self, upstreams: list[UOp | None], outputs: list[UOp], sources: tuple[UOp, ...]
    ) -> list[UOp | None]:
        known = [(output, g) for output, g in zip(self.outputs, upstreams, strict=True) if g is not None]
        after = [g for _, g in known]
        new = {
            node: link(_copied_after(value, after)) for node, value in zip(self.links, sources, strict=False)
        }
        count = len(self.links)
        new |= {node: link(value) for node, value in zip(self.others, sources[count:], strict=True)}
        inputs = [new[node] for node in self.sources]
        for node in self.inner:
            src = tuple([new.get(s, s) for s in node.src])
            new[node] = node if src == node.src else node.replace(src=src)
            for see in on_rebuilt:
                see(node, new[node])
        return gradient([new[output] for output, _ in known], inputs, after)


def _between(outputs: Sequence[UOp], inputs: Sequence[UOp]) -> dict[UOp, None]:
    """The nodes that depend on the inputs and that the outputs depend on, sources first."""
    found = dict.fromkeys(inputs)
    for node in UOp.sink(*outputs).toposort(found.copy().__contains__)[:-1]:
        if node not in found and any([s in found for s in node.src]):
            found[node] = None
    for node in inputs:
        found.pop(node, None)
    return found


def _read_by(node: UOp) -> tuple[UOp, ...]:
    return node.src[:1] if node.op is Ops.OUTPUT else node.src


def _copied_after(value: UOp, others: Sequence[UOp]) -> UOp:
    """The value in memory of its own, written once the others are computed: a kernel that is given them,
    but reads one array only. Its gradient passes to the value."""
    count = prod(value.shape)
    i = UOp.range(count, uid=0)
    out, read = param(0, (count,), value.dtype), param(1, (count,), value.dtype)
    kernel = UOp.sink(out.store(i, read[i]).end(i))
    sources = [value, *others]
    return run(kernel, sources, [(value.shape, value.dtype)], value.device, _passed_to_first)[0]


def _passed_to_first(
    upstreams: list[UOp | None], outputs: list[UOp], sources: tuple[UOp, ...]
) -> list[UOp | None]:
    return [upstreams[0], *[None] * (len(sources) - 1)]

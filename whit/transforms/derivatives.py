"""Functions of tensors to functions of their derivatives, backwards and forwards.

The function runs once, on links: nodes that are its arguments and equal nothing else, so that equal values
(or the argument of an outer transform) are told apart. Values may be read inside of the function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from whit.autograd.forward import tangents
from whit.autograd.gradient import gradient
from whit.autograd.marks import link, transforming
from whit.helpers import ArgumentError, DTypeError, ShapeError, prod
from whit.tensor import Tensor
from whit.transforms import trees
from whit.transforms.vmap import vmap
from whit.uop import UOp, dtypes
from whit.uop.uop import show_shape

Function = Callable[..., Any]
Argnums = int | Sequence[int]


def stop_gradient(tree: Any) -> Any:
    """The same values, through which no derivative flows, neither backwards nor forwards.

    Shapes and dtypes: those of the tree's tensors; other leaves stay as they are.

    >>> grad(lambda x: x * stop_gradient(x))(Tensor(3.0)).item()
    3.0
    """
    return trees.mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def grad(function: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """The function that computes the gradient of `function`, whose result is a float of one element.

    argnums: by which arguments; a tuple of gradients for several. An argument may be a tree of float
    tensors (lists, tuples, dicts): the gradient is such a tree. has_aux: the function returns (value,
    anything), and the result is (gradient, anything). Shapes and dtypes: gradients like their arguments;
    zeros where the value does not depend on one. Errors: ShapeError for a value of several elements,
    DTypeError for one, or an argument, that is no float, ArgumentError for argnums without an argument.

    >>> grad(lambda x, y: (x * x * y).sum())(Tensor([1.0, 2.0]), 3.0).tolist()
    [6.0, 12.0]
    >>> grad(grad(lambda x: x**3))(Tensor(2.0)).item()
    12.0
    """
    trees.check_function("grad", function)
    both = value_and_grad(function, argnums, has_aux)

    @functools.wraps(function)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradients


def value_and_grad(function: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """As `grad`, with the value before the gradient: (value, gradient), or ((value, anything), gradient) with
    has_aux.

    >>> loss = lambda p: (p["w"] * 2 + p["b"]).sum()
    >>> value, gradient = value_and_grad(loss)({"w": Tensor([1.0]), "b": 3.0})
    >>> value.item(), gradient["w"].tolist(), gradient["b"].item()
    (5.0, [2.0], 1.0)
    """
    trees.check_function("value_and_grad", function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen("grad", argnums, args)
        run = _Linked("grad", function, args, kwargs, chosen, has_aux)
        value = run.value
        if not isinstance(value, Tensor) or prod(value.shape) != 1:
            shape = show_shape(value.shape) if isinstance(value, Tensor) else repr(value)[:60]
            raise ShapeError(
                f"grad of a function that returns {shape}",
                because="only a tensor of one element has a gradient by itself",
                fix="reduce it, as with .sum(); return (value, others) with has_aux=True; or use vjp",
            )
        _check_float("grad", value)
        one = value.uop.const_like(1).reshape((1,) * value.ndim).expand(value.shape)
        found = run.pulled([one], argnums)
        return ((value, run.aux), found) if has_aux else (value, found)

    return call


def vjp(function: Function, *primals: Any, has_aux: bool = False) -> Any:
    """The value at `primals`, and the function from the value's upstream gradient to the primals' gradients
    (the vector-Jacobian product, reverse mode).

    Returns (value, pull), or (value, pull, aux) with has_aux. Value and primals are tensors or trees of
    them. pull(upstream): upstream in the form and shapes of the value; a gradient like the primal for one,
    a tuple for several. It may be called often. Errors: DTypeError for what is no float, ShapeError and
    ArgumentError for upstreams of another shape or form.

    >>> value, pull = vjp(lambda x: x * x, Tensor([1.0, 2.0]))
    >>> value.tolist(), pull(Tensor([1.0, 10.0])).tolist()
    ([1.0, 4.0], [2.0, 40.0])
    """
    trees.check_function("vjp", function)
    which: Argnums = 0 if len(primals) == 1 else tuple(range(len(primals)))
    run = _Linked("vjp", function, primals, {}, _chosen("vjp", which, primals), has_aux)
    run.check_outputs()

    def pull(upstream: Any) -> Any:
        given = trees.checked("vjp", upstream, run.value, "the upstream gradient")
        return run.pulled([t.uop for t in given], which)

    return (run.value, pull, run.aux) if has_aux else (run.value, pull)


def jvp(function: Function, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> Any:
    """The value at `primals`, and how it changes, to first order, when they change by `tangents` (the
    Jacobian-vector product, forward mode).

    Returns (value, change), or (value, change, aux) with has_aux. primals, tangents: a list or tuple of the
    arguments, each a tensor or a tree; tangents in the form and shapes of the primals. Change: the form,
    shapes and dtypes of the value. Errors: as `vjp`.

    >>> x, y = Tensor([2.0]), Tensor([5.0])
    >>> value, change = jvp(lambda x, y: x * y, [x, y], [Tensor([1.0]), Tensor([0.1])])
    >>> value.tolist(), change.tolist()
    ([10.0], [5.199999809265137])
    """
    trees.check_function("jvp", function)
    if not isinstance(primals, (list, tuple)) or not isinstance(tangents, (list, tuple)):
        raise ArgumentError(
            "jvp: primals or tangents that are no sequence",
            because="there is one for each argument",
            fix="pass [x], [change of x]",
        )
    run = _Linked("jvp", function, primals, {}, range(len(primals)), has_aux)
    run.check_outputs()
    given = trees.checked("jvp", tuple(tangents), tuple(run.primals), "tangents")
    change = run.pushed([t.uop for t in given])
    return (run.value, change, run.aux) if has_aux else (run.value, change)


def jacobian(
    function: Function, argnums: Argnums = 0, mode: str = "reverse", has_aux: bool = False
) -> Function:
    """The function that computes all derivatives of `function`: an array of shape (*value's, *argument's).

    mode: "reverse" (a backward pass for each element of the value) or "forward" (a forward pass for each
    element of the argument); choose what has fewer elements. All passes are one batched graph. For trees:
    the tree of the value, with the tree of the argument at every leaf. argnums, has_aux and errors as
    `grad`, but the value may have any shape.

    >>> jacobian(lambda x: x * x)(Tensor([1.0, 2.0])).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    trees.check_function("jacobian", function)
    if mode not in ("reverse", "forward"):
        raise ArgumentError(
            f"jacobian(mode={mode!r})", because="there are two", fix='use "reverse" or "forward"'
        )
    build = _rows if mode == "reverse" else _columns

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen("jacobian", argnums, args)
        run = _Linked("jacobian", function, args, kwargs, chosen, has_aux)
        run.check_outputs()
        found = build(run, argnums)
        return (found, run.aux) if has_aux else found

    return call


def jacrev(function: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """`jacobian` in reverse mode.

    >>> jacrev(lambda x: x.sum())(Tensor([1.0, 2.0])).tolist()
    [1.0, 1.0]
    """
    return jacobian(function, argnums, "reverse", has_aux)


def jacfwd(function: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """`jacobian` in forward mode.

    >>> jacfwd(lambda x: x.exp())(Tensor(0.0)).item()
    1.0
    """
    return jacobian(function, argnums, "forward", has_aux)


def hessian(function: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """The function that computes all second derivatives of `function`, forward over reverse mode: an array of
    shape (*value's, *argument's, *argument's), for trees a tree of the argument at every leaf of the first
    derivative. Errors: as `jacobian`.

    >>> hessian(lambda x: (x**3).sum())(Tensor([1.0, 2.0])).tolist()
    [[6.0, 0.0], [0.0, 12.0]]
    """
    return jacfwd(jacrev(function, argnums, has_aux), argnums, has_aux)


# ---- one run of the function -------------------------------------------------------------------------------


class _Linked:
    """The function run on links: its value, and the derivatives between the two."""

    def __init__(
        self,
        what: str,
        function: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        chosen: Sequence[int],
        has_aux: bool,
    ) -> None:
        self.what = what
        linked = list(args)
        for n in chosen:
            linked[n] = trees.mapped(_linked, trees.floats(what, args[n], f"argument {n}"))
        self.primals = [linked[n] for n in chosen]
        self.inputs = [t.uop for t in trees.leaves(self.primals)]
        self.kept = linked  # the marks on these tensors let values that are read inside keep their history
        with transforming():
            result = function(*linked, **kwargs)
        self.value, self.aux = result, None
        if has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                raise ArgumentError(
                    f"{what} with has_aux: the function returned {repr(result)[:60]}",
                    because="a pair is expected",
                    fix="return (value, anything)",
                )
            self.value, self.aux = result

    def check_outputs(self) -> None:
        """Errors unless the value is a tree of floats."""
        for leaf in trees.leaves(self.value):
            if not isinstance(leaf, Tensor):
                raise ArgumentError(
                    f"{self.what} of a function that returns {repr(leaf)[:60]}",
                    because="its value must be a tensor or lists, tuples and dicts of tensors",
                    fix="return tensors; others with has_aux=True",
                )
            _check_float(self.what, leaf)

    @property
    def outputs(self) -> list[Tensor]:
        return trees.tensors(self.value)

    def pulled(self, upstreams: list[UOp], argnums: Argnums) -> Any:
        """Gradients in the form of the arguments."""
        found = gradient([t.uop for t in self.outputs], self.inputs, upstreams)
        wrapped = [_tensor(node, like) for node, like in zip(found, self.inputs, strict=True)]
        return self.arranged(wrapped, argnums)

    def pushed(self, changes: list[UOp]) -> Any:
        """Tangents in the form of the value."""
        nodes = [t.uop for t in self.outputs]
        found = tangents(nodes, self.inputs, changes)
        return trees.rebuilt(
            self.value, iter([_tensor(n, like) for n, like in zip(found, nodes, strict=True)])
        )

    def arranged(self, values: list[Any], argnums: Argnums) -> Any:
        """A value for each input, in the form of the arguments."""
        found = trees.rebuilt(tuple(self.primals), iter(values))
        return found[0] if isinstance(argnums, int) else found


def _linked(tensor: Tensor) -> Tensor:
    made = Tensor._wrap(link(tensor.uop))
    made._requires_grad = True
    Tensor.gradients_wanted = True
    return made


def _tensor(node: UOp | None, like: UOp) -> Tensor:
    """A derivative as a tensor; zeros for one that is not there."""
    if node is None:
        node = like.const_like(0).reshape((1,) * like.ndim).expand(like.shape)
    return Tensor._wrap(node)


def _chosen(what: str, argnums: Argnums, args: Sequence[Any]) -> list[int]:
    """The positions of the arguments that argnums names."""
    if not isinstance(argnums, (int, tuple, list)):
        raise ArgumentError(
            f"{what} by argument {argnums!r}", because="arguments have numbers", fix="pass an int, or a tuple"
        )
    found = []
    for n in [argnums] if isinstance(argnums, int) else argnums:
        if not isinstance(n, int) or not -len(args) <= n < len(args):
            raise ArgumentError(
                f"{what} by argument {n}",
                because=f"the function is called with {len(args)} positional arguments",
                fix="name arguments that are passed by position",
            )
        found.append(n % len(args))
    if len(set(found)) != len(found):
        raise ArgumentError(
            f"{what} by arguments {argnums}", because="one is named twice", fix="name each once"
        )
    return found


def _check_float(what: str, value: Tensor) -> None:
    if not value.dtype.is_float:
        raise DTypeError(
            f"{what} of a function that returns {value.dtype}",
            because="only floats have derivatives",
            fix="return a float",
        )


# ---- Jacobians ---------------------------------------------------------------------------------------------


def _basis(node: UOp) -> Tensor:
    """All unit vectors of a value's shape: (elements, *shape)."""
    count: Any = prod(node.shape)
    rows = Tensor.arange(count, dtype=dtypes.int64, device=node.device).reshape(count, 1)
    eye = rows.eq(Tensor.arange(count, dtype=dtypes.int64, device=node.device)).cast(node.dtype)
    return eye.reshape(count, *node.shape)


def _rows(run: _Linked, argnums: Argnums) -> Any:
    """Reverse mode: for every output, its gradients for all unit upstreams at once."""
    found = []
    for output in run.outputs:

        def pulled(upstream: Tensor, output: Tensor = output) -> list[Tensor]:
            parts = gradient([output.uop], run.inputs, [upstream.uop])
            return [_tensor(part, like) for part, like in zip(parts, run.inputs, strict=True)]

        rows = vmap(pulled)(_basis(output.uop))
        shaped = [row.reshape(*output.shape, *like.shape) for row, like in zip(rows, run.inputs, strict=True)]
        found.append(run.arranged(shaped, argnums))
    return trees.rebuilt(run.value, iter(found))


def _columns(run: _Linked, argnums: Argnums) -> Any:
    """Forward mode: for every input, the tangents of all outputs for all its unit changes at once."""
    nodes = [t.uop for t in run.outputs]
    columns: list[list[Tensor]] = []
    for one in run.inputs:

        def pushed(change: Tensor, one: UOp = one) -> list[Tensor]:
            parts = tangents(nodes, [one], [change.uop])
            return [_tensor(part, like) for part, like in zip(parts, nodes, strict=True)]

        found = vmap(pushed, out_axes=-1)(_basis(one))
        columns.append([t.reshape(*out.shape, *one.shape) for t, out in zip(found, nodes, strict=True)])
    by_output = [run.arranged([column[n] for column in columns], argnums) for n in range(len(nodes))]
    return trees.rebuilt(run.value, iter(by_output))

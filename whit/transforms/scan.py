"""scan: a loop over time whose step is traced, differentiated, scheduled and compiled once."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import Any

from whit.autograd.marks import transforming
from whit.helpers import ArgumentError, DTypeError, ShapeError, all_int
from whit.tensor import Tensor, storage
from whit.tensor import random as random_
from whit.tensor.storage import default_device
from whit.transforms import trees
from whit.transforms.loops import Input, Steps, input_of, loop
from whit.uop import Ops, UOp
from whit.uop.uop import show_shape


def scan(
    function: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`carry, y = function(carry, x)` for every x of xs in turn, from `init` on: the last carry, and all y.

    `init`, `xs`, carries and y are tensors or trees of them; None where there are none. The function runs
    once, on stand-ins: no cost in Python or in the compiler grows with the number of steps. Tensors from
    outside are the same for all steps, and get gradients like any other. Random numbers belong into `xs`.

    Shapes:  x has the shape of xs without axis 0, along which the steps lie; all y are stacked along axis 0;
             carries keep the shapes and dtypes of init
    length:  how many steps, where xs does not tell; `reverse`: the last step comes first, y stay in place
    Errors:  ShapeError and DTypeError for a carry that changes, ArgumentError for trees that do, for lengths
             that disagree, and for a function that reads values, assigns, or draws random numbers

    >>> total, sums = scan(lambda s, x: (s + x, s + x), Tensor(0.0), Tensor([1.0, 2.0, 3.0]))
    >>> total.item(), sums.tolist()
    (6.0, [1.0, 3.0, 6.0])
    """
    trees.check_function("scan", function)
    init, xs = _tensors("init", init), _tensors("xs", xs)
    count = _length(trees.tensors(xs), length)
    device = next((t.device for t in trees.tensors((init, xs)) if t.uop.device), None) or default_device()
    carries = [input_of(t.uop, t.shape, device) for t in trees.tensors(init)]
    stacked = [input_of(t.uop, t.shape[1:], device) for t in trees.tensors(xs)]
    after, gives = _traced(function, _filled(init, carries), _filled(xs, stacked))
    nexts = _checked(init, after)
    gives = _tensors("what a step gives", gives)
    roots = [t.uop for t in trees.tensors(gives)]
    if count == 0:
        empty = [Tensor.zeros(0, *root.shape, dtype=root.dtype, device=device) for root in roots]
        return init, _with(gives, empty)
    extra = [root for root in dict.fromkeys(roots) if root not in nexts]
    wanted = [*nexts, *extra]
    found = loop(Steps(count, reverse, device), carries, stacked, nexts, extra) if wanted else []
    stacks = dict(zip(wanted, found, strict=True))
    last = [Tensor._wrap(stack)[0 if reverse else -1] for stack in found[: len(nexts)]]
    return _with(init, last), _with(gives, [Tensor._wrap(stacks[root]) for root in roots])


def _tensors(what: str, tree: Any) -> Any:
    """The tree with numbers as tensors; None stays. ArgumentError for other leaves, and symbolic shapes."""

    def check(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not isinstance(leaf, (Tensor, bool, int, float)):
            raise ArgumentError(
                f"scan: {what} holds {repr(leaf)[:60]}",
                because="it is no tensor",
                fix="use tensors, in lists, tuples or dicts, or None",
            )
        tensor = Tensor._of(leaf)
        if not all_int(tensor.shape):
            raise ShapeError(
                f"scan: {what} of shape {show_shape(tensor.shape)}",
                because="the pieces of memory of a step must be known",
                fix="use a fixed size, and mask what is beyond the variable's value",
            )
        return tensor

    return trees.mapped(check, tree)


def _length(stacked: Sequence[Tensor], length: int | None) -> int:
    """How many steps there are."""
    for tensor in stacked:
        if not tensor.ndim:
            raise ShapeError(
                "scan over a scalar",
                because="steps lie along axis 0, and shape () has none",
                fix="take what is the same for all steps from outside of the function",
            )
    sizes = [int(tensor.shape[0]) for tensor in stacked] + ([] if length is None else [length])
    if not sizes:
        raise ArgumentError(
            "scan without xs and length", because="nothing tells the number of steps", fix="give length="
        )
    if not isinstance(sizes[-1], int) or sizes[-1] < 0 or len(set(sizes)) > 1:
        raise ArgumentError(
            f"scan over {', '.join([str(size) for size in sizes])} steps",
            because="xs and length must agree on a number of at least 0",
            fix="give xs of one length along axis 0",
        )
    return sizes[0]


def _with(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree with other tensors; None stays."""
    following = iter(tensors)
    return trees.mapped(lambda leaf: next(following) if isinstance(leaf, Tensor) else leaf, tree)


def _filled(tree: Any, inputs: Sequence[Input]) -> Any:
    return _with(tree, [Tensor._wrap(one.shaped) for one in inputs])


def _traced(function: Callable[[Any, Any], Any], carry: Any, x: Any) -> tuple[Any, Any]:
    """What the function makes of stand-ins. ArgumentError for what cannot be done again in every step."""
    keys: list[UOp] = []
    thread = get_ident()

    def see(node: UOp, data: memoryview) -> None:
        if get_ident() == thread:
            keys.append(node)

    before = [(t, t.uop) for t in Tensor.live]
    storage.on_put.append(see)
    try:
        with transforming(traces=True):
            result = function(carry, x)
    finally:
        storage.on_put.remove(see)
    changed = [(t, uop) for t, uop in before if t.uop is not uop and t.uop.op is Ops.AFTER]
    for tensor, uop in changed:
        tensor.uop = uop
    if changed:
        raise ArgumentError(
            f"scan: the function assigns to a tensor of shape {show_shape(changed[0][1].shape)}",
            because="it runs once for all steps",
            fix="let the carry hold what changes from step to step",
        )
    if any(node in random_.key_buffers for node in keys):
        raise ArgumentError(
            "scan: random numbers inside of the function",
            because="it runs once, and every step would get the same ones",
            fix="draw them outside, one row for each step, and pass them in xs",
        )
    if not isinstance(result, tuple) or len(result) != 2:
        raise ArgumentError(
            f"scan: the function returned {repr(result)[:60]}",
            because="it gives the next carry, and what the step gives",
            fix="return (carry, y), with None for what there is not",
        )
    return result


def _checked(init: Any, after: Any) -> list[UOp]:
    """The next carries, which must be like the first ones."""
    after = _tensors("the next carry", after)
    if trees.structure(init) != trees.structure(after) or len(trees.tensors(init)) != len(
        trees.tensors(after)
    ):
        raise ArgumentError(
            "scan: the function returns a carry of another form than init",
            because=f"there are {len(trees.tensors(after))} tensors for "
            f"{len(trees.tensors(init))}, or other containers",
            fix="return the same lists, tuples and dicts",
        )
    for number, (was, now) in enumerate(zip(trees.tensors(init), trees.tensors(after), strict=True)):
        if was.shape != now.shape:
            raise ShapeError(
                f"scan: tensor {number} of the carry is {show_shape(was.shape)} before a step and "
                f"{show_shape(now.shape)} after it",
                because="all steps are the same",
                fix="give init the shape that it has later",
            )
        if was.dtype is not now.dtype:
            raise DTypeError(
                f"scan: tensor {number} of the carry is {was.dtype} before a step and {now.dtype} after it",
                because="all steps are the same",
                fix=f"cast init to {now.dtype}, or the new carry to {was.dtype}",
            )
    return [t.uop for t in trees.tensors(after)]

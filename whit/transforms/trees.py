"""Trees of tensors: lists, tuples (named ones too) and dicts, nested; everything else is a leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.tensor import Tensor
from whit.uop import DType
from whit.uop.uop import show_shape


def leaves(tree: Any) -> list[Any]:
    """The leaves in order; dicts in the order of their keys' insertion.

    >>> leaves({"a": [1, 2], "b": (3, None)})
    [1, 2, 3, None]
    """
    found: list[Any] = []
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
        else:
            found.append(item)
    return found


def rebuilt(tree: Any, values: Iterator[Any]) -> Any:
    """The same tree with other leaves.

    >>> rebuilt({"a": [1, 2]}, iter("xy"))
    {'a': ['x', 'y']}
    """
    if isinstance(tree, (list, tuple)):
        items = [rebuilt(item, values) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {name: rebuilt(item, values) for name, item in tree.items()}
    return next(values)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree of function(leaf)."""
    return rebuilt(tree, iter([function(leaf) for leaf in leaves(tree)]))


def tensors(tree: Any) -> list[Tensor]:
    """The leaves that are tensors."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def structure(tree: Any) -> Any:
    """What tells trees of the same form apart from others: hashable."""
    if isinstance(tree, (list, tuple)):
        return type(tree), *[structure(item) for item in tree]
    if isinstance(tree, dict):
        return dict, tuple(tree), *[structure(item) for item in tree.values()]
    return None


def checked(what: str, tree: Any, like: Any, name: str) -> list[Tensor]:
    """The tensors of a tree that must have the form, the shapes and the (float) dtypes of another one. A
    number stands for a tensor of shape ()."""
    if structure(tree) != structure(like):
        raise ArgumentError(
            f"{what}: {name} of another form than the values",
            because=f"there are {len(leaves(tree))} leaves for {len(leaves(like))}, or other containers",
            fix=f"give {name} as the same lists, tuples and dicts",
        )
    found = []
    for given, wanted in zip(leaves(tree), leaves(like), strict=True):
        if not isinstance(wanted, Tensor):
            continue
        tensor = Tensor._of(given)
        if tensor.shape != wanted.shape:
            raise ShapeError(
                f"{what}: {name} of shape {show_shape(tensor.shape)}",
                because=f"the value has shape {show_shape(wanted.shape)}",
                fix=f"give {name} in the value's shape",
            )
        if not tensor.dtype.is_float:
            raise DTypeError(
                f"{what}: {name} of dtype {tensor.dtype}",
                because="it must be a float",
                fix=f"cast it to {wanted.dtype}",
            )
        found.append(tensor.cast(wanted.dtype))
    return found


def check_function(what: str, function: Any) -> None:
    """ArgumentError for what cannot be called."""
    if not callable(function):
        raise ArgumentError(
            f"{what} of {repr(function)[:60]}", because="it is no function", fix="pass a function of tensors"
        )


def floats(what: str, tree: Any, name: str) -> Any:
    """The tree with Python floats as tensors. Errors for leaves by which nothing can be differentiated."""

    def check(leaf: Any) -> Tensor:
        if isinstance(leaf, Tensor) or (isinstance(leaf, (int, float)) and not isinstance(leaf, bool)):
            tensor = leaf if isinstance(leaf, Tensor) else Tensor(float(leaf))
            if not tensor.dtype.is_float:
                raise _no_float(what, name, tensor.dtype)
            return tensor
        raise ArgumentError(
            f"{what}: {name} holds {repr(leaf)[:60]}",
            because="only tensors (in lists, tuples and dicts) have derivatives",
            fix="wrap it: Tensor(…), or name another argument in argnums",
        )

    return mapped(check, tree)


def _no_float(what: str, name: str, dtype: DType) -> DTypeError:
    return DTypeError(
        f"{what}: {name} holds a {dtype} tensor",
        because="only floats have derivatives",
        fix="cast it to a float, or name another argument in argnums",
    )

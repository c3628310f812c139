"""The notation of einops' `rearrange`: parse a formula into reshape, permute, reshape."""

from __future__ import annotations

import re
from typing import Any

from whit.helpers import ArgumentError, ShapeError, prod
from whit.uop import Shape
from whit.uop.uop import show_shape

Group = list[str]
BARE = "… alone"  # an ellipsis that is not in parentheses


def plan(
    formula: str, shape: Shape, known: dict[str, int]
) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...]]:
    """(first reshape, permutation, last reshape) that carry out `formula` on a tensor of `shape`.

    >>> plan("(a b) c -> c b a", (6, 5), {"a": 2})
    ((2, 3, 5), (2, 1, 0), (5, 3, 2))
    """
    left_text, arrow, right_text = formula.partition("->")
    if not arrow or "->" in right_text:
        raise _error(formula, 'it has no single "->"', 'write "left -> right"')
    left, right = _parse(left_text, formula), _parse(right_text, formula)
    dots = len(shape) - sum(1 for group in left if group != [BARE])
    left, right = _spread(left, dots), _spread(right, dots)
    if len(left) != len(shape):
        raise ShapeError(
            f"rearrange({formula!r}) of shape {show_shape(shape)}",
            because=f"the left side names {len(left)} axes and the tensor has {len(shape)}",
            fix="name every axis, or use ...",
        )
    size = _sizes(left, shape, known, formula)
    names, wanted = [n for g in left for n in g], [n for g in right for n in g]
    new = [n for n in wanted if n not in size]
    if (
        new
        or sorted(set(names)) != sorted(set(wanted))
        or len(names) != len(set(names))
        or len(wanted) != len(set(wanted))
    ):
        odd = sorted(set(names) ^ set(wanted)) or [n for n in names + wanted if (names + wanted).count(n) > 2]
        raise _error(
            formula,
            f"each axis must be once on both sides, unlike {', '.join(odd) or 'here'}",
            "correct the names",
        )
    order = tuple([names.index(n) for n in wanted])
    return tuple([size[n] for n in names]), order, tuple([prod([size[n] for n in g]) for g in right])


def _parse(text: str, formula: str) -> list[Group]:
    """Names in order; those in one pair of parentheses share a group. The size 1 is an empty group."""
    groups: list[Group] = []
    inside: Group | None = None
    for token in re.findall(r"\.\.\.|[A-Za-z_]\w*|\d+|\S", text):
        if token == "(" and inside is None:
            inside = []
        elif token == ")" and inside is not None:
            groups.append(inside)
            inside = None
        elif token == "1":
            if inside is None:
                groups.append([])
        elif token == "..." or token.isidentifier():
            if inside is None:
                groups.append([BARE if token == "..." else token])
            else:
                inside.append(token)
        else:
            raise _error(
                formula, f"{token!r} cannot stand there", "use names, 1, ..., and one level of parentheses"
            )
    if inside is not None:
        raise _error(formula, "a parenthesis is not closed", "close it")
    return groups


def _spread(groups: list[Group], count: int) -> list[Group]:
    """`...` as that many axes of their own names."""
    result: list[Group] = []
    names = [f".{i}" for i in range(count)]
    for group in groups:
        if group == [BARE]:
            result += [[n] for n in names]
        else:
            result.append([n for part in group for n in (names if part == "..." else [part])])
    return result


def _sizes(left: list[Group], shape: Shape, known: dict[str, int], formula: str) -> dict[str, Any]:
    size: dict[str, Any] = {}
    for group, total in zip(left, shape):
        missing = [n for n in group if n not in known]
        have = prod([known[n] for n in group if n in known])
        if len(missing) > 1:
            raise _error(formula, f"the sizes of {' and '.join(missing)} are unknown", f"pass {missing[0]}=…")
        fits = total == have if not missing else have != 0 and total % have == 0
        if not fits:
            raise ShapeError(
                f"rearrange({formula!r}) of shape {show_shape(shape)}",
                because=f"({' '.join(group)}) of {have} does not divide {total}",
                fix="correct the sizes",
            )
        size.update({n: known[n] for n in group if n in known})
        size.update({n: total // have for n in missing})
    unknown = [n for n in known if n not in size]
    if unknown:
        raise _error(formula, f"{unknown[0]} is not on the left side", "remove that argument")
    return size


def _error(formula: str, because: str, fix: str) -> ArgumentError:
    return ArgumentError(f"rearrange({formula!r})", because=because, fix=fix)

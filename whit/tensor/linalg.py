"""Products of matrices and the like: all of them are a broadcast multiplication and a sum."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from whit.helpers import ArgumentError, ShapeError
from whit.tensor.base import check_devices
from whit.tensor.indexing import NARROW, IndexingMixin
from whit.tensor.selection import plain
from whit.uop import DType, Ops, Shape, Sint, UOp, broadcast_shapes, dtypes
from whit.uop.dtype import common_dtype, to_dtype
from whit.uop.uop import show_shape, show_size


class LinalgMixin(IndexingMixin):
    """Methods of the linalg family."""

    def matmul(self, other: Any, reverse: bool = False, dtype: DType | str | None = None) -> Self:
        """The matrix product by NumPy's rules: 1-D operands are a row (left) or a column (right), axes before
        the last two are batches and broadcast.

        Shapes: (…, m, k) and (…, k, n) -> (…, m, n). Dtypes: promoted; half, bfloat16 and 8-bit floats are
        multiplied and added up in float32 and rounded once. dtype: of the sum and the result. Errors:
        ShapeError.

        >>> Tensor([[1, 2], [3, 4]]).matmul(Tensor([1, 1])).tolist()
        [3, 7]
        """
        mine, theirs = self.uop, self._of(other).uop
        left, right = (theirs, mine) if reverse else (mine, theirs)
        return self._wrap(matmul_uop(left, right, None if dtype is None else to_dtype(dtype)))

    def dot(self, w: Any, dtype: DType | str | None = None) -> Self:
        """`matmul` (with batches broadcast; NumPy's `dot` of more than two axes is `tensordot`)."""
        return self.matmul(w, dtype=dtype)

    def __matmul__(self, other: Any) -> Self:
        return self.matmul(other)

    def __rmatmul__(self, other: Any) -> Self:
        return self.matmul(other, reverse=True)

    def __imatmul__(self, other: Any) -> Self:
        return self.matmul(other)

    def linear(self, weight: Any, bias: Any = None, dtype: DType | str | None = None) -> Self:
        """self @ weight + bias; a 1-D weight multiplies elementwise.

        Shapes: (…, k), weight (k, n), bias (n,) -> (…, n).

        >>> Tensor([[1.0, 2.0]]).linear(Tensor([[1.0], [10.0]]), Tensor([0.5])).tolist()
        [[21.5]]
        """
        weight = self._of(weight)
        if dtype is not None:
            wanted = to_dtype(dtype)
            return self.cast(wanted).linear(weight.cast(wanted), None if bias is None
                                            else self._of(bias).cast(wanted))
        product: Self = self * weight if weight.ndim == 1 else self.matmul(weight)
        return product if bias is None else product + bias

    def outer(self, other: Any) -> Self:
        """All products of two flattened tensors. Shapes: (m,), (n,) -> (m, n).

        >>> Tensor([1, 2]).outer(Tensor([3, 4])).tolist()
        [[3, 4], [6, 8]]
        """
        other = self._of(other)
        return self.reshape(-1, 1).mul(other.reshape(1, -1))

    def inner(self, other: Any) -> Self:
        """The sum of products over the last axis of both (NumPy's `inner`). Shapes: (…a, k), (…b, k) -> (…a,
        …b).

        >>> Tensor([1, 2]).inner(Tensor([3, 4])).item()
        11
        """
        other = self._of(other)
        if self.ndim == 0 or other.ndim == 0:
            return self.mul(other)
        return self.tensordot(other, ([-1], [-1]))

    def tensordot(self, other: Any, dims: int | tuple[Sequence[int], Sequence[int]] = 2) -> Self:
        """The sum of products over pairs of axes. dims: a number n (the last n of self with the first n of
        other), or the two lists of axes. Shape: the remaining axes of self, then of other.

        >>> Tensor([[1, 2], [3, 4]]).tensordot(Tensor([[1, 2], [3, 4]]), 2).item()
        30
        """
        other = self._of(other)
        if isinstance(dims, int):
            if not 0 <= dims <= min(self.ndim, other.ndim):
                raise ShapeError(
                    f"tensordot of {show_shape(self.shape)} and {show_shape(other.shape)} over {dims} axes",
                    because="one of them has fewer",
                    fix="choose a number from 0 to the smaller rank")
            mine: list[int] = list(range(self.ndim - dims, self.ndim))
            theirs: list[int] = list(range(dims))
        else:
            mine, theirs = [list(axes) for axes in dims]
            mine = [self._axis(axis, "tensordot") for axis in mine]
            theirs = [other._axis(axis, "tensordot") for axis in theirs]
        labels = _tensordot_labels(self.uop.shape, other.uop.shape, mine, theirs)
        return self._wrap(_contract(self.uop, labels[0], other.uop, labels[1], labels[2]))

    def kron(self, other: Any) -> Self:
        """The Kronecker product: every element of self times all of other, as blocks. Shapes multiply axis by
        axis.

        >>> Tensor([1, 2]).kron(Tensor([1, 10])).tolist()
        [1, 10, 2, 20]
        """
        other = self._of(other)
        rank = max(self.ndim, other.ndim)
        a, b = [(1,) * (rank - t.ndim) + t.uop.shape for t in (self, other)]
        left = self.reshape(*[size for n in a for size in (n, 1)])
        right = other.reshape(*[size for n in b for size in (1, n)])
        return left.mul(right).reshape(*[m * n for m, n in zip(a, b, strict=True)])

    def cross(self, other: Any, dim: int = -1) -> Self:
        """The cross product of vectors of length 3 along dim; shapes broadcast.

        >>> Tensor([1, 0, 0]).cross(Tensor([0, 1, 0])).tolist()
        [0, 0, 1]
        """
        other = self._of(other)
        axis = self._axis(dim, "cross")
        if self.shape[axis] != 3 or other.ndim != self.ndim or other.shape[axis] != 3:
            raise ShapeError(
                f"cross of {show_shape(self.shape)} and {show_shape(other.shape)} along axis {axis}",
                because="both must have the same rank and 3 elements there",
                fix="choose the axis of size 3")
        first = self.roll(-1, axis).mul(other.roll(-2, axis))
        return first.sub(self.roll(-2, axis).mul(other.roll(-1, axis)))

    def norm(self, ord: float = 2, axis: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Self:
        """The p-norm of all elements, or along axes: (sum |x|**p)**(1/p); inf and -inf give the largest and
        the smallest |x|, 0 counts what is not 0. Narrow floats are computed in float32.

        >>> Tensor([3.0, 4.0]).norm().item()
        5.0
        """
        x = self.cast(_wide(self.dtype)) if self.dtype.is_float else self.cast(dtypes.default_float)
        size = x.abs()
        if ord in (math.inf, -math.inf):
            result = size.max(axis, keepdim) if ord > 0 else size.min(axis, keepdim)
        elif ord == 0:
            result = x.ne(0).cast(x.dtype).sum(axis, keepdim)
        elif ord == 1:
            result = size.sum(axis, keepdim)
        elif ord == 2:
            result = x.square().sum(axis, keepdim).sqrt()
        else:
            result = size.pow(ord).sum(axis, keepdim).pow(1 / ord)
        return result.cast(self.dtype) if self.dtype.is_float else result

    vector_norm = norm

    def newton_schulz(self, steps: int, params: Sequence[float], eps: float = 1e-7) -> Self:
        """Push the singular values of a matrix (or a stack of them) towards 1 by iterating an odd polynomial:
        x <- (params[0] + params[1] * x xᵀ + params[2] * (x xᵀ)² + …) x, from x divided by its Frobenius norm
        plus eps.

        Shape: (…, m, n) -> the same. Used by Muon (Jordan et al. 2024).
        """
        if self.ndim < 2 or steps < 0 or not params:
            raise ArgumentError(
                f"newton_schulz of {show_shape(self.shape)} with {steps} steps and {len(params)} "
                "coefficients",
                because="it takes a matrix, steps >= 0 and a coefficient",
                fix="reshape to two axes")
        tall = self.shape[-2] > self.shape[-1]
        x = self.transpose(-2, -1) if tall else self
        x = x.div(x.norm(2, (-2, -1), keepdim=True).add(eps))
        for _ in range(steps):
            square, total = x.matmul(x.transpose(-2, -1)), x.mul(params[-1])
            for coefficient in reversed(params[:-1]):  # Horner's scheme
                total = square.matmul(total).add(x.mul(coefficient))
            x = total
        return x.transpose(-2, -1) if tall else x

    def trace(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Self:
        """The sum along a diagonal of two axes, which vanish; `offset` above it when positive. Integers keep
        their dtype.

        >>> Tensor([[1, 2], [3, 4]]).trace().item()
        5
        """
        first, second = self._axis(dim1, "trace"), self._axis(dim2, "trace")
        if first == second:
            raise ShapeError(f"trace over axes {dim1} and {dim2}", because="they are the same axis",
                             fix="name two axes")
        others = tuple([axis for axis in range(self.ndim) if axis not in (first, second)])
        u = self.uop.permute((*others, first, second))
        rows, columns = u.shape[-2:]
        low, high = max(0, -offset), max(0, offset)
        if not isinstance(rows, int) or not isinstance(columns, int):
            raise ShapeError(f"trace of {show_shape(self.shape)}", because="its sizes are symbolic",
                             fix="shrink it first")
        length = max(0, min(rows - low, columns - high))
        if length == 0:
            u = u.shrink((*[(0, n) for n in u.shape[:-2]], (0, 0), (0, 0)))
            return self._wrap(u.reduce(Ops.ADD, (u.ndim - 2, u.ndim - 1)))
        u = u.shrink((*[(0, n) for n in u.shape[:-2]], (low, low + length), (high, high + length)))
        return self._wrap(_sum(diagonal(u), (u.ndim - 2,)))

    @classmethod
    def einsum(cls, formula: str, *operands: Any, dtype: DType | str | None = None) -> Self:
        """Einstein's summation: labels name axes, a label that the result lacks is summed over, a label twice
        in one operand takes the diagonal, `...` stands for axes that broadcast. Without -> the result has the
        labels that occur once, sorted.

        Errors: ArgumentError for a formula that does not parse; ShapeError where ranks or sizes do not fit
        it.

        >>> Tensor.einsum("ij,jk->ik", Tensor([[1, 2]]), Tensor([[3], [4]])).tolist()
        [[11]]
        """
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = tuple(operands[0])
        tensors = [cls._of(operand) for operand in operands]
        inputs, output = _parse_formula(formula, [t.uop.shape for t in tensors])
        common = common_dtype(*[t.dtype for t in tensors]) if dtype is None else to_dtype(dtype)
        check_devices("einsum", *[t.uop for t in tensors])
        return cls._wrap(_einsum([t.uop.cast(common) for t in tensors], inputs, output))


# ---- on nodes ----------------------------------------------------------------------------------------------


def _wide(dtype: DType) -> DType:
    return dtypes.float32 if dtype in NARROW else dtype


def _sum(u: UOp, axes: tuple[int, ...]) -> UOp:
    """A sum in float32 or wider, in u's dtype."""
    return u.cast(_wide(u.dtype)).reduce(Ops.ADD, axes).cast(u.dtype)


def sum_of_products(a: UOp, b: UOp, axes: tuple[int, ...], dtype: DType | None = None) -> UOp:
    """sum(a * b) over axes of the broadcast product, for operands of one dtype; narrow floats multiply in
    float32."""
    result = dtype or a.dtype
    wide = _wide(result)
    return (a.cast(wide) * b.cast(wide)).reduce(Ops.ADD, axes).cast(result)


def matmul_uop(a: UOp, b: UOp, dtype: DType | None = None) -> UOp:
    """The matrix product of nodes."""
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"matmul of {show_shape(a.shape)} and {show_shape(b.shape)}",
                         because="a scalar has no axis to sum over",
                         fix="use * to scale")
    k, other = a.shape[-1], b.shape[-2 if b.ndim > 1 else -1]
    if k is not other and k != other and plain(k) is not plain(other):
        raise ShapeError(f"matmul: left is {show_shape(a.shape)}, right is {show_shape(b.shape)}",
                         because=f"the last axis of left ({show_size(k)}) must equal the "
                                 f"{'second-last' if b.ndim > 1 else 'only'} axis of right "
                                 f"({show_size(other)})",
                         fix="transpose one of them, or reshape so that the inner sizes agree")
    if a.dtype is not b.dtype:
        common = common_dtype(a.dtype, b.dtype)
        a, b = a.cast(common), b.cast(common)
    check_devices("matmul", a, b)
    rows, columns = a.ndim > 1, b.ndim > 1
    left = a.reshape((*a.shape[:-1], 1, k))  # (…, m, 1, k)
    right = b if not columns else b.permute((*range(b.ndim - 2), b.ndim - 1, b.ndim - 2))  # (…, n, k)
    if columns:
        right = right.reshape((*right.shape[:-2], *((1,) if rows else ()), *right.shape[-2:]))  # (…, 1, n, k)
    try:
        shape = broadcast_shapes(left.shape, right.shape)
    except ShapeError as error:
        raise ShapeError(f"matmul: left is {show_shape(a.shape)}, right is {show_shape(b.shape)}",
                         because=f"the batch axes do not broadcast: {error.because}",
                         fix="reshape or expand one of them") from None
    product = sum_of_products(left, right, (len(shape) - 1,), dtype)  # (…, m, n)
    return product if columns else product.reshape(product.shape[:-1])


def diagonal(u: UOp) -> UOp:
    """The diagonal of the last two axes, of equal size: (…, n, n) -> (…, n)."""
    batch, n = u.shape[:-2], u.shape[-1]
    keep = tuple([(0, size) for size in batch])
    flat = u.reshape((*batch, n * n)).pad((*[(0, 0)] * len(batch), (0, n)))
    return flat.reshape((*batch, n, n + 1)).shrink((*keep, (0, n), (0, 1))).reshape((*batch, n))


def _tensordot_labels(a: Shape, b: Shape, mine: list[int], theirs: list[int]) -> tuple[list[int], list[int],
                                                                                       list[int]]:
    sizes = [(a[i], b[j]) for i, j in zip(mine, theirs, strict=False)]
    paired = len(mine) == len(theirs) == len(set(mine)) == len(set(theirs))
    if not paired or any(x is not y and x != y for x, y in sizes):
        raise ShapeError(
            f"tensordot of {show_shape(a)} over axes {mine} and {show_shape(b)} over axes {theirs}",
            because="the axes must come in pairs of equal size, each named once",
            fix="choose other axes")
    left = list(range(len(a)))
    right = [len(a) + axis for axis in range(len(b))]
    for i, j in zip(mine, theirs, strict=True):
        right[j] = left[i]
    kept = [label for label in left if label not in right] + [label for label in right if label not in left]
    return left, right, kept


# ---- einsum ------------------------------------------------------------------------------------------------

Labels = Sequence[Any]


def _parse_formula(formula: str, shapes: list[Shape]) -> tuple[list[list[str]], list[str]]:
    """The labels of each operand and of the result; `...` is written out as labels "0", "1", … counted from
    the right."""
    text = formula.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise ArgumentError(f"einsum {formula!r} with {len(shapes)} operands",
                            because=f"the formula names {len(terms)}",
                            fix="give as many operands as there are terms")
    inputs = [_labels(formula, term, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    dots = max([sum(label.isdigit() for label in labels) for labels in inputs])
    spread = [str(i) for i in reversed(range(dots))]
    if arrow:
        output = _labels(formula, right, None, spread)
    else:
        counts: dict[str, int] = {}
        for labels in inputs:
            for label in labels:
                counts[label] = counts.get(label, 0) + 1
        output = spread + sorted(label for label, count in counts.items() if count == 1
                                 and not label.isdigit())
    known = {label for labels in inputs for label in labels}
    wrong = [label for label in output if label not in known or output.count(label) > 1]
    if wrong:
        raise ArgumentError(f"einsum {formula!r}",
                            because=f"the result's label {wrong[0]!r} occurs twice or in no operand",
                            fix="name each axis of the result once, from the operands")
    return inputs, output


def _labels(formula: str, term: str, rank: int | None, spread: list[str] | None = None) -> list[str]:
    head, dots, tail = term.partition("...")
    named = [*head, *tail]
    if any(not label.isalpha() for label in named):
        raise ArgumentError(f"einsum {formula!r}", because=f"{term!r} is no list of letters",
                            fix="use letters, commas, ... and ->")
    if rank is not None and (len(named) > rank or (len(named) < rank and not dots)):
        raise ShapeError(f"einsum {formula!r}",
                         because=f"{term!r} names {len(named)} axes, the operand has {rank}",
                         fix="name every axis, or use ...")
    if spread is None:
        spread = [str(i) for i in reversed(range((rank or 0) - len(named)))] if dots else []
    return [*head, *(spread if dots else []), *tail]


def _einsum(operands: list[UOp], inputs: list[list[str]], output: list[str]) -> UOp:
    """Contract from left to right; a label is summed as soon as nothing to come needs it."""
    terms: list[tuple[UOp, list[str]]] = []
    for position, (u, labels) in enumerate(zip(operands, inputs, strict=True)):
        elsewhere = {label for i, other in enumerate(inputs) if i != position
                     for label in other} | set(output)
        terms.append(_drop(*_diagonals(u, labels), elsewhere))
    u, labels = terms[0]
    for position, (v, more) in enumerate(terms[1:], 1):
        needed = {label for _, other in terms[position + 1:] for label in other} | set(output)
        kept = [label for label in dict.fromkeys([*labels, *more]) if label in needed]
        u, labels = _contract(u, labels, v, more, kept), kept
    return u.permute(tuple([labels.index(label) for label in output]))


def _diagonals(u: UOp, labels: list[str]) -> tuple[UOp, list[str]]:
    """Axes of one label become one, their diagonal."""
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if repeated is None:
        return u, labels
    first = labels.index(repeated)
    second = labels.index(repeated, first + 1)
    if u.shape[first] != u.shape[second]:
        raise ShapeError(f"einsum: label {repeated!r} of an operand of shape {show_shape(u.shape)}",
                         because=f"its axes have sizes {show_size(u.shape[first])} and "
                                 f"{show_size(u.shape[second])}", fix="give them one size")
    others = [axis for axis in range(u.ndim) if axis not in (first, second)]
    return _diagonals(diagonal(u.permute((*others, first, second))),
                      [*[labels[axis] for axis in others], repeated])


def _drop(u: UOp, labels: list[str], needed: set[str]) -> tuple[UOp, list[str]]:
    axes = tuple([axis for axis, label in enumerate(labels) if label not in needed])
    return _sum(u, axes), [label for label in labels if label in needed]


def _contract(a: UOp, mine: Labels, b: UOp, theirs: Labels, kept: Labels) -> UOp:
    """sum(a * b) over all labels that are not kept. Shape: kept's sizes in order."""
    if a.dtype is not b.dtype:
        common = common_dtype(a.dtype, b.dtype)
        a, b = a.cast(common), b.cast(common)
    check_devices("product", a, b)
    summed = [label for label in dict.fromkeys([*mine, *theirs]) if label not in kept]
    order = [*kept, *summed]
    left, right = _aligned(a, mine, order), _aligned(b, theirs, order)
    for label, x, y in zip(order, left.shape, right.shape, strict=True):
        if x is not y and x != y and x != 1 and y != 1:
            raise ShapeError(f"einsum: axes labelled {label!r} have sizes {show_size(x)} and {show_size(y)}",
                             because="one label is one size", fix="rename the label or reshape an operand")
    if not summed:
        return left * right
    return sum_of_products(left, right, tuple(range(len(kept), len(order))))


def _aligned(u: UOp, labels: Labels, order: Labels) -> UOp:
    """Axes in the given order, size 1 for labels that u lacks."""
    present = [label for label in order if label in labels]
    u = u.permute(tuple([labels.index(label) for label in present]))
    sizes = dict(zip(present, u.shape, strict=True))
    shape: list[Sint] = [sizes.get(label, 1) for label in order]
    return u.reshape(tuple(shape))


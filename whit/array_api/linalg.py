"""The extension for linear algebra; the functions that belong to the core stand here too."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from whit.array_api.checks import check_all
from whit.array_api.dtypes import result_type
from whit.helpers import ArgumentError, ShapeError
from whit.tensor import Tensor
from whit.uop import DType
from whit.uop.uop import show_shape


class Eigh(NamedTuple):
    """Eigenvalues in rising order, and the eigenvectors as columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QR(NamedTuple):
    """Q with orthonormal columns, R upper triangular."""

    Q: Tensor
    R: Tensor


class SlogDet(NamedTuple):
    """The sign of a determinant and the logarithm of its size."""

    sign: Tensor
    logabsdet: Tensor


class SVD(NamedTuple):
    """U S Vh; S in falling order."""

    U: Tensor
    S: Tensor
    Vh: Tensor


# ---- products


def matmul(x1: Tensor, x2: Tensor, /) -> Tensor:
    """The matrix product; axes before the last two are batches. Neither may be a scalar."""
    if not x1.ndim or not x2.ndim:
        raise ShapeError("matmul with a scalar", because="it multiplies matrices", fix="use multiply")
    return x1.matmul(x2)


def matrix_transpose(x: Tensor, /) -> Tensor:
    """The last two axes exchanged."""
    return x.mT


def outer(x1: Tensor, x2: Tensor, /) -> Tensor:
    """All products of two vectors' elements."""
    if x1.ndim != 1 or x2.ndim != 1:
        raise ShapeError(
            f"outer of shapes {show_shape(x1.shape)} and {show_shape(x2.shape)}",
            because="it takes vectors",
            fix="flatten them",
        )
    return x1.reshape(-1, 1) * x2.reshape(1, -1)


def tensordot(x1: Tensor, x2: Tensor, /, *, axes: Any = 2) -> Tensor:
    """Sums of products over pairs of axes: so many last ones of x1 with first ones of x2, or those named."""
    dtype = result_type(x1, x2)
    return x1.cast(dtype).tensordot(x2.cast(dtype), axes)


def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """Sums of products along one axis, counted from the end and equally long in both.

    >>> vecdot(Tensor([[1, 2], [3, 4]]), Tensor([10, 1])).tolist()
    [12, 34]
    """
    if axis >= 0 or -axis > min(x1.ndim, x2.ndim) or x1.shape[axis] != x2.shape[axis]:
        raise ShapeError(
            f"vecdot of shapes {show_shape(x1.shape)} and {show_shape(x2.shape)} along axis {axis}",
            because="the axis is counted from the end, and equally long in both",
            fix="choose such an axis",
        )
    dtype = result_type(x1, x2)
    return (x1.cast(dtype) * x2.cast(dtype)).sum(axis, dtype=dtype)


def cross(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """Cross products of vectors of three elements along an axis."""
    return x1.cross(x2, axis)


# ---- diagonals and norms


def diagonal(x: Tensor, /, *, offset: int = 0) -> Tensor:
    """The diagonals of the last two axes."""
    return x.diagonal(offset, -2, -1)


def trace(x: Tensor, /, *, offset: int = 0, dtype: DType | None = None) -> Tensor:
    """The sums of the diagonals of the last two axes; dtypes as `sum`."""
    return x.diagonal(offset, -2, -1).sum(-1, dtype=dtype)


def vector_norm(
    x: Tensor, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, ord: float = 2
) -> Tensor:
    """The norm of vectors along axes (None: of all elements): any order, also 0 and ±inf.

    >>> vector_norm(Tensor([3.0, 4.0])).item()
    5.0
    """
    x = x._float()
    axes = x._axes(axis, "vector_norm")
    size = x.abs()
    if ord == math.inf:
        return size.max(axes, keepdims)
    if ord == -math.inf:
        return size.min(axes, keepdims)
    if ord == 0:
        return x.ne(0).cast(x.dtype).sum(axes, keepdims)
    if ord == 1:
        return size.sum(axes, keepdims)
    if not axes or not x.ndim:
        return size
    # scaled by the greatest element, so that no power overflows
    top = size.max(axes, True) if all(x.shape[a] for a in axes) else None
    if top is None:
        return (size**ord).sum(axes, keepdims) ** (1 / ord)
    top = (top.eq(0) | top.isinf() | top.isnan()).where(1, top).detach()
    total = ((size / top) ** ord).sum(axes, True)
    norm = (total.sqrt() if ord == 2 else total ** (1 / ord)) * top
    return norm if keepdims else norm.reshape(tuple([n for a, n in enumerate(x.shape) if a not in axes]))


def matrix_norm(x: Tensor, /, *, keepdims: bool = False, ord: Any = "fro") -> Tensor:
    """The norm of the matrices in the last two axes: "fro", "nuc", 1, -1, 2, -2, inf or -inf.

    >>> matrix_norm(Tensor([[3.0, 0.0], [0.0, 4.0]])).item()
    5.0
    """
    _matrices("matrix_norm", x)
    x = x._float()
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        sums = x.abs().sum(-2 if abs(ord) == 1 else -1, True)
        return sums.max((-2, -1), keepdims) if ord > 0 else sums.min((-2, -1), keepdims)
    if ord not in ("nuc", 2, -2):
        raise ArgumentError(
            f"matrix_norm(ord={ord!r})",
            because="there is no such norm",
            fix='use "fro", "nuc", ±1, ±2 or ±inf',
        )
    values = svdvals(x)
    result = values.sum(-1) if ord == "nuc" else values.max(-1) if ord == 2 else values.min(-1)
    return result.reshape(*result.shape, 1, 1) if keepdims else result


# ---- decompositions


def _matrices(what: str, x: Tensor, square: bool = False) -> None:
    if x.ndim < 2 or (square and x.shape[-1] != x.shape[-2]):
        raise ShapeError(
            f"{what} of shape {show_shape(x.shape)}",
            because="it takes square matrices" if square else "it takes matrices",
            fix="reshape the last two axes",
        )


def cholesky(x: Tensor, /, *, upper: bool = False) -> Tensor:
    """L with x = L L^T (upper: U with x = U^T U) of symmetric positive definite matrices."""
    _matrices("cholesky", x, True)
    return x.cholesky(upper)


def det(x: Tensor, /) -> Tensor:
    """Determinants."""
    _matrices("det", x, True)
    return x.det()


def eigh(x: Tensor, /) -> Eigh:
    """Eigenvalues and eigenvectors of symmetric matrices."""
    _matrices("eigh", x, True)
    return Eigh(*x.eigh())


def eigvalsh(x: Tensor, /) -> Tensor:
    """Eigenvalues of symmetric matrices, in rising order."""
    return eigh(x).eigenvalues


def inv(x: Tensor, /) -> Tensor:
    """Inverse matrices."""
    _matrices("inv", x, True)
    return x.inv()


def matrix_power(x: Tensor, n: int, /) -> Tensor:
    """x times itself n times; a negative n multiplies inverses."""
    _matrices("matrix_power", x, True)
    return x.matrix_power(n)


def matrix_rank(x: Tensor, /, *, rtol: Any = None) -> Tensor:
    """How many singular values are greater than rtol times the greatest (default: the larger size times
    epsilon)."""
    _matrices("matrix_rank", x)
    values = svdvals(x)
    if not values.shape[-1]:
        return values.sum(-1).cast("int32")
    limit = _tolerance(x) if rtol is None else rtol
    top = values.max(-1, True)
    bound = top * (limit.reshape(*limit.shape, 1) if isinstance(limit, Tensor) else limit)
    return (values > bound).sum(-1)


def _tolerance(x: Tensor) -> float:
    from whit.array_api.dtypes import finfo

    return float(max(x.shape[-2:]) * finfo(x.dtype).eps)


def pinv(x: Tensor, /, *, rtol: Any = None) -> Tensor:
    """The Moore-Penrose inverse; singular values up to rtol times the greatest count as 0."""
    _matrices("pinv", x)
    u, s, vh = svd(x, full_matrices=False)
    if not s.shape[-1]:
        return x.mT
    limit = _tolerance(x) if rtol is None else rtol
    top = s.max(-1, True)
    kept = s > top * (limit.reshape(*limit.shape, 1) if isinstance(limit, Tensor) else limit)
    inverse = kept.where(kept.where(s, 1).reciprocal(), 0)
    return (vh.mT * inverse.unsqueeze(-2)).matmul(u.mT)


def qr(x: Tensor, /, *, mode: str = "reduced") -> QR:
    """Q and R with x = Q R; mode "reduced" or "complete"."""
    _matrices("qr", x)
    return QR(*x.qr(mode))


def slogdet(x: Tensor, /) -> SlogDet:
    """Signs of determinants and logarithms of their sizes."""
    _matrices("slogdet", x, True)
    return SlogDet(*x.slogdet())


def solve(x1: Tensor, x2: Tensor, /) -> Tensor:
    """The solution of x1 @ y = x2; x2 is one vector, or matrices."""
    _matrices("solve", x1, True)
    return x1.solve(x2.unsqueeze(-1)).squeeze(-1) if x2.ndim == 1 else x1.solve(x2)


def svd(x: Tensor, /, *, full_matrices: bool = True) -> SVD:
    """Singular values and vectors."""
    _matrices("svd", x)
    return SVD(*x.svd(full_matrices))


def svdvals(x: Tensor, /) -> Tensor:
    """Singular values in falling order."""
    return svd(x, full_matrices=False).S


__all__ = [
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]
check_all(globals(), __all__)

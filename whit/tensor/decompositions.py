"""Dense linear algebra: factorisations as loops inside of kernels, batched over leading axes, and what is
solved with them. Sums run along rows of memory, so that the compiler vectorises them.

Dtypes: float32 and float64; other dtypes are computed in float32. Nothing raises for the values of a matrix:
one that is singular or not positive definite gives inf or NaN, as IEEE arithmetic does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Self

from whit.helpers import ArgumentError, DTypeError, ShapeError, prod
from whit.tensor.base import check_devices, scalar_shape
from whit.tensor.custom import Backward, run, unbound
from whit.tensor.linalg import LinalgMixin
from whit.uop import DType, Sint, UOp, dtypes
from whit.uop.program import Array, Program, absolute, param, sqrt
from whit.uop.uop import broadcast_shapes, show_shape

I32 = dtypes.int32
LANES = 16  # partial sums of a long dot product
SWEEPS = 40  # of Jacobi rotations at most; ten are many
# (3, 3) … (13, 13) Padé approximants of e**x are not needed: one of degree 13 after halving often enough
# (Higham 2005)
PADE = (
    64764752532480000.0,
    32382376266240000.0,
    7771770303897600.0,
    1187353796428800.0,
    129060195264000.0,
    10559470521600.0,
    670442572800.0,
    33522128640.0,
    1323241920.0,
    40840800.0,
    960960.0,
    16380.0,
    182.0,
    1.0,
)
PADE_REACH = {dtypes.float32: 3.9, dtypes.float64: 5.37}  # up to this norm


class DecompositionMixin(LinalgMixin):
    """Methods on matrices (…, m, n)."""

    # ---- Cholesky and triangles

    def cholesky(self, upper: bool = False) -> Self:
        """L (lower triangle) with L @ L.T = this symmetric positive definite matrix, of which the lower
        triangle is read; its transpose if `upper`. Shape (…, n, n). NaN where it is not positive definite.

        >>> Tensor([[4.0, 2.0], [2.0, 5.0]]).cholesky().tolist()
        [[2.0, 0.0], [1.0, 2.0]]
        """
        a = self._square("cholesky")
        if 0 in a.shape:
            return a
        x = a._matrices()
        b, n, _ = unbound(x.shape)
        made = run(
            _cholesky(b, n, x.uop.dtype),
            [x.uop],
            [(x.shape, x.uop.dtype)],
            gradient=Backward(_cholesky_backward, type(self)),
        )[0]
        lower = self._wrap(made).reshape(*a.shape)
        return lower.transpose(-2, -1) if upper else lower

    def solve_triangular(
        self, b: Any, upper: bool = False, left: bool = True, unitriangular: bool = False
    ) -> Self:
        """x with A @ x = b (`left`) or x @ A = b for this triangular A (…, n, n): the other triangle is not
        read, nor the diagonal if it is ones (`unitriangular`). b (…, n, k); a vector where it has one axis
        less.

        >>> Tensor([[2.0, 0.0], [1.0, 4.0]]).solve_triangular(Tensor([2.0, 9.0])).tolist()
        [1.0, 2.0]
        """
        a, right, is_vector = self._system(b, "solve_triangular", left)
        if not left:
            a, right, upper = a.transpose(-2, -1), right.transpose(-2, -1), not upper
        x = a._triangular(right, upper, unitriangular)
        if not left:
            x = x.transpose(-2, -1)
        return x.squeeze(-1 if left else -2) if is_vector else x

    def cholesky_solve(self, factor: Any, upper: bool = False) -> Self:
        """x with A @ x = this for A = L @ L.T of which `factor` is L (its transpose if `upper`)."""
        lower = self._of(factor)
        lower = lower.transpose(-2, -1) if upper else lower
        half = lower.solve_triangular(self)
        return lower.transpose(-2, -1).solve_triangular(half, upper=True)

    # ---- LU

    def lu(self) -> tuple[Self, Self, Self]:
        """(P, L, U) with P @ L @ U = A: a permutation, ones on L's diagonal, U an upper triangle; rows are
        exchanged so that the greatest element is the pivot. Shapes (…, m, m), (…, m, k), (…, k, n).

        >>> [t.tolist() for t in Tensor([[0.0, 2.0], [1.0, 3.0]]).lu()]
        [[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0, 3.0], [0.0, 2.0]]]
        """
        a = self._matrix("lu")
        m, n = a.shape[-2:]
        k = min(m, n)
        if 0 in a.shape:
            return a._identity(m), a._part(a.ndim - 1, 0, k), a._part(a.ndim - 2, 0, k)
        packed, order, _ = a._factors()
        lower = packed._part(a.ndim - 1, 0, k).tril(-1) + a._identity(m)._part(a.ndim - 1, 0, k)
        upper = packed._part(a.ndim - 2, 0, k).triu()
        rows = order.unsqueeze(-2).eq(self._along_last(m).unsqueeze(-1))  # column j is row order[j]
        parts = attach([lower, upper], [a], _lu_backward, order)
        return rows.cast(a.dtype), parts[0], parts[1]

    def solve(self, b: Any) -> Self:
        """x with A @ x = b for this square A (…, n, n), by LU with row exchanges. b (…, n, k); a vector where
        it has one axis less. Leading axes broadcast.

        >>> Tensor([[2.0, 1.0], [1.0, 3.0]]).solve(Tensor([3.0, 4.0])).tolist()
        [1.0, 1.0]
        """
        a, right, is_vector = self._system(b, "solve", True)
        if 0 in a.shape or 0 in right.shape:
            return right.squeeze(-1) if is_vector else right
        packed, order, _ = a._factors()
        matrix, x = a._matrices(), right._matrices()
        count, n, k = unbound(x.shape)
        values = [packed._matrices().uop, order.reshape(-1, n).uop, x.uop, matrix.uop]
        made = run(
            _lu_solve(count, n, k, x.uop.dtype),
            values,
            [(x.shape, x.uop.dtype)],
            gradient=Backward(_solve_backward, type(self)),
        )[0]
        result = self._wrap(made).reshape(*right.shape)
        return result.squeeze(-1) if is_vector else result

    def inv(self) -> Self:
        """The inverse of a square matrix (…, n, n).

        >>> Tensor([[2.0, 0.0], [0.0, 4.0]]).inv().tolist()
        [[0.5, 0.0], [0.0, 0.25]]
        """
        a = self._square("inv")
        return a if 0 in a.shape else a.solve(a._identity(a.shape[-1]))

    def det(self) -> Self:
        """The determinant of each matrix (…, n, n). Shape (…).

        >>> Tensor([[0.0, 2.0], [3.0, 1.0]]).det().item()
        -6.0
        """
        a = self._square("det")
        if not a.shape[-1]:
            return self._wrap(scalar_shape(UOp.const(1.0, a.dtype), a.shape[:-2]))
        packed, _, sign = a._factors()
        value = packed._diagonals().prod(-1) * sign
        made: Self = attach([value], [a], _det_backward)[0]
        return made

    def slogdet(self) -> tuple[Self, Self]:
        """(sign, log |det|) of each matrix (…, n, n): 0 and -inf for a singular one.

        >>> [round(t.item(), 4) for t in Tensor([[0.0, 2.0], [3.0, 1.0]]).slogdet()]
        [-1.0, 1.7918]
        """
        a = self._square("slogdet")
        if not a.shape[-1]:
            one = self._wrap(scalar_shape(UOp.const(1.0, a.dtype), a.shape[:-2]))
            return one, one * 0
        packed, _, sign = a._factors()
        diagonal = packed._diagonals()
        sign = sign * diagonal.sign().prod(-1)
        return sign, attach([diagonal.abs().log().sum(-1)], [a], _slogdet_backward)[0]

    def logdet(self) -> Self:
        """log det of each matrix; NaN where the determinant is negative."""
        sign, value = self.slogdet()
        return sign.lt(0).where(float("nan"), value)

    # ---- orthogonal factorisations

    def qr(self, mode: str = "reduced") -> tuple[Self, Self]:
        """(Q, R) with Q @ R = A (…, m, n), by Householder reflections: columns of Q are orthonormal, R is an
        upper triangle. Shapes (…, m, k), (…, k, n), k = min(m, n); with mode="complete" k = m.

        >>> q, r = Tensor([[3.0, 1.0], [4.0, 2.0]]).qr()
        >>> (q @ r).round(decimals=4).tolist(), r[1, 0].item()
        ([[3.0, 1.0], [4.0, 2.0]], 0.0)
        """
        if mode not in ("reduced", "complete"):
            raise ArgumentError(
                f"qr(mode={mode!r})", because="there is no such mode", fix="use reduced or complete"
            )
        a = self._matrix("qr")
        m, n = a.shape[-2:]
        k = m if mode == "complete" else min(m, n)
        if 0 in a.shape:
            lead = a.shape[:-2]
            eye = a._identity(m)._part(a.ndim - 1, 0, k)
            return eye, self._wrap(scalar_shape(UOp.const(0.0, a.dtype), (*lead, k, n)))
        x = a._matrices()
        count, dtype = unbound(x.shape)[0], x.uop.dtype
        outputs = [((x.shape[0], m, k), dtype), ((x.shape[0], k, n), dtype), (x.shape, dtype)]
        backward = Backward(_qr_backward, type(self), (m, n))
        made = run(
            _householder(count, m, n, k, dtype),
            [x.uop],
            outputs,
            gradient=backward if k == min(m, n) else None,
        )
        q, r = [self._wrap(u) for u in made[:2]]
        return q.reshape(*a.shape[:-2], m, k), r.reshape(*a.shape[:-2], k, n)

    def svd(self, full_matrices: bool = True) -> tuple[Self, Self, Self]:
        """(U, S, Vh) with U @ diag(S) @ Vh = A (…, m, n): singular values fall, columns of U and rows of Vh
        are orthonormal whatever A is. Shapes (…, m, m), (…, k), (…, n, n), k = min(m, n), or without
        `full_matrices` (…, m, k), (…, k), (…, k, n). By one-sided Jacobi rotations.

        >>> Tensor([[3.0, 0.0], [0.0, -4.0]]).svd()[1].tolist()
        [4.0, 3.0]
        """
        a = self._matrix("svd")
        m, n = a.shape[-2:]
        k = min(m, n)
        if 0 in a.shape:
            lead = a.shape[:-2]
            none = self._wrap(scalar_shape(UOp.const(0.0, a.dtype), (*lead, k)))
            u, v = a._identity(m), a._identity(n)
            return (
                (u, none, v)
                if full_matrices
                else (u._part(u.ndim - 1, 0, k), none, v._part(v.ndim - 2, 0, k))
            )
        given = a._fixed()
        if m < n:
            right, s, left = given.transpose(-2, -1)._jacobi(full_matrices)
            u, vh = left.transpose(-2, -1), right.transpose(-2, -1)
        else:
            u, s, vh = given._jacobi(full_matrices)
        ut, st, vt = attach([u._part(u.ndim - 1, 0, k), s, vh._part(vh.ndim - 2, 0, k)], [a], _svd_backward)
        if full_matrices and m > k:
            ut = ut.cat(u._part(u.ndim - 1, k, m), dim=-1)
        if full_matrices and n > k:
            vt = vt.cat(vh._part(vh.ndim - 2, k, n), dim=-2)
        return ut, st, vt

    def svdvals(self) -> Self:
        """The singular values of each matrix, falling. Shape (…, min(m, n))."""
        return self.svd(False)[1]

    def eigh(self, UPLO: str = "L") -> tuple[Self, Self]:
        """(eigenvalues, rising; eigenvectors as columns) of a symmetric matrix (…, n, n) of which the lower
        triangle (UPLO="U": the upper one) is read.

        >>> Tensor([[2.0, 0.0], [0.0, 1.0]]).eigh()[0].tolist()
        [1.0, 2.0]
        """
        if UPLO not in ("L", "U"):
            raise ArgumentError(f"eigh(UPLO={UPLO!r})", because="there is no such triangle", fix="use L or U")
        a = self._square("eigh")
        if 0 in a.shape:
            return a._diagonals(), a
        given = a._fixed()
        half = given.tril(-1) if UPLO == "L" else given.triu(1)
        whole = half + half.transpose(-2, -1) + given.tril().triu()
        bound = whole.abs().sum(-1, keepdim=True).max(-2, keepdim=True)
        bound = bound.gt(0).where(bound, 1)
        # eigenvalues of A + bound are not negative, so they are its singular values; these fall
        shifted = whole / bound + whole._identity(a.shape[-1])
        rows = shifted._jacobi_rows()[2].flip(-2)
        values = ((rows @ whole) * rows).sum(-1).sort(-1)[0]
        made = attach([values, rows.transpose(-2, -1)], [a], _eigh_backward)
        return made[0], made[1]

    def eigvalsh(self, UPLO: str = "L") -> Self:
        """The eigenvalues of a symmetric matrix, rising. Shape (…, n)."""
        return self.eigh(UPLO)[0]

    # ---- what is made of them

    def pinv(self, rcond: float | None = None, hermitian: bool = False) -> Self:
        """The pseudo-inverse (…, n, m) of a matrix (…, m, n): singular values of at most `rcond` times the
        greatest (by default the rounding error times the longer side) count as 0.

        >>> Tensor([[2.0, 0.0], [0.0, 0.0]]).pinv().tolist()
        [[0.5, 0.0], [0.0, 0.0]]
        """
        a = self._matrix("pinv")
        if 0 in a.shape:
            return a.transpose(-2, -1)
        u, s, vh = a._fixed().svd(False)
        floor = s.max(-1, keepdim=True) * (rcond if rcond is not None else a._rounding())
        inverse = s.gt(floor).where(s.reciprocal(), 0)
        value = (vh.transpose(-2, -1) * inverse.unsqueeze(-2)) @ u.transpose(-2, -1)
        made: Self = attach([value], [a], _pinv_backward)[0]
        return made

    def lstsq(self, b: Any, rcond: float | None = None) -> Self:
        """x with the least |A @ x - b|, and of these the least |x|, for A (…, m, n) and b (…, m, k) or a
        vector.

        >>> Tensor([[1.0], [1.0]]).lstsq(Tensor([1.0, 3.0])).round(decimals=4).tolist()
        [2.0]
        """
        a, right, is_vector = self._system(b, "lstsq", True, square=False)
        x = a.pinv(rcond) @ right
        return x.squeeze(-1) if is_vector else x

    def matrix_rank(self, tol: float | None = None) -> Self:
        """How many singular values exceed `tol` (by default the rounding error times the longer side times
        the greatest one), as int32. Shape (…).

        >>> Tensor([[1.0, 2.0], [2.0, 4.0]]).matrix_rank().item()
        1
        """
        a = self._matrix("matrix_rank")
        if 0 in a.shape:
            return self._wrap(scalar_shape(UOp.const(0, I32), a.shape[:-2]))
        s = a.svdvals()
        return s.gt(s.max(-1, keepdim=True) * a._rounding() if tol is None else tol).sum(-1)

    def cond(self, p: float | str | None = None) -> Self:
        """The condition number |A| * |A**-1| in a norm (None: 2, by singular values)."""
        if p in (None, 2, -2):
            s = self._matrix("cond").svdvals()
            top, low = (
                s._part(s.ndim - 1, 0, 1).squeeze(-1),
                s._part(s.ndim - 1, s.shape[-1] - 1, s.shape[-1]),
            )
            return low.squeeze(-1) / top if p == -2 else top / low.squeeze(-1)
        return self.matrix_norm(p) * self.inv().matrix_norm(p)

    def matrix_power(self, n: int) -> Self:
        """The product of n times this square matrix; of its inverse for negative n, the identity for 0.

        >>> Tensor([[1.0, 1.0], [0.0, 1.0]]).matrix_power(5).tolist()
        [[1.0, 5.0], [0.0, 1.0]]
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise ArgumentError(
                f"matrix_power({n!r})", because="the power is a whole number", fix="pass an int"
            )
        base = self._squared_shape("matrix_power")
        if n < 0:
            base, n = base.inv(), -n
        if not n:
            return base._identity(base.shape[-1])
        made: Self | None = None
        while n:
            if n & 1:
                made = base if made is None else made @ base
            n >>= 1
            base = base @ base if n else base
        assert made is not None, "a power above 0 has a bit"
        return made

    def matrix_exp(self) -> Self:
        """e to the power of each matrix (…, n, n): a Padé approximant of the matrix halved often enough,
        which is known from its norm (computed now), then squared.

        >>> Tensor([[0.0, 1.0], [0.0, 0.0]]).matrix_exp().tolist()
        [[1.0, 1.0], [0.0, 1.0]]
        """
        a = self._square("matrix_exp")
        if 0 in a.shape:
            return a
        norm: Any = a._fixed().abs().sum(-2).max()
        size = float(norm.item())
        times = max(0, math.ceil(math.log2(size / PADE_REACH[a.dtype]))) if 0 < size < math.inf else 0
        x = a * 2.0**-times
        eye, x2 = a._identity(a.shape[-1]), x @ x
        x4 = x2 @ x2
        x6 = x4 @ x2
        b = PADE
        odd = x @ (
            x6 @ (x6 * b[13] + x4 * b[11] + x2 * b[9]) + x6 * b[7] + x4 * b[5] + x2 * b[3] + eye * b[1]
        )
        even = x6 @ (x6 * b[12] + x4 * b[10] + x2 * b[8]) + x6 * b[6] + x4 * b[4] + x2 * b[2] + eye * b[0]
        scale = 1.0 / b[0]  # within float32
        made = ((even - odd) * scale).solve((even + odd) * scale)
        for _ in range(times):
            made = made @ made
        return made

    def expm(self) -> Self:
        """`matrix_exp`."""
        return self.matrix_exp()

    def matrix_norm(
        self, ord: float | str = "fro", axis: tuple[int, int] = (-2, -1), keepdim: bool = False
    ) -> Self:
        """A norm of matrices over two axes: "fro" (root of the sum of squares), "nuc" (sum of singular
        values), 1 and inf (greatest sum of a column, of a row), 2 (greatest singular value), and -1, -inf, -2
        (least).

        >>> Tensor([[3.0, 0.0], [4.0, 0.0]]).matrix_norm(1).item()
        7.0
        """
        if not isinstance(axis, (tuple, list)) or len(axis) != 2:
            raise ShapeError(f"matrix_norm over axes {axis}", because="a matrix has two", fix="name two axes")
        row, column = [self._axis(at, "matrix_norm") for at in axis]
        if row == column:
            raise ShapeError(f"matrix_norm over axes {axis}", because="they are one", fix="name two axes")
        order = [at for at in range(self.ndim) if at not in (row, column)]
        x = self.permute(*order, row, column)._matrix("matrix_norm")
        kinds: dict[Any, Callable[[], Self]] = {
            "fro": lambda: x.square().sum((-2, -1)).sqrt(),
            "nuc": lambda: x.svdvals().sum(-1),
            1: lambda: x.abs().sum(-2).max(-1),
            -1: lambda: x.abs().sum(-2).min(-1),
            math.inf: lambda: x.abs().sum(-1).max(-1),
            -math.inf: lambda: x.abs().sum(-1).min(-1),
            2: lambda: x.svdvals().max(-1),
            -2: lambda: x.svdvals().min(-1),
        }
        if ord not in kinds:
            raise ArgumentError(
                f"matrix_norm({ord!r})",
                because="there is no such norm",
                fix="use " + ", ".join(map(repr, kinds)),
            )
        made = kinds[ord]()
        if keepdim:
            made = made.reshape(*[1 if at in (row, column) else size for at, size in enumerate(self.shape)])
        return made

    # ---- arguments

    def _matrix(self, what: str) -> Self:
        """This as matrices of float32 or float64; ShapeError for what has fewer than two axes."""
        if self.ndim < 2:
            raise ShapeError(
                f"{what} of shape {show_shape(self.shape)}", because="a matrix has two axes", fix="reshape it"
            )
        if not all(isinstance(size, int) for size in self.shape[-2:]):
            raise ShapeError(
                f"{what} of shape {show_shape(self.shape)}",
                because="a side of the matrices is symbolic",
                fix="use sides that are known",
            )
        return self if self.uop.dtype in PADE_REACH else self.cast(dtypes.float32)

    def _squared_shape(self, what: str) -> Self:
        if self.ndim < 2 or self.shape[-1] != self.shape[-2]:
            raise ShapeError(
                f"{what} of shape {show_shape(self.shape)}",
                because="the matrices are not square",
                fix="the last two sizes must agree",
            )
        return self

    def _square(self, what: str) -> Self:
        return self._matrix(what)._squared_shape(what)

    def _system(self, b: Any, what: str, left: bool, square: bool = True) -> tuple[Self, Self, bool]:
        """(A, b as matrices, whether b was a vector), in one dtype and with equal leading axes."""
        a = self._square(what) if square else self._matrix(what)
        right = self._of(b)
        if not right.ndim or not (
            right.uop.dtype.is_float or right.uop.dtype.is_int or right.uop.dtype.is_bool
        ):
            raise DTypeError(
                f"{what} with {right.uop.dtype}, shape {show_shape(right.shape)}",
                because="the other side is a vector or matrices",
                fix="reshape it",
            )
        check_devices(what, a.uop, right.uop)
        is_vector = right.ndim == 1 or (right.ndim == a.ndim - 1 and right.shape == a.shape[:-1])
        if is_vector:
            right = right.unsqueeze(-1 if left else -2)
        kind = dtypes.float64 if dtypes.float64 in (a.uop.dtype, right.uop.dtype) else dtypes.float32
        side = right.shape[-2 if left else -1]
        if side != a.shape[-2]:
            raise ShapeError(
                f"{what} of {show_shape(a.shape)} with {show_shape(right.shape)}",
                because=f"{a.shape[-2]} equations have {side} right-hand sides",
                fix="these sizes must agree",
            )
        lead = broadcast_shapes(a.shape[:-2], right.shape[:-2])
        return (
            a.cast(kind).expand(*lead, *a.shape[-2:]),
            right.cast(kind).expand(*lead, *right.shape[-2:]),
            is_vector,
        )

    def _matrices(self) -> Self:
        """All leading axes as one."""
        return self.reshape(prod(self.shape[:-2]), *self.shape[-2:])

    def _identity(self, n: int) -> Self:
        """Identity matrices of this dtype and these leading axes."""
        made = self.eye(n, dtype=self.uop.dtype, device=self.device)
        return made.reshape(*(1,) * (self.ndim - 2), n, n).expand(*self.shape[:-2], n, n)

    def _along_last(self, n: int) -> Self:
        return (
            self._wrap(UOp.const(0, I32))._along(0, n)
            if not self.ndim
            else self.arange(n, device=self.device)
        )

    def _diagonals(self) -> Self:
        return self.diagonal(0, -2, -1)

    def _rounding(self) -> float:
        eps = 2.0**-52 if self.uop.dtype is dtypes.float64 else 2.0**-23
        return float(max(self.shape[-2:])) * eps

    def _fixed(self) -> Self:
        """The value without its graph for gradients."""
        return self._wrap(self.uop.detach())

    def _factors(self) -> tuple[Self, Self, Self]:
        """(L below U in one matrix, order of the rows, sign of that permutation), without gradients."""
        x = self._fixed()._matrices()
        count, m, n = unbound(x.shape)
        outputs = [(x.shape, x.uop.dtype), ((x.shape[0], m), I32), ((x.shape[0], 1), x.uop.dtype)]
        packed, order, sign = [self._wrap(u) for u in run(_lu(count, m, n, x.uop.dtype), [x.uop], outputs)]
        lead = self.shape[:-2]
        return packed.reshape(*self.shape), order.reshape(*lead, m), sign.reshape(*lead)

    def _triangular(self, b: Self, upper: bool, unit: bool) -> Self:
        if 0 in self.shape or 0 in b.shape:
            return b
        a, x = self._matrices(), b._matrices()
        count, n, k = unbound(x.shape)
        backward = Backward(_triangular_backward, type(self), (upper, unit))
        made = run(
            _triangular(count, n, k, upper, unit, x.uop.dtype),
            [a.uop, x.uop],
            [(x.shape, x.uop.dtype)],
            gradient=backward,
        )
        return self._wrap(made[0]).reshape(*b.shape)

    def _jacobi_rows(self) -> tuple[Self, Self, Self]:
        """(S, U.T with rows of zeros where S is zero, V.T) of a matrix with m >= n, without gradients."""
        m, n = self.shape[-2:]
        top = self.abs().max((-2, -1), keepdim=True)
        top = (top.gt(0) & top.isfinite()).where(top, 1)
        x = (self / top).transpose(-2, -1)._matrices()
        count, dtype = x.shape[0], x.uop.dtype
        outputs = [
            ((count, n), dtype),
            ((count, n, m), dtype),
            ((count, n, n), dtype),
            ((count, n, m), dtype),
            ((count, n, n), dtype),
        ]
        made = run(_jacobi(unbound(x.shape)[0], n, m, dtype), [x.uop], outputs)
        lead = self.shape[:-2]
        s, ut, vt = [self._wrap(u) for u in made[:3]]
        return s.reshape(*lead, n) * top.squeeze(-1), ut.reshape(*lead, n, m), vt.reshape(*lead, n, n)

    def _jacobi(self, full: bool) -> tuple[Self, Self, Self]:
        """(U, S, Vh) for m >= n. Reflections make U's columns orthonormal where singular values are zero, and
        leave the others as they are, up to a sign."""
        m, n = self.shape[-2:]
        s, ut, vh = self._jacobi_rows()
        q, r = ut.transpose(-2, -1).qr("complete" if full else "reduced")
        signs = (
            r._part(r.ndim - 2, 0, n)._diagonals().lt(0).where(-1.0, 1.0).unsqueeze(-2).cast(self.uop.dtype)
        )
        u = q._part(q.ndim - 1, 0, n) * signs
        if full and m > n:
            u = u.cat(q._part(q.ndim - 1, n, m), dim=-1)
        return u, s, vh


def attach(
    values: Sequence[Any], inputs: Sequence[Any], backward: Callable[..., Sequence[Any]], *args: Any
) -> list[Any]:
    """The values, copied, with a gradient function of their own: what they were computed by is not
    differentiated. `backward(gradients, values, inputs, *args)` gives a gradient for each input."""
    kind = type(values[0])
    shapes = [(prod(unbound(v.shape)), v.uop.dtype) for v in values]
    made = run(
        _copies(tuple(shapes)),
        [*[v.uop for v in values], *[t.uop for t in inputs]],
        [(v.shape, v.uop.dtype) for v in values],
        gradient=Backward(_attached_backward, kind, (backward, len(values), args)),
    )
    return [kind._wrap(u) for u in made]


def _attached_backward(
    grads: list[Any],
    outputs: list[Any],
    values: list[Any],
    backward: Callable[..., Any],
    count: int,
    args: tuple[Any, ...],
) -> list[Any]:
    return [*[None] * count, *backward(grads, outputs, values[count:], *args)]


# ---- gradients: matrices may have leading axes ------------------------------------------------------------


def _t(x: Any) -> Any:
    return x.transpose(-2, -1)


def _known(grads: list[Any], outputs: list[Any]) -> list[Any]:
    """Zeros where no gradient arrives."""
    return [out * 0 if g is None else g for g, out in zip(grads, outputs, strict=True)]


def _half_diagonal(x: Any) -> Any:
    """The lower triangle with half of the diagonal."""
    return x.tril() - x.tril().triu() * 0.5


def _cholesky_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    """L**-T Φ(L.T g) L**-1, made symmetric (Murray 2016)."""
    (lower,), (g,) = outputs, grads
    inner = _half_diagonal(_t(lower) @ g.tril())
    left = _t(lower).solve_triangular(inner, upper=True)
    whole = _t(_t(lower).solve_triangular(_t(left), upper=True))
    return [(whole + _t(whole)) * 0.5]


def _triangular_backward(
    grads: list[Any], outputs: list[Any], values: list[Any], upper: bool, unit: bool
) -> list[Any]:
    (a, _), (x,), (g,) = values, outputs, grads
    of_b = _t(a)._triangular(g, not upper, unit)
    of_a = -(of_b @ _t(x))
    of_a = of_a.triu(int(unit)) if upper else of_a.tril(-int(unit))
    return [of_a, of_b]


def _lu_backward(grads: list[Any], outputs: list[Any], values: list[Any], order: Any) -> list[Any]:
    """Of P L U with a square leading block; the rest of a wide or tall matrix follows from it."""
    (lower, upper), (gl, gu) = outputs, _known(grads, outputs)
    (a,) = values
    m, n = a.shape[-2:]
    k = min(m, n)
    axis_l, axis_u = lower.ndim - 2, upper.ndim - 1
    l1, u1 = lower._part(axis_l, 0, k), upper._part(axis_u, 0, k)
    gl1, gu1 = gl._part(axis_l, 0, k), gu._part(axis_u, 0, k)
    inner = (_t(l1) @ gl1).tril(-1) + (gu1 @ _t(u1)).triu()
    if n > k:  # U2 = L1**-1 (P.T A)2
        u2, gu2 = upper._part(axis_u, k, n), gu._part(axis_u, k, n)
        inner = inner - (gu2 @ _t(u2)).tril(-1)
        of_rest = _t(l1).solve_triangular(gu2, upper=True, unitriangular=True)
    if m > k:  # L2 = (P.T A)2 U1**-1
        l2, gl2 = lower._part(axis_l, k, m), gl._part(axis_l, k, m)
        inner = inner - (_t(l2) @ gl2).triu()
        of_rest = _t(u1.solve_triangular(_t(gl2), upper=True))
    left = _t(l1).solve_triangular(inner, upper=True, unitriangular=True)
    whole = _t(u1.solve_triangular(_t(left), upper=True))
    if n > k:
        whole = whole.cat(of_rest, dim=-1)
    elif m > k:
        whole = whole.cat(of_rest, dim=-2)
    rows = order.unsqueeze(-2).eq(a._along_last(m).unsqueeze(-1)).cast(a.dtype)
    return [rows @ whole]


def _solve_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    """g_b = A**-T g, g_A = -g_b x.T"""
    (*_, a), (x,), (g,) = values, outputs, grads
    of_b = _t(a).solve(g)
    return [None, None, of_b, -(of_b @ _t(x))]


def _det_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    (a,), (value,), (g,) = values, outputs, grads
    return [(g * value).unsqueeze(-1).unsqueeze(-1) * _t(a.inv())]


def _slogdet_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    return [grads[0].unsqueeze(-1).unsqueeze(-1) * _t(values[0].inv())]


def _qr_backward(grads: list[Any], outputs: list[Any], values: list[Any], m: int, n: int) -> list[Any]:
    """(Walter and Lehmann 2018): of a wide matrix [X Y] = Q [U V], X has the gradient of a square one."""
    (q, r, _), (gq, gr, _) = outputs, _known(grads, outputs)
    k, at = min(m, n), r.ndim - 1
    if n > m:
        y, gv = values[0]._part(at, k, n), gr._part(at, k, n)
        gq, gr, r = gq + y @ _t(gv), gr._part(at, 0, k), r._part(at, 0, k)
    inner = r @ _t(gr) - _t(gq) @ q
    low = inner.tril(-1)
    whole = low + _t(low) + inner.tril().triu()
    of_x = _t(r.solve_triangular(_t(gq + q @ whole), upper=True))
    return [of_x.cat(q @ gv, dim=-1) if n > m else of_x]


def _gaps(values: Any) -> Any:
    """1 / (v[j] - v[i]), 0 on the diagonal."""
    gap = values.unsqueeze(-2) - values.unsqueeze(-1)
    eye = gap._identity(values.shape[-1])
    return eye.gt(0).where(0, (gap + eye).reciprocal())


def _svd_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    (u, s, vh), (gu, gs, gvh) = outputs, grads
    v = _t(vh)
    m, n, k = u.shape[-2], v.shape[-2], s.shape[-1]
    inner = None if gs is None else gs.unsqueeze(-2) * gs.unsqueeze(-1)._identity(k)
    rest = None
    inverse = s.reciprocal().unsqueeze(-2)
    if gu is not None:
        j = _gaps(s * s) * (_t(u) @ gu)
        part = (j + _t(j)) * s.unsqueeze(-2)
        inner = part if inner is None else inner + part
        if m > k:
            rest = ((gu - u @ (_t(u) @ gu)) * inverse) @ vh
    if gvh is not None:
        gv = _t(gvh)
        j = _gaps(s * s) * (vh @ gv)
        part = s.unsqueeze(-1) * (j + _t(j))
        inner = part if inner is None else inner + part
        if n > k:
            more = (u * inverse) @ _t(gv - v @ (vh @ gv))
            rest = more if rest is None else rest + more
    whole = u @ inner @ vh
    return [whole if rest is None else whole + rest]


def _eigh_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    (w, v), (gw, gv) = outputs, grads
    inner = None if gw is None else gw.unsqueeze(-2) * gw.unsqueeze(-1)._identity(w.shape[-1])
    if gv is not None:
        part = _gaps(w) * (_t(v) @ gv)
        inner = part if inner is None else inner + part
    return [v @ inner @ _t(v)]


def _pinv_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    """(Golub and Pereyra 1973)."""
    (a,), (p,), (g,) = values, outputs, grads
    gt, pt = _t(g), _t(p)
    first = -(pt @ g @ pt)
    second = (gt - a @ (p @ gt)) @ p @ pt
    third = pt @ p @ (gt - (gt @ p) @ a)
    return [first + second + third]


# ---- kernels -----------------------------------------------------------------------------------------------


def _dot(p: Program, n: Sint | UOp, term: Callable[[UOp], UOp], dtype: DType) -> UOp:
    """The sum of term(0) … term(n - 1): sixteen partial sums side by side."""
    if isinstance(n, int) and n < 2 * LANES:
        total = p.register(0.0, dtype)
        with p.loop(n) as i:
            p.set(total, total.value + term(i))
        return p.let(total.value)
    size = UOp.index(n)
    parts, total = p.scratch(LANES, dtype), p.register(0.0, dtype)
    with p.loop(LANES) as lane:
        p.store(parts, lane, 0.0)
    blocks = p.let(size // LANES)
    with p.loop(blocks) as block, p.loop(LANES) as lane:
        p.store(parts, lane, parts[lane] + term(block * LANES + lane))
    with p.loop(size - blocks * LANES) as i:
        p.set(total, total.value + term(blocks * LANES + i))
    with p.loop(LANES) as lane:
        p.set(total, total.value + parts[lane])
    return p.let(total.value)


def _copy(p: Program, target: Array, batch: UOp, source: Array) -> None:
    with p.loop(source.shape[1]) as i, p.loop(source.shape[2]) as j:
        p.store(target, (batch, i, j), source[batch, i, j])


@lru_cache(256)
def _copies(shapes: tuple[tuple[Sint, DType], ...]) -> UOp:
    p = Program("attach")
    for number, (size, dtype) in enumerate(shapes):
        target, source = param(number, (size,), dtype), param(len(shapes) + number, (size,), dtype)
        with p.loop(size) as i:
            p.store(target, i, source[i])
    return p.finish()


@lru_cache(256)
def _cholesky(count: Sint, n: int, dtype: DType) -> UOp:
    """Column after column; each is taken out of all that is right of it."""
    lower, a = [param(slot, (count, n, n), dtype) for slot in range(2)]
    p = Program("cholesky")
    with p.parallel(count) as b:
        column = p.scratch(n, dtype)
        with p.loop(n) as i, p.loop(n) as j:
            p.store(lower, (b, i, j), j.le(i).where(a[b, i, j], UOp.const(0.0, dtype)))
        with p.loop(n) as j:
            root = p.let(sqrt(lower[b, j, j]))
            p.store(lower, (b, j, j), root)
            below = n - 1 - j
            with p.loop(below) as r:
                value = p.let(lower[b, j + 1 + r, j] / root)
                p.store(lower, (b, j + 1 + r, j), value)
                p.store(column, r, value)
            with p.loop(below) as r:
                factor = p.let(column[r])
                with p.loop(r + 1) as s:
                    place = (b, j + 1 + r, j + 1 + s)
                    p.store(lower, place, lower[place] - factor * column[s])
    return p.finish()


def _substitute(p: Program, x: Array, b: UOp, a: Array, n: int, k: int, upper: bool, unit: bool) -> None:
    """x = A**-1 x for a triangle of A: row by row, from the one with a single element."""
    with p.loop(n) as step:
        i = (n - 1) - step if upper else step
        with p.loop(step) as s:
            other = (n - 1) - s if upper else s
            factor = p.let(a[b, i, other])
            with p.loop(k) as c:
                p.store(x, (b, i, c), x[b, i, c] - factor * x[b, other, c])
        if not unit:
            pivot = p.let(a[b, i, i])
            with p.loop(k) as c:
                p.store(x, (b, i, c), x[b, i, c] / pivot)


@lru_cache(256)
def _triangular(count: Sint, n: int, k: int, upper: bool, unit: bool, dtype: DType) -> UOp:
    x, a, given = (
        param(0, (count, n, k), dtype),
        param(1, (count, n, n), dtype),
        param(2, (count, n, k), dtype),
    )
    p = Program("triangular")
    with p.parallel(count) as b:
        _copy(p, x, b, given)
        _substitute(p, x, b, a, n, k, upper, unit)
    return p.finish()


@lru_cache(256)
def _lu(count: Sint, m: int, n: int, dtype: DType) -> UOp:
    """Outputs: L below U, the order of the rows, the sign of that permutation; then the matrix."""
    packed, order, sign = (
        param(0, (count, m, n), dtype),
        param(1, (count, m), I32),
        param(2, (count, 1), dtype),
    )
    a = param(3, (count, m, n), dtype)
    p = Program("lu")
    with p.parallel(count) as b:
        _copy(p, packed, b, a)
        p.store(sign, (b, 0), 1.0)
        with p.loop(m) as i:
            p.store(order, (b, i), i.cast(I32))
        with p.loop(min(m, n)) as j:
            best, place = p.register(absolute(packed[b, j, j])), p.register(j)
            below = m - 1 - j
            with p.loop(below) as r:
                size = p.let(absolute(packed[b, j + 1 + r, j]))
                with p.when(size.gt(best.value) | (size.not_equal(size) & best.value.equal(best.value))):
                    p.set(best, size)
                    p.set(place, j + 1 + r)
            row = p.let(place.value)
            with p.when(row.not_equal(j)):
                with p.loop(n) as c:
                    upper, lower = p.let(packed[b, j, c]), p.let(packed[b, row, c])
                    p.store(packed, (b, j, c), lower)
                    p.store(packed, (b, row, c), upper)
                first, second = p.let(order[b, j]), p.let(order[b, row])
                p.store(order, (b, j), second)
                p.store(order, (b, row), first)
                p.store(sign, (b, 0), -sign[b, 0])
            pivot = p.let(packed[b, j, j])
            with p.when(pivot.not_equal(0)), p.loop(below) as r:
                i = j + 1 + r
                factor = p.let(packed[b, i, j] / pivot)
                p.store(packed, (b, i, j), factor)
                with p.loop(UOp.index(n) - 1 - j) as s:
                    c = j + 1 + s
                    p.store(packed, (b, i, c), packed[b, i, c] - factor * packed[b, j, c])
    return p.finish()


@lru_cache(256)
def _lu_solve(count: Sint, n: int, k: int, dtype: DType) -> UOp:
    """Output: x; then L below U, the order of the rows, b (and the matrix, which is there for gradients)."""
    x, packed = param(0, (count, n, k), dtype), param(1, (count, n, n), dtype)
    order, given = param(2, (count, n), I32), param(3, (count, n, k), dtype)
    p = Program("lu_solve")
    with p.parallel(count) as b:
        with p.loop(n) as i:
            row = p.let(order[b, i]).cast(dtypes.index)
            with p.loop(k) as c:
                p.store(x, (b, i, c), given[b, row, c])
        _substitute(p, x, b, packed, n, k, False, True)
        _substitute(p, x, b, packed, n, k, True, False)
    return p.finish()


@lru_cache(256)
def _householder(count: Sint, m: int, n: int, k: int, dtype: DType) -> UOp:
    """Outputs: Q, R, and the reflections below R; then the matrix. Signs are those of LAPACK."""
    q, r = param(0, (count, m, k), dtype), param(1, (count, k, n), dtype)
    w, a = param(2, (count, m, n), dtype), param(3, (count, m, n), dtype)
    steps = min(m, n)
    p = Program("qr")

    def reflect(target: Array, b: UOp, j: UOp, tau: UOp, first: UOp, width: int) -> None:
        """Columns from `first` on of (1 - tau v v.T) @ target."""
        sums = p.scratch(width, dtype)
        columns, below = width - first, m - 1 - j
        with p.loop(columns) as c:
            p.store(sums, c, target[b, j, first + c])
        with p.loop(below) as i:
            v = p.let(w[b, j + 1 + i, j])
            with p.loop(columns) as c:
                p.store(sums, c, sums[c] + v * target[b, j + 1 + i, first + c])
        with p.loop(columns) as c:
            p.store(sums, c, sums[c] * tau)
            p.store(target, (b, j, first + c), target[b, j, first + c] - sums[c])
        with p.loop(below) as i:
            v = p.let(w[b, j + 1 + i, j])
            with p.loop(columns) as c:
                place = (b, j + 1 + i, first + c)
                p.store(target, place, target[place] - v * sums[c])

    with p.parallel(count) as b:
        taus = p.scratch(steps, dtype)
        _copy(p, w, b, a)
        with p.loop(steps) as j:
            below, rest = m - 1 - j, p.register(0.0, dtype)
            with p.loop(below) as i:
                p.set(rest, rest.value + w[b, j + 1 + i, j] * w[b, j + 1 + i, j])
            p.store(taus, j, 0.0)
            with p.when(rest.value.gt(0)):
                alpha = p.let(w[b, j, j])
                norm = p.let(sqrt(alpha * alpha + rest.value))
                beta = p.let(alpha.lt(0).where(norm, -norm))
                tau, divisor = p.let((beta - alpha) / beta), p.let(alpha - beta)
                p.store(taus, j, tau)
                p.store(w, (b, j, j), beta)
                with p.loop(below) as i:
                    p.store(w, (b, j + 1 + i, j), w[b, j + 1 + i, j] / divisor)
                reflect(w, b, j, tau, j + 1, n)
        with p.loop(k) as i, p.loop(n) as c:
            p.store(r, (b, i, c), c.ge(i).where(w[b, i, c], UOp.const(0.0, dtype)))
        with p.loop(m) as i, p.loop(k) as c:
            p.store(q, (b, i, c), c.equal(i).where(UOp.const(1.0, dtype), 0.0))
        with p.loop(steps) as s:
            j = (steps - 1) - s
            tau = p.let(taus[j])
            with p.when(tau.not_equal(0)):
                reflect(q, b, j, tau, j, k)
    return p.finish()


@lru_cache(256)
def _jacobi(count: Sint, n: int, m: int, dtype: DType) -> UOp:
    """Outputs: singular values (falling), U.T and V.T in their order, work; then A.T. Pairs of rows are
    turned until all are orthogonal (Hestenes 1958); their lengths are the singular values."""
    s, ut, vt = param(0, (count, n), dtype), param(1, (count, n, m), dtype), param(2, (count, n, n), dtype)
    w, v, a = param(3, (count, n, m), dtype), param(4, (count, n, n), dtype), param(5, (count, n, m), dtype)
    limit = math.sqrt(m) * (2.0**-52 if dtype is dtypes.float64 else 2.0**-23)
    one, zero = UOp.const(1.0, dtype), UOp.const(0.0, dtype)
    p = Program("jacobi")

    def turn(rows: Array, b: UOp, i: UOp, j: UOp, cosine: UOp, sine: UOp) -> None:
        with p.loop(rows.shape[2]) as c:
            x, y = p.let(rows[b, i, c]), p.let(rows[b, j, c])
            p.store(rows, (b, i, c), cosine * x - sine * y)
            p.store(rows, (b, j, c), sine * x + cosine * y)

    def pair(b: UOp, i: UOp, j: UOp, squares: Array, turned: Any) -> None:
        product = _dot(p, m, lambda c: w[b, i, c] * w[b, j, c], dtype)
        first, second = p.let(squares[i]), p.let(squares[j])
        with p.when(absolute(product).gt(sqrt(first) * sqrt(second) * limit)):
            zeta = p.let((second - first) / (product + product))
            root = absolute(zeta) + sqrt(zeta * zeta + 1.0)
            tangent = p.let(zeta.lt(0).where(-one, one) / root)
            cosine = p.let(one / sqrt(tangent * tangent + 1.0))
            sine = p.let(cosine * tangent)
            turn(w, b, i, j, cosine, sine)
            turn(v, b, i, j, cosine, sine)
            p.store(squares, i, (first - tangent * product).maximum(0.0))
            p.store(squares, j, second + tangent * product)
            p.set(turned, turned.value + 1)

    with p.parallel(count) as b:
        _copy(p, w, b, a)
        with p.loop(n) as i, p.loop(n) as j:
            p.store(v, (b, i, j), i.equal(j).where(one, 0.0))
        squares, turned = p.scratch(n, dtype), p.register(1, I32)
        with p.loop(SWEEPS):
            rows = p.let(turned.value.gt(0).where(UOp.index(n), UOp.index(0)))
            p.set(turned, 0)
            with p.loop(rows) as i:
                p.store(squares, i, _dot(p, m, lambda c, i=i: w[b, i, c] * w[b, i, c], dtype))  # type: ignore[misc]
            with p.loop(rows) as i, p.loop((n - 1) - i) as k:
                pair(b, i, i + 1 + k, squares, turned)
        used = p.scratch(n, dtypes.bool)
        with p.loop(n) as i:
            p.store(squares, i, sqrt(_dot(p, m, lambda c, i=i: w[b, i, c] * w[b, i, c], dtype)))  # type: ignore[misc]
            p.store(used, i, False)
        with p.loop(n) as place:  # the greatest of those left
            best, where = p.register(-1.0, dtype), p.register(UOp.index(-1))
            with p.loop(n) as i:
                free = ~used[i] & (where.value.lt(0) | squares[i].gt(best.value))
                with p.when(free):
                    p.set(best, squares[i])
                    p.set(where, i)
            row = p.let(where.value)
            p.store(used, row, True)
            value = p.let(squares[row])
            p.store(s, (b, place), value)
            scale = p.let(value.gt(0).where(one / value, zero))
            with p.loop(m) as c:
                p.store(ut, (b, place, c), w[b, row, c] * scale)
            with p.loop(n) as c:
                p.store(vt, (b, place, c), v[b, row, c])
    return p.finish()

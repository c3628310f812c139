"""Running reductions: one loop over each row, with the state in registers. Cost is linear in the size;
compile time does not depend on it.

An axis that is not the last one is scanned where it lies: the rows beside each other advance together.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self

from whit.helpers import prod
from whit.tensor.base import scalar_shape
from whit.tensor.custom import Backward, CustomMixin, run, unbound
from whit.tensor.reduce import accumulator
from whit.uop import DType, Op, Ops, Shape, UOp, dtypes
from whit.uop.dtype import float_of
from whit.uop.program import Program, exp, log, param
from whit.uop.uop import alu

Rows = Shape  # (outer, n, inner): what is scanned, with what lies outside and inside of the axis


class ScanMixin(CustomMixin):
    """Methods of the running reductions."""

    def cumsum(self, axis: int = 0) -> Self:
        """Running sum along `axis`; dtypes as `sum`.

        >>> Tensor([1, 2, 3]).cumsum().tolist()
        [1, 3, 6]
        """
        have = self.uop.dtype
        x = self.cast(accumulator(have))
        made = x._scan(Ops.ADD, axis, "cumsum", _cumsum_backward)
        return made.cast(have) if have.kind == "f" else made

    def cumprod(self, axis: int = 0) -> Self:
        """Running product along `axis`; dtypes as `prod`.

        >>> Tensor([1, 2, 3]).cumprod().tolist()
        [1, 2, 6]
        """
        have = self.uop.dtype
        made = self.cast(accumulator(have))._scan(Ops.MUL, axis, "cumprod", _cumprod_backward)
        return made.cast(have) if have.kind == "f" else made

    def cummax(self, axis: int = 0) -> tuple[Self, Self]:
        """Running maximum along `axis`, and the position of the last element that reached it, as int32. From
        a NaN on everything is NaN.

        >>> [t.tolist() for t in Tensor([1, 3, 2]).cummax()]
        [[1, 3, 3], [0, 1, 1]]
        """
        return self._running_extreme(True, axis, "cummax")

    def cummin(self, axis: int = 0) -> tuple[Self, Self]:
        """Running minimum along `axis`, and the position of the last element that reached it, as int32.

        >>> [t.tolist() for t in Tensor([2, 3, 1]).cummin()]
        [[2, 2, 1], [0, 0, 2]]
        """
        return self._running_extreme(False, axis, "cummin")

    def logcumsumexp(self, axis: int = 0) -> Self:
        """Running log(sum(exp(x))) along `axis`: each prefix is measured from its own maximum.

        >>> Tensor([0.0, 0.0]).logcumsumexp().round(decimals=4).tolist()
        [0.0, 0.6930999755859375]
        """
        have = float_of(self.uop.dtype)
        x = self.cast(accumulator(have))
        if not x._has_rows(axis, "logcumsumexp"):
            return x.cast(have)
        at = x._axis(axis, "logcumsumexp")
        kernel = _logcumsumexp(x._rows_of(at), x.uop.dtype)
        backward = Backward(_logcumsumexp_backward, type(self), (at,))
        (made,) = run(kernel, [x.uop], [(x.shape, x.uop.dtype)], gradient=backward)
        return self._wrap(made).cast(have)

    # ---- underneath

    def _has_rows(self, axis: int, what: str) -> bool:
        """Whether there is anything to scan; checks the axis."""
        if not self.ndim:
            self._axis_of_scalar(axis, what)
            return False
        self._axis(axis, what)
        return 0 not in self.shape

    def _rows_of(self, at: int) -> Rows:
        shape = unbound(self.shape)
        return prod(shape[:at]), shape[at], prod(shape[at + 1:])

    def _scan(self, op: Op, axis: int, what: str, backward: Callable[..., Any],
              reverse: bool = False) -> Self:
        if not self._has_rows(axis, what):
            return self
        at, dtype = self._axis(axis, what), self.uop.dtype
        kernel = _fold(self._rows_of(at), dtype, op, reverse)
        gradient = Backward(backward, type(self), (at, reverse))
        return self._wrap(run(kernel, [self.uop], [(self.shape, dtype)], gradient=gradient)[0])

    def _running_extreme(self, is_max: bool, axis: int, what: str) -> tuple[Self, Self]:
        if not self._has_rows(axis, what):
            return self, self._wrap(scalar_shape(UOp.const(0, dtypes.int32), self.shape))
        at, dtype = self._axis(axis, what), self.uop.dtype
        kernel = _extreme(self._rows_of(at), dtype, is_max)
        outputs = [(self.shape, dtype), (self.shape, dtypes.int32)]
        gradient = Backward(_extreme_backward, type(self), (at,))
        values, places = run(kernel, [self.uop], outputs, gradient=gradient)
        return self._wrap(values), self._wrap(places)

    def _recurrence(self, factors: Self, axis: int, reverse: bool) -> Self:
        """s[i] = x[i] + factors[i] * s[i - 1] along an axis; in `reverse`, s[i + 1] in its place."""
        dtype = self.uop.dtype
        kernel = _linear_recurrence(self._rows_of(axis), dtype, reverse)
        gradient = Backward(_recurrence_backward, type(self), (axis, reverse))
        values = [self.uop, factors.uop]
        return self._wrap(run(kernel, values, [(self.shape, dtype)], gradient=gradient)[0])

    def _neighbour(self, axis: int, forward: bool, value: float) -> Self:
        """The element before (or after) each one, `value` at the end."""
        n = self.shape[axis]
        part = self._part(axis, 0, n - 1) if forward else self._part(axis, 1, n)
        widths = [(0, 0)] * self.ndim
        widths[axis] = (1, 0) if forward else (0, 1)
        return part._pad_constant(tuple(widths), value)


# ---- gradients ---------------------------------------------------------------------------------------------


def _cumsum_backward(grads: list[Any], outputs: list[Any], values: list[Any], at: int,
                     reverse: bool) -> list[Any]:
    return [grads[0]._scan(Ops.ADD, at, "cumsum", _cumsum_backward, not reverse)]


def _cumprod_backward(grads: list[Any], outputs: list[Any], values: list[Any], at: int,
                      reverse: bool) -> list[Any]:
    """x[i] is a factor of all products from i on: (product before i) * s[i] with
    s[i] = g[i] + x[i + 1] * s[i + 1]. Nothing is divided, so that zeros are no exception."""
    (x,), (y,), (g,) = values, outputs, grads
    rest = g._recurrence(x._neighbour(at, False, 0), at, True)
    return [y._neighbour(at, True, 1) * rest]


def _recurrence_backward(grads: list[Any], outputs: list[Any], values: list[Any], at: int,
                         reverse: bool) -> list[Any]:
    """The same recurrence the other way round gives the gradient of x; each factor met the neighbour."""
    (_, factors), (s,), (g,) = values, outputs, grads
    of_x = g._recurrence(factors._neighbour(at, reverse, 0), at, not reverse)
    return [of_x, of_x * s._neighbour(at, not reverse, 0)]


def _extreme_backward(grads: list[Any], outputs: list[Any], values: list[Any], at: int) -> list[Any]:
    if grads[0] is None:
        return [None]
    g, places = [t.transpose(at, -1) for t in (grads[0], outputs[1])]
    return [g._scatter_rows(places, values[0].shape[at]).transpose(at, -1)]


def _logcumsumexp_backward(grads: list[Any], outputs: list[Any], values: list[Any], at: int) -> list[Any]:
    """exp(x[i]) * sum over j >= i of g[j] * exp(-y[j]): by a recurrence in which nothing overflows,
    s[i] = g[i] + exp(y[i] - y[i + 1]) * s[i + 1], times exp(x[i] - y[i])."""
    (x,), (y,), (g,) = values, outputs, grads
    step = y - y._neighbour(at, False, math.inf)
    decay = step.isnan().where(0, step).exp()
    rest = g._recurrence(decay, at, True)
    share = x - y
    return [share.isnan().where(0, share).exp() * rest]


# ---- kernels -----------------------------------------------------------------------------------------------


def _scan_loops(p: Program, rows: Rows, first: Callable[[UOp, UOp, UOp], None],
                later: Callable[[UOp, UOp, UOp], None], reverse: bool = False) -> None:
    """`first(outer, i, inner)` for the first element of each row, `later` for the others in turn. Rows beside
    each other (inner) run in the innermost loop, and find their state in what was written before."""
    outer, n, inner = rows
    last = UOp.index(n) - 1
    with p.parallel(outer) as o:
        with p.loop(inner) as j:
            first(o, last if reverse else UOp.index(0), j)
        with p.loop(last) as k, p.loop(inner) as j:
            later(o, last - 1 - k if reverse else k + 1, j)


@lru_cache(256)
def _fold(rows: Rows, dtype: DType, op: Op, reverse: bool) -> UOp:
    """Each prefix (in `reverse` each suffix) folded by `op`."""
    p, y, x = Program("scan"), param(0, rows, dtype), param(1, rows, dtype)
    if rows[2] == 1:
        with p.parallel(rows[0]) as o:
            state = p.register(op.identity or 0, dtype)
            with p.loop(rows[1]) as k:
                i = UOp.index(rows[1]) - 1 - k if reverse else k
                p.set(state, alu(op, state.value, x[o, i, 0]))
                p.store(y, (o, i, 0), state.value)
        return p.finish()
    step = 1 if reverse else -1
    _scan_loops(p, rows, lambda o, i, j: p.store(y, (o, i, j), x[o, i, j]),
                lambda o, i, j: p.store(y, (o, i, j), alu(op, y[o, i + step, j], x[o, i, j])), reverse)
    return p.finish()


@lru_cache(256)
def _linear_recurrence(rows: Rows, dtype: DType, reverse: bool) -> UOp:
    p, s, x, a = Program("recurrence"), *[param(n, rows, dtype) for n in range(3)]
    step = 1 if reverse else -1
    _scan_loops(p, rows, lambda o, i, j: p.store(s, (o, i, j), x[o, i, j]),
                lambda o, i, j: p.store(s, (o, i, j), x[o, i, j] + a[o, i, j] * s[o, i + step, j]), reverse)
    return p.finish()


@lru_cache(256)
def _extreme(rows: Rows, dtype: DType, is_max: bool) -> UOp:
    """Running maximum or minimum and where it was reached last."""
    p, y, x = Program("extreme"), param(0, rows, dtype), param(2, rows, dtype)
    places = param(1, rows, dtypes.int32)

    def first(o: UOp, i: UOp, j: UOp) -> None:
        p.store(y, (o, i, j), x[o, i, j])
        p.store(places, (o, i, j), i.cast(dtypes.int32))

    def later(o: UOp, i: UOp, j: UOp) -> None:
        value, best = p.let(x[o, i, j]), p.let(y[o, i - 1, j])
        wins = best.le(value) if is_max else value.le(best)
        if dtype.is_float:
            wins = wins | value.not_equal(value)
        p.store(y, (o, i, j), wins.where(value, best))
        p.store(places, (o, i, j), wins.where(i.cast(dtypes.int32), places[o, i - 1, j]))

    _scan_loops(p, rows, first, later)
    return p.finish()


@lru_cache(256)
def _logcumsumexp(rows: Rows, dtype: DType) -> UOp:
    """log(exp(y) + exp(x)) is the greater one plus log(1 + exp(-distance))."""
    p, y, x = Program("logcumsumexp"), param(0, rows, dtype), param(1, rows, dtype)
    outer, n, inner = rows
    with p.parallel(outer) as o, p.loop(inner) as j:
        top, total = p.register(-math.inf, dtype), p.register(0.0, dtype)
        with p.loop(n) as i:
            value = p.let(x[o, i, j])
            above = p.let(value.gt(top.value) | value.not_equal(value))
            with p.when(above):
                base = p.let(top.value)
                shrink = base.equal(-math.inf).where(value.const_like(0), exp(base - value))
                p.set(total, total.value * shrink + 1.0)
                p.set(top, value)
            with p.when(~above & value.not_equal(-math.inf)):
                equal = value.equal(top.value)
                p.set(total, total.value + equal.where(value.const_like(1), exp(value - top.value)))
            infinite = top.value.equal(math.inf) | top.value.equal(-math.inf)
            p.store(y, (o, i, j), infinite.where(top.value, top.value + log(total.value)))
    return p.finish()

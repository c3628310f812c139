"""Reductions in linear programs: accumulators before the loop, folds inside, combination after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whit.uop import Op, Ops, UOp, dtypes
from whit.uop.ops import DOTS, identity

if TYPE_CHECKING:
    from whit.codegen.linearize import Linearizer, Region

CHAINS = 8  # independent accumulations that keep the multiply-add units busy: latency 4 times 2 units


def is_loop(r: UOp) -> bool:
    """Whether a RANGE becomes a loop: those of the tile are unrolled."""
    return not r.arg.axis.is_tile


class Fold:
    """One REDUCE: its accumulators, how values enter them, and how they are combined."""

    def __init__(self, lin: Linearizer, node: UOp, loops: list[Region]) -> None:
        self.lin, self.node, self.loops = lin, node, loops
        self.op: Op = node.arg.op
        tiles = lin.tiles
        self.out = tiles.dims(node.ranges)
        unrolled = [r for r in node.src[1:] if not is_loop(r)]
        value = node.src[0]
        self.dims = tiles.dims(node.ranges | frozenset(unrolled) | value.ranges)
        self.lanes = tiles.lanes(self.dims)
        self.folds_lanes = self.lanes > 1 and self.dims[-1] in unrolled
        places, lane = tiles.project(self.dims, self.out)
        # results that are a vector outside are put together from scalars: accumulators for each lane
        self.joins = 1 if lane is None else tiles.lanes(self.out)
        self.to_out = (
            places if lane is None else [p * self.joins + n for p, n in zip(places, lane, strict=True)]
        )
        outputs = tiles.points(self.out) * self.joins
        steps = tiles.points(self.dims) // outputs
        self.chains = 1
        while self.chains * 2 <= steps and steps % (self.chains * 2) == 0 and outputs * self.chains < CHAINS:
            self.chains *= 2
        self.state: list[list[UOp | None]] = [[None] * self.chains for _ in range(outputs)]
        self.body = loops[-1] if loops else None
        # a value does not change in the loop: `REG op value` after the loop would be the same node as inside
        self.still = False
        if self.body is not None:
            wide = node.dtype.vec(self.lanes)
            start = UOp.const(identity(self.op, node.dtype), wide)
            parent = loops[0].parent
            assert parent is not None
            for row in self.state:
                for chain in range(self.chains):
                    row[chain] = lin.place(parent, Ops.REG, wide, (start,), lin.registers)
                    lin.registers += 1

    def accumulate(self) -> None:
        """Fold the value at every point of the tile into its accumulator."""
        lin, value = self.lin, self.node.src[0]
        product = value in lin.products
        fused = value.op if value.op in DOTS else Ops.MULACC
        columns = [lin.operand(s, self.dims) for s in (value.src[:2] if product else (value,))]
        turn = [0] * len(self.state)
        for point, src in enumerate(zip(*columns, strict=True)):
            at = self.to_out[point]
            chain = turn[at] % self.chains
            turn[at] += 1
            old = self.state[at][chain]
            if old is None:
                self.state[at][chain] = self._first(src) if product else src[0]
                continue
            op, operands = (fused, (*src, old)) if product else (self.op, (old, *src))
            if self.body is None:
                self.state[at][chain] = lin.emit(op, src[0].dtype, operands)
            else:
                self.still |= all(lin.where.get(s) is not self.body for s in src)
                new = lin.place(self.body, op, src[0].dtype, operands)
                lin.place(self.body, Ops.SET, dtypes.void, (old, new))

    def _first(self, src: tuple[UOp, ...]) -> UOp:
        """A product that starts a sum."""
        op, wide = self.node.src[0].op, src[0].dtype
        return self.lin.emit(op, wide, (*src, UOp.const(0, wide)) if op in DOTS else src)

    def finish(self) -> list[UOp]:
        """One value per output point, after the loop."""
        lin = self.lin
        totals: list[UOp] = []
        for row in self.state:
            parts = [part for part in row if part is not None]
            if self.body is not None and self.still:
                parent = self.loops[0].parent
                assert parent is not None
                parts = [self._copy(parent, part) for part in parts]
            while len(parts) > 1:
                parts = [self._join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            totals.append(parts[0])
        if not self.folds_lanes:
            return totals
        if 1 < self.joins <= self.lanes:
            starts = range(0, len(totals), self.joins)
            return [self._fold_together(totals[at : at + self.joins]) for at in starts]
        scalars = self._fold_scalars(totals)
        if self.joins == 1:
            return scalars
        wide, starts = self.node.dtype.vec(self.joins), range(0, len(scalars), self.joins)
        return [lin.emit(Ops.STACK, wide, tuple(scalars[at : at + self.joins])) for at in starts]

    def _join(self, a: UOp, b: UOp) -> UOp:
        return self.lin.emit(self.op, a.dtype, (a, b))

    def _fold_scalars(self, totals: list[UOp]) -> list[UOp]:
        """The lanes of each vector combined to a scalar, as many vectors at a time as one has lanes."""
        result: list[UOp] = []
        while len(result) < len(totals):
            count = 1 << (min(self.lanes, len(totals) - len(result)).bit_length() - 1)
            together = self._fold_together(totals[len(result) : len(result) + count])
            result += [self.lin.lane(together, n) for n in range(count)] if count > 1 else [together]
        return result

    def _fold_together(self, rows: list[UOp]) -> UOp:
        """n vectors, a power of two -> one of n lanes, lane i the combination of all lanes of rows[i].

        Each step makes one vector of two: lanes whose number has the bit `step` come from the second, and
        each takes in its neighbour across that bit. What is left beyond n lanes are parts of them.
        """
        lin, scalar, step = self.lin, self.node.dtype, 1
        if len(rows) == 1:
            return lin.emit(Ops.FOLD, scalar, (rows[0],), self.op)
        lanes = range(self.lanes)
        while len(rows) > 1:
            first = UOp.const(tuple([not n & step for n in lanes]), dtypes.bool.vec(self.lanes))
            across = tuple([n ^ step for n in lanes])
            pairs = list(zip(rows[::2], rows[1::2], strict=True))
            rows = []
            for a, b in pairs:
                own = lin.emit(Ops.WHERE, a.dtype, (first, a, b))
                other = lin.emit(Ops.SHUFFLE, a.dtype, (lin.emit(Ops.WHERE, a.dtype, (first, b, a)),), across)
                rows.append(self._join(own, other))
            step *= 2
        total = rows[0]
        while total.dtype.count > step:
            half = total.dtype.count // 2
            low, high = tuple(range(half)), tuple(range(half, 2 * half))
            wide = scalar.vec(half)
            halves = [lin.emit(Ops.SHUFFLE, wide, (total,), part) for part in (low, high)]
            total = self._join(halves[0], halves[1])
        return total

    def _copy(self, region: Region, register: UOp) -> UOp:
        lin = self.lin
        copy = lin.place(region, Ops.REG, register.dtype, (register,), lin.registers)
        lin.registers += 1
        return copy

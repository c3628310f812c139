"""Linearise: a kernel with folded tiles becomes instructions in execution order. Tiles are expanded here
and only here.

Every instruction stands in the innermost loop whose counter or register it depends on, so whatever does
not change inside a loop is computed before it: softmax is, per row, a loop for the maximum, a loop for the
sum and a loop of stores.

Before (UPCAST u 8 wide):   SINK(END(STORE(p0, i*8+u, INDEX(p1, i*8+u) * 2.0), i, u))
After:                      i = RANGE(4) { a = MUL(i, 8); v = LOAD x8 (p1, a); STORE(p0, a, MUL(v, 2.0 x8)) }
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from whit.codegen.access import Address, Dims, Tiles, addresses, choose_vector_axes, is_linear, turned_axis
from whit.codegen.dots import word_read
from whit.codegen.fold import Fold, is_loop
from whit.codegen.target import Target
from whit.uop import DType, Op, Ops, PyConst, UOp, dtypes
from whit.uop.ops import COMPARE, DOTS
from whit.uop.symbolic import linear_form


class Region:
    """The body of a loop (or the whole program): instructions in order; `counter` is the RANGE
    instruction."""

    __slots__ = ("counter", "depth", "items", "parent")

    def __init__(self, parent: Region | None, counter: UOp | None) -> None:
        self.parent, self.counter = parent, counter
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.items: list[UOp] = []


def linearize(sink: UOp, target: Target) -> UOp:
    """A kernel after opts and lowering -> LINEAR. All RANGEs are LOOP, REDUCE, UPCAST or UNROLL; the
    others are SPECIALs by now."""
    return Linearizer(sink, target).run()


class Linearizer:
    def __init__(self, sink: UOp, target: Target) -> None:
        self.sink, self.target = sink, target
        nodes = sink.toposort()
        self.tiles = Tiles(choose_vector_axes(nodes, target))
        self.root = Region(None, None)
        self.where: dict[UOp, Region] = {}  # instruction -> region
        self.values: dict[UOp, list[UOp]] = {}  # kernel node -> an instruction per point of its tile
        self.regions: dict[UOp, Region] = {}  # loop RANGE -> body
        self.groups: dict[UOp, list[UOp]] = {}  # REDUCE -> the REDUCEs that share its loop
        self.data: set[UOp] = set()  # index expressions that depend on memory
        # private scratch is filled before any of its readers, see stages.py
        self.written = {u.src[0] for u in nodes if u.op is Ops.STORE and not _is_private(u.src[0])}
        self.uses: dict[UOp, int] = {}
        self.registers = 0
        for node in nodes:
            for s in node.src:
                self.uses[s] = self.uses.get(s, 0) + 1
        self.order = self._order(nodes)
        # products that only one sum uses are not computed: they become part of that sum's MULACC or DOT
        sums = [r for r in self.groups if r.arg.op is Ops.ADD and self.uses[r.src[0]] == 1]
        self.products = {r.src[0] for r in sums if self._joins_sum(r)}

    def _joins_sum(self, r: UOp) -> bool:
        value = r.src[0]
        if value.op in DOTS:
            return bool(value.src[2].op is Ops.CONST and value.src[2].arg == 0)
        return value.op is Ops.MUL and r.dtype.is_float and Ops.MULACC in self.target.native

    # ---- plan: loops and the order of nodes

    def _order(self, nodes: Sequence[UOp]) -> list[UOp]:
        """Sources first; the REDUCEs of one loop count as one node, so that the loop can close when they
        are done."""
        together: dict[tuple[UOp, ...], list[UOp]] = {}
        for node in nodes:
            if node.op is Ops.REDUCE:
                loops = tuple([r for r in node.src[1:] if is_loop(r)])
                self.groups[node] = together.setdefault(loops, []) if loops else []
                self.groups[node].append(node)
        done: dict[UOp, None] = {}
        stack: list[tuple[UOp, bool]] = [(self.sink, False)]
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if ready or not node.src:
                done[node] = None
                continue
            stack.append((node, True))
            if node.op is Ops.REDUCE:
                group = self.groups[node]
                for member in reversed(group):
                    for source in reversed(member.src):
                        if source not in done:
                            stack.append((source, False))
            else:
                for source in reversed(node.src):
                    if source not in done:
                        stack.append((source, False))
        return list(done)

    def _plan_loops(self) -> None:
        """Make the tree of regions: store loops as END nests them, a REDUCE's loop in the deepest loop
        around its value."""
        for end in self.sink.src:
            self._nest(self.root, end.src[1:] if end.op is Ops.END else ())
        for node in reversed(self.order):
            if node.op is Ops.REDUCE:
                self._nest(self._home(node.ranges), node.src[1:])
            elif node.op is Ops.AFTER:
                for end in node.src[1:]:
                    if end.op is Ops.END:
                        self._nest(self._home(node.ranges), end.src[1:])

    def _nest(self, region: Region, ranges: Iterable[UOp]) -> Region:
        """Loops over the ranges inside of a region; the innermost one."""
        for r in ranges:
            if is_loop(r):
                region = self._open(r, region)
        return region

    def _open(self, r: UOp, parent: Region) -> Region:
        region = self.regions.get(r)
        if region is None:
            region = self.regions[r] = Region(parent, None)
        assert region.parent is parent, f"range {r.arg} is the loop of two places; prepare() separates them"
        return region

    def _home(self, ranges: Iterable[UOp]) -> Region:
        """The deepest open loop among the ranges."""
        best = self.root
        for r in ranges:
            region = self.regions.get(r)
            if region is not None and region.depth > best.depth:
                best = region
        return best

    # ---- emission

    def emit(self, op: Op, dtype: DType, src: tuple[UOp, ...], arg: object = None) -> UOp:
        """An instruction in the innermost region of its operands; the same instruction is emitted once."""
        node = UOp(op, dtype, src, arg)
        where = self.where
        if node in where:
            return node
        region = self.root
        for s in src:
            other = where.get(s)
            if other is not None and other.depth > region.depth:
                region = other
        where[node] = region
        region.items.append(node)
        return node

    def place(self, region: Region, op: Op, dtype: DType, src: tuple[UOp, ...], arg: object = None) -> UOp:
        """An instruction in this region, whatever its operands are."""
        node = UOp(op, dtype, src, arg)
        self.where[node] = region
        region.items.append(node)
        return node

    def broadcast(self, scalar: UOp, lanes: int) -> UOp:
        if lanes == 1:
            return scalar
        if scalar.op is Ops.CONST:
            return UOp(Ops.CONST, scalar.dtype.vec(lanes), (), scalar.arg)
        if scalar.op is Ops.CAST and scalar.src[0].dtype is dtypes.float16:  # machines convert whole vectors
            return self.emit(Ops.CAST, scalar.dtype.vec(lanes), (self.broadcast(scalar.src[0], lanes),))
        return self.emit(Ops.BROADCAST, scalar.dtype.vec(lanes), (scalar,))

    def run(self) -> UOp:
        self._plan_loops()
        for param in sorted([u for u in self.order if u.op is Ops.PARAM], key=lambda u: u.arg.slot):
            self.values[param] = [self.emit(Ops.PARAM, param.dtype, (), param.arg)]
        handlers = {
            Ops.INDEX: self.load,
            Ops.REDUCE: self.reduce,
            Ops.RANGE: self.counter,
            Ops.AFTER: self.after,
        }
        for node in self.order:
            op = node.op
            if node in self.values or op is Ops.CONST or op in _STRUCTURE:
                continue
            handler = handlers.get(op)
            if handler is not None:
                handler(node)
            elif not node.src:
                self.values[node] = [self.emit(op, node.dtype, (), node.arg)]
            elif node.dtype is dtypes.index:
                self.index_node(node)
            elif node not in self.products:
                self.elementwise(node)
        for end in self.sink.src:
            self.store(end)
        for region in sorted(self.regions.values(), key=lambda r: -r.depth):
            if region.counter is not None:
                self.close(region)
        return UOp(Ops.LINEAR, dtypes.void, tuple(_live(self.schedule(self.root.items))))

    def counter(self, r: UOp) -> None:
        """The RANGE instruction of a loop; tile ranges have none."""
        if not is_loop(r):
            return
        region = self.regions[r]
        size = r.src[0]
        bound = size if size.op is Ops.CONST else self.scalar_index(size)
        region.counter = UOp(Ops.RANGE, dtypes.index, (bound,), r.arg)
        self.where[region.counter] = region
        self.values[r] = [region.counter]

    def close(self, region: Region) -> None:
        """Put a finished loop at the present end of the region around it."""
        assert region.counter is not None and region.parent is not None
        items = region.parent.items
        items.append(region.counter)
        items += self.schedule(region.items)
        items.append(UOp(Ops.END, dtypes.void, (region.counter,)))
        region.counter = None

    def schedule(self, items: list[UOp]) -> list[UOp]:
        """A body with each value right before its first use, so that few registers are live at once.

        Stores, register updates and inner loops keep their order, and so does whatever reads a register or
        memory that the kernel writes.
        """
        waiting: set[UOp] = set()
        result: list[UOp] = []
        stack: list[UOp] = []
        inner: list[UOp] = []  # an inner loop: it follows what it needs
        depth = 0
        for node in items:
            if not depth and self._may_wait(node):
                waiting.add(node)
                continue
            depth += (node.op is Ops.RANGE) - (node.op is Ops.END)
            if node.op is Ops.RANGE and depth == 1:
                inner = []
            stack += [s for s in reversed(node.src) if s in waiting]
            while stack:
                value = stack[-1]
                before = [s for s in value.src if s in waiting]
                if before and value in waiting:
                    stack += reversed(before)
                    continue
                stack.pop()
                if value in waiting:
                    waiting.remove(value)
                    result.append(value)
            if depth or node.op is Ops.END:
                inner.append(node)
                if not depth:
                    result += inner
            else:
                result.append(node)
        return result

    def _may_wait(self, node: UOp) -> bool:
        op = node.op
        if op is Ops.LOAD:
            return node.src[0] not in self.written
        return (op.is_elementwise or op in _LANES) and not any(s.op is Ops.REG for s in node.src)

    # ---- index arithmetic

    def index_node(self, node: UOp) -> None:
        """Index expressions are summed up where they are used; only their terms become instructions here."""
        if node.src[0].dtype is not dtypes.index or any(s in self.data for s in node.src):
            self.data.add(node)
            if not is_linear(node):
                self.elementwise(node)
        elif not is_linear(node) and not self.tiles.dims(node.ranges):
            self.scalar_term(node)

    def scalar_term(self, node: UOp) -> None:
        """A quotient, remainder, choice, … without tile ranges."""
        operands = [
            self.scalar_index(s) if s.dtype is dtypes.index else self.values[s][0] if s in self.values else s
            for s in node.src
        ]
        if node.dtype is dtypes.index and node.op in (Ops.FLOORDIV, Ops.FLOORMOD):
            self.values[node] = [self.divide(node, operands[0], operands[1])]
        else:
            self.values[node] = [self.emit(node.op, node.dtype, tuple(operands), node.arg)]

    def divide(self, node: UOp, a: UOp, b: UOp) -> UOp:
        """Floor division and remainder from what truncates: dividends are made non-negative by a multiple
        of the divisor."""
        native, vec = self.target.native, node.dtype
        quotient = node.op is Ops.FLOORDIV
        divisor = node.src[1]
        low = node.src[0].vmin
        if divisor.op is Ops.CONST and divisor.arg > 0:
            d = divisor.arg
            if d & (d - 1) == 0 and Ops.SHR in native and Ops.AND in native:
                amount = d.bit_length() - 1 if quotient else d - 1
                return self.emit(Ops.SHR if quotient else Ops.AND, vec, (a, UOp.index(amount)))
            if low < 0 and low > -(1 << 60):
                turns = -(low // d)
                shifted = self.emit(Ops.ADD, vec, (a, UOp.index(turns * d)))
                result = self.emit(_division(node.op, native), vec, (shifted, b))
                return self.emit(Ops.ADD, vec, (result, UOp.index(-turns))) if quotient else result
        if low >= 0 and divisor.vmin >= 0:
            return self.emit(_division(node.op, native), vec, (a, b))
        rest = self.emit(Ops.TRUNCMOD, vec, (a, b))
        zero = UOp.index(0)
        negative = self.emit(Ops.CMPLT, dtypes.bool, (rest, zero))
        if not quotient:
            return self.emit(Ops.ADD, vec, (rest, self.emit(Ops.WHERE, vec, (negative, b, zero))))
        whole = self.emit(Ops.TRUNCDIV, vec, (a, b))
        return self.emit(Ops.ADD, vec, (whole, self.emit(Ops.WHERE, vec, (negative, UOp.index(-1), zero))))

    def term(self, node: UOp) -> UOp:
        """The scalar instruction of one term of a linear form (new terms come from lanes of a tile)."""
        found = self.values.get(node)
        if found is None:
            for part in node.toposort(lambda n: n in self.values):
                if (
                    part not in self.values
                    and part.src
                    and not (part.dtype is dtypes.index and is_linear(part))
                ):
                    self.scalar_term(part)
            found = self.values[node]
        return found[0]

    def sum(self, terms: Iterable[tuple[UOp, int]]) -> UOp | None:
        """Instruction of a sum, outermost terms first so that each partial sum stands as far out as it
        can. None: empty."""
        where, root = self.where, self.root
        parts = [(self.term(t), f) for t, f in terms]
        if len(parts) > 1:
            parts.sort(key=lambda p: where.get(p[0], root).depth)
        total: UOp | None = None
        for part, factor in parts:
            if factor != 1:
                part = self.emit(Ops.MUL, dtypes.index, (part, UOp.index(factor)))
            total = part if total is None else self.emit(Ops.ADD, dtypes.index, (total, part))
        return total

    def offset(self, base: UOp | None, constant: int) -> UOp:
        if base is None:
            return UOp.index(constant)
        return base if constant == 0 else self.emit(Ops.ADD, dtypes.index, (base, UOp.index(constant)))

    def scalar_index(self, expr: UOp) -> UOp:
        """One instruction for an index expression without tile ranges."""
        terms, constant = linear_form(expr)
        return self.offset(self.sum(terms.items()), constant)

    def addresses(self, expr: UOp, dims: Dims) -> list[Address]:
        """The addresses at each point, with the terms that come from memory filled in."""
        terms, _ = linear_form(expr)
        data = [t for t in terms if t in self.data]
        found = addresses(expr, dims, self.tiles, data)
        for term in data:
            factor = terms[term]
            part = self.tiles.dims(term.ranges)
            values = self.values[term]
            places, lane = self.tiles.project(dims, part)
            wide = self.tiles.lanes(part) > 1 and lane is None
            for n, (address, at) in enumerate(zip(found, places, strict=True)):
                value = values[at] if lane is None else self.lane(values[at], lane[n])
                (address.vectors if wide else address.scalars).append((value, factor))
        return found

    def start(self, address: Address) -> UOp:
        """The scalar index of lane 0, without vector terms."""
        base = self.sum(address.terms)
        for value, factor in address.scalars:
            part = value if factor == 1 else self.emit(Ops.MUL, dtypes.index, (value, UOp.index(factor)))
            base = part if base is None else self.emit(Ops.ADD, dtypes.index, (base, part))
        return self.offset(base, address.offset)

    def lane_indices(self, address: Address) -> list[UOp]:
        """A scalar index per lane of an irregular address."""
        assert address.lanes is not None
        return [
            self.start(Address(list(terms.items()), constant, scalars=address.scalars))
            for terms, constant in address.lanes
        ]

    def index_vector(self, address: Address, lanes: int, dtype: DType = dtypes.index) -> UOp:
        """The index of every lane as a value of `dtype` (an integer type that holds it)."""

        def as_dtype(value: UOp, count: int) -> UOp:
            if dtype is dtypes.index:
                return value
            if value.op is Ops.CONST:
                return UOp.const(value.arg, dtype.vec(count))
            return self.emit(Ops.CAST, dtype.vec(count), (value,))

        wide = dtype.vec(lanes)
        if lanes == 1:
            return as_dtype(self.start(address), 1)
        steps = address.offsets(lanes)
        if steps is None:
            total = self.emit(Ops.STACK, wide, tuple([as_dtype(s, 1) for s in self.lane_indices(address)]))
        else:
            first = self.start(Address(address.same_terms(), 0, scalars=address.scalars))
            if first.op is Ops.CONST:
                total = UOp.const(steps, wide)
            else:
                total = self.broadcast(as_dtype(first, 1), lanes)
                if any(steps):
                    total = self.emit(Ops.ADD, wide, (total, UOp.const(steps, wide)))
        for value, factor in address.vectors:
            part = as_dtype(value, lanes)
            part = part if factor == 1 else self.emit(Ops.MUL, wide, (part, UOp.const(factor, wide)))
            total = self.emit(Ops.ADD, wide, (total, part))
        return total

    # ---- values

    def operand(self, node: UOp, dims: Dims, index_as: DType = dtypes.index) -> list[UOp]:
        """The instructions of a source at each point of its user, with the user's lanes."""
        lanes = self.tiles.lanes(dims)
        if node.op is Ops.CONST:
            dtype = index_as if node.dtype is dtypes.index else node.dtype
            const = UOp(Ops.CONST, dtype.vec(lanes), (), node.arg)
            return [const] * self.tiles.points(dims)
        if node.dtype is dtypes.index and (index_as is not dtypes.index or node not in self.values):
            return [self.index_vector(a, lanes, index_as) for a in self.addresses(node, dims)]
        values = self.values[node]
        if not dims:
            return values
        part = self.tiles.dims(node.ranges)
        if part is dims or part == dims:
            return values
        places, lane = self.tiles.project(dims, part)
        if lane is None:
            values = [values[at] for at in places]
        else:
            values = [self.lane(values[at], n) for at, n in zip(places, lane, strict=True)]
        if lanes > 1 and (lane is not None or self.tiles.lanes(part) == 1):
            values = [self.broadcast(v, lanes) for v in values]
        return values

    def elementwise(self, node: UOp) -> None:
        """Expand an elementwise node over its tile."""
        if node.op is Ops.OR and node.dtype is dtypes.int32 and self.words(node):
            return
        dims = self.tiles.dims(node.ranges)
        lanes = self.tiles.lanes(dims)
        op, dtype = node.op, node.dtype
        index_as = dtypes.index
        if lanes > 1 and node.src[0].dtype is dtypes.index and dtype is not dtypes.index:
            if op is Ops.CAST and self._cast_of_index(node, dims):
                return
            if op in COMPARE and all(_fits_int32(s) for s in node.src):
                index_as = dtypes.int32
        operands = [self.operand(s, dims, index_as) for s in node.src]
        if dtype is dtypes.bool and lanes > 1:
            self.values[node] = [self.condition(node, src) for src in zip(*operands, strict=True)]
            return
        if dtype is dtypes.index and op in (Ops.FLOORDIV, Ops.FLOORMOD) and lanes == 1:
            self.values[node] = [self.divide(node, a, b) for a, b in zip(*operands, strict=True)]
            return
        wide, arg, emit = dtype.vec(lanes), node.arg, self.emit
        self.values[node] = [emit(op, wide, src, arg) for src in zip(*operands, strict=True)]

    def words(self, node: UOp) -> bool:
        """Words packed of neighbours in memory are loaded whole, where a target computes with such words."""
        first = word_read(node) if not self.target.native.isdisjoint(DOTS) else None
        if first is None:
            return False
        dims = self.tiles.dims(node.ranges)
        lanes, parts = self.tiles.lanes(dims), 4 // first.dtype.itemsize
        found = self.addresses(first.src[1], dims)
        memory = self.values[first.src[0]][0]
        if any(a.lanes is not None or a.vectors or (lanes > 1 and a.stride != parts) for a in found):
            return self.repeated_words(node, first, found, dims)
        narrow, wide = first.dtype.vec(parts * lanes), node.dtype.vec(lanes)
        result: list[UOp] = []
        for address, mask in zip(found, self.masks(first, 2, dims), strict=True):
            gate: tuple[UOp, ...] = ()
            if mask is not None and (mask.op is Ops.BROADCAST or lanes == 1):
                gate = (self.broadcast(mask.src[0] if lanes > 1 else mask, parts * lanes),)
            elif mask is not None:
                order = tuple([at // parts for at in range(parts * lanes)])
                gate = (self.emit(Ops.SHUFFLE, dtypes.bool.vec(parts * lanes), (mask,), order),)
            loaded = self.emit(Ops.LOAD, narrow, (memory, self.start(address), *gate))
            result.append(self.emit(Ops.BITCAST, wide, (loaded,)))
        self.values[node] = result
        return True

    def repeated_words(self, node: UOp, first: UOp, found: list[Address], dims: Dims) -> bool:
        """Words of which some lanes share one: those of a few neighbours are loaded and given out."""
        lanes, parts = self.tiles.lanes(dims), 4 // first.dtype.itemsize
        memory, result = self.values[first.src[0]][0], []
        for address, mask in zip(found, self.masks(first, 2, dims), strict=True):
            offsets = None if address.vectors or lanes == 1 else address.offsets(lanes)
            if offsets is None or mask is not None:
                return False
            low = min(offsets)
            places = tuple([(o - low) // parts for o in offsets])
            count = max(places) + 1
            if count > 2 * lanes or any((o - low) % parts for o in offsets):
                return False
            start = self.start(Address(address.same_terms(), low, scalars=address.scalars))
            loaded = self.emit(Ops.LOAD, first.dtype.vec(parts * count), (memory, start))
            words = self.emit(Ops.BITCAST, node.dtype.vec(count), (loaded,))
            if count == 1:
                result.append(self.broadcast(words, lanes))
            else:
                result.append(self.emit(Ops.SHUFFLE, node.dtype.vec(lanes), (words,), places))
        self.values[node] = result
        return True

    def condition(self, node: UOp, src: tuple[UOp, ...]) -> UOp:
        """A vector of bools; known where its operands are (masks of a tile often are)."""
        lanes, op = src[0].dtype.count, node.op
        if op in (Ops.AND, Ops.OR):
            for known, other in (src, src[::-1]):
                if known.op is Ops.CONST and (all(lanes_of(known)) or not any(lanes_of(known))):
                    return other if lanes_of(known)[0] is (op is Ops.AND) else known
        if all([s.op is Ops.CONST for s in src]) and op.meaning is not None and not src[-1].dtype.is_float:
            results = [bool(op.meaning(*lane)) for lane in zip(*[lanes_of(s) for s in src], strict=True)]
            return UOp.const(tuple(results), dtypes.bool.vec(lanes))
        return self.emit(op, dtypes.bool.vec(lanes), src, node.arg)

    def _cast_of_index(self, node: UOp, dims: Dims) -> bool:
        """A vector of index values as numbers goes through 32-bit lanes where they fit."""
        source, dtype = node.src[0], node.dtype
        between = dtypes.int32 if _fits_int32(source) else dtypes.int64
        direct = dtype.kind in "iu" and dtype.bitsize >= 32
        values = self.operand(source, dims, dtype if direct else between)
        if not direct:
            wide = dtype.vec(self.tiles.lanes(dims))
            values = [self.emit(Ops.CAST, wide, (v,)) for v in values]
        self.values[node] = values
        return True

    def masks(self, node: UOp, position: int, dims: Dims) -> list[UOp | None]:
        if len(node.src) > position:
            mask = node.src[position]
            if mask.op is not Ops.CONST or not mask.arg:
                return list(self.operand(mask, dims))
        return [None] * self.tiles.points(dims)

    def load(self, node: UOp) -> None:
        """Expand an INDEX: one vector load per piece where the vector axis is contiguous."""
        dims = self.tiles.dims(node.ranges)
        lanes = self.tiles.lanes(dims)
        memory = self.values[node.src[0]][0]
        if len(node.src) > 2 and node.src[2].op is Ops.CONST and not node.src[2].arg:
            self.values[node] = [UOp.const(0, node.dtype.vec(lanes))] * self.tiles.points(dims)
            return
        found = self.addresses(node.src[1], dims)
        masks = self.masks(node, 2, dims)
        self.values[node] = [
            self.read(memory, node.dtype, a, lanes, m) for a, m in zip(found, masks, strict=True)
        ]

    def read(self, memory: UOp, dtype: DType, address: Address, lanes: int, mask: UOp | None) -> UOp:
        wide = dtype.vec(lanes)
        if mask is not None and mask.op is Ops.CONST:
            known = lanes_of(mask)
            if not any(known):
                return UOp.const(0, wide)
            mask = None if all(known) else mask
            address = address.among(known)
        gate = () if mask is None else (mask,)
        if lanes == 1:
            return self.emit(Ops.LOAD, dtype, (memory, self.start(address), *gate))
        if address.vectors or (address.lanes is not None and address.offsets(lanes) is None):
            return self.emit(Ops.LOAD, wide, (memory, self.index_vector(address, lanes), *gate))
        if address.lanes is None and address.stride == 1:
            return self.emit(Ops.LOAD, wide, (memory, self.start(address), *gate))
        if address.lanes is None and address.stride == -1:
            return self._read_reversed(memory, wide, address, lanes, mask)
        if address.lanes is None and address.stride == 0:
            return self._read_one(memory, dtype, address, lanes, mask)
        window = self._read_window(memory, wide, address, mask)
        return (
            self.emit(Ops.LOAD, wide, (memory, self.index_vector(address, lanes), *gate))
            if window is None
            else window
        )

    def _read_window(self, memory: UOp, wide: DType, address: Address, mask: UOp | None) -> UOp | None:
        """Lanes a few elements apart: one load of all between the first and the last, and a shuffle. None:
        too far apart.

        Lanes that repeat an element cannot share it under a mask of their own."""
        lanes = wide.count
        offsets = address.offsets(lanes)
        assert offsets is not None
        low = min(offsets)
        places = tuple([o - low for o in offsets])
        span = max(places) + 1
        count = 1 << (span - 1).bit_length()
        varying = mask is not None and mask.op is not Ops.BROADCAST
        if count > 4 * lanes or (varying and len(set(places)) < lanes):
            return None
        start = self.start(Address(address.same_terms(), low, scalars=address.scalars))
        inside = tuple([n < span for n in range(count)])
        gate: UOp | None = None if all(inside) else UOp.const(inside, dtypes.bool.vec(count))
        if mask is not None and not varying:
            scalar = self.broadcast(mask.src[0], count)
            gate = scalar if gate is None else self.emit(Ops.AND, scalar.dtype, (scalar, gate))
        elif mask is not None:
            back = tuple([places.index(n) if n in places else 0 for n in range(count)])
            used = UOp.const(tuple([n in places for n in range(count)]), dtypes.bool.vec(count))
            turned = self.emit(Ops.SHUFFLE, used.dtype, (mask,), back)
            gate = self.emit(Ops.AND, used.dtype, (turned, used))
        source = (memory, start) if gate is None else (memory, start, gate)
        loaded = self.emit(Ops.LOAD, wide.vec(count), source)
        return loaded if places == tuple(range(count)) else self.emit(Ops.SHUFFLE, wide, (loaded,), places)

    def _read_reversed(self, memory: UOp, wide: DType, address: Address, lanes: int, mask: UOp | None) -> UOp:
        order = tuple(range(lanes - 1, -1, -1))
        start = self.start(Address(address.terms, address.offset - lanes + 1, scalars=address.scalars))
        gate: tuple[UOp, ...] = ()
        if mask is not None:
            gate = (mask if mask.op is Ops.BROADCAST else self.emit(Ops.SHUFFLE, mask.dtype, (mask,), order),)
        return self.emit(Ops.SHUFFLE, wide, (self.emit(Ops.LOAD, wide, (memory, start, *gate)),), order)

    def _read_one(self, memory: UOp, dtype: DType, address: Address, lanes: int, mask: UOp | None) -> UOp:
        """All lanes read one element: under a mask per lane it is read if any lane wants it."""
        start = self.start(address)
        if mask is None:
            return self.broadcast(self.emit(Ops.LOAD, dtype, (memory, start)), lanes)
        gate = self.lane(mask, 0)
        if mask.op is not Ops.BROADCAST:
            for lane in range(1, lanes):
                gate = self.emit(Ops.OR, dtypes.bool, (gate, self.lane(mask, lane)))
        value = self.broadcast(self.emit(Ops.LOAD, dtype, (memory, start, gate)), lanes)
        return (
            value
            if mask.op is Ops.BROADCAST
            else self.emit(Ops.WHERE, value.dtype, (mask, value, UOp.const(0, value.dtype)))
        )

    def lane(self, vector: UOp, number: int) -> UOp:
        """One lane as a scalar."""
        if vector.op is Ops.BROADCAST:
            return vector.src[0]
        if vector.op is Ops.CONST:
            return UOp(
                Ops.CONST,
                vector.dtype.scalar,
                (),
                vector.arg[number] if isinstance(vector.arg, tuple) else vector.arg,
            )
        if vector.op is Ops.STACK:
            return vector.src[number]
        return self.emit(Ops.EXTRACT, vector.dtype.scalar, (vector,), number)

    def store(self, end: UOp) -> None:
        """The STOREs of one END (or of a STORE in no loop), at the end of its innermost loop."""
        ranges = frozenset(end.src[1:]) if end.op is Ops.END else frozenset()
        node = end.src[0] if end.op is Ops.END else end
        if len(node.src) > 3 and node.src[3].op is Ops.CONST and not node.src[3].arg:
            return
        self.store_points(self._home(ranges), node, self.tiles.dims(ranges | node.ranges))

    def store_points(self, region: Region, node: UOp, dims: Dims) -> None:
        """One STORE per point of the tile."""
        lanes = self.tiles.lanes(dims)
        memory = self.values[node.src[0]][0]
        where, what = self.addresses(node.src[1], dims), self.operand(node.src[2], dims)
        masks = self.masks(node, 3, dims)
        across = turned_axis(node, dims[-1], lanes) if lanes > 1 else None
        if across is not None and not any(masks) and all(a.stride and not a.vectors for a in where):
            for address, value in self.turn(where, what, dims, across):
                self.write(region, memory, address, value, lanes, None)
            return
        for address, value, mask in zip(where, what, masks, strict=True):
            self.write(region, memory, address, value, lanes, mask)

    def turn(
        self, where: list[Address], what: list[UOp], dims: Dims, across: UOp
    ) -> Iterator[tuple[Address, UOp]]:
        """Vectors along the last of `dims`, strided in memory, as vectors along `across`, which is not.

        As many rows as a vector has lanes make a square. Each step exchanges what is off the diagonal between
        rows whose numbers differ in one bit.
        """
        lanes, position = self.tiles.lanes(dims), dims.index(across)
        squares: dict[tuple[int, ...], list[int]] = {}
        for n, point in enumerate(self.tiles.grid(dims)):
            block = point[position] // lanes
            squares.setdefault((*point[:position], block, *point[position + 1 :]), []).append(n)
        for rows in squares.values():
            values = [what[n] for n in rows]
            for step in [1 << n for n in range(lanes.bit_length() - 1)]:
                first = UOp.const(tuple([not n & step for n in range(lanes)]), dtypes.bool.vec(lanes))
                swapped = tuple([n ^ step for n in range(lanes)])
                for low in [n for n in range(lanes) if not n & step]:
                    a, b = values[low], values[low | step]
                    wide = a.dtype
                    other_a, other_b = (self.emit(Ops.SHUFFLE, wide, (v,), swapped) for v in (a, b))
                    values[low] = self.emit(Ops.WHERE, wide, (first, a, other_b))
                    values[low | step] = self.emit(Ops.WHERE, wide, (first, other_a, b))
            start = where[rows[0]]
            for lane, value in enumerate(values):
                offset = start.offset + start.stride * lane
                yield Address(start.terms, offset, 1, scalars=start.scalars), value

    def after(self, node: UOp) -> None:
        """Scratch. If work-items share it, all wait for the last readers, write, and wait for each other."""
        self.values[node] = self.values[node.src[0]]
        if _is_private(node.src[0]):
            self.fill(node)
            return
        for store in node.src[1:]:
            region = self._home(store.ranges)
            self.barrier(region)
            self.store_points(region, store, self.tiles.dims(store.ranges))
            self.barrier(region)

    def fill(self, node: UOp) -> None:
        """The loops that fill a task's own scratch; whatever reads it then comes after them."""
        home = self._home(node.ranges)
        for end in node.src[1:]:
            loops = [self.regions[r] for r in end.src[1:] if is_loop(r)] if end.op is Ops.END else []
            store = end.src[0] if end.op is Ops.END else end
            inside = store.ranges | frozenset(end.src[1:] if end.op is Ops.END else ())
            self.store_points(loops[-1] if loops else home, store, self.tiles.dims(inside))
            for region in reversed(loops):
                self.close(region)
        self.where[self.values[node][0]] = home

    def barrier(self, region: Region) -> None:
        self.place(region, Ops.BARRIER, dtypes.void, (), self.registers)
        self.registers += 1

    def write(
        self, region: Region, memory: UOp, address: Address, value: UOp, lanes: int, mask: UOp | None
    ) -> None:
        if mask is not None and mask.op is Ops.CONST:
            if not any(lanes_of(mask)):
                return
            mask = None if all(lanes_of(mask)) else mask
        gate = () if mask is None else (mask,)
        if lanes == 1 or (address.lanes is None and not address.vectors and address.stride == 1):
            self.place(region, Ops.STORE, dtypes.void, (memory, self.start(address), value, *gate))
        elif address.lanes is None and not address.vectors and address.stride == -1:
            order = tuple(range(lanes - 1, -1, -1))
            start = self.start(Address(address.terms, address.offset - lanes + 1, scalars=address.scalars))
            gate = () if mask is None else (self.emit(Ops.SHUFFLE, mask.dtype, (mask,), order),)
            turned = self.emit(Ops.SHUFFLE, value.dtype, (value,), order)
            self.place(region, Ops.STORE, dtypes.void, (memory, start, turned, *gate))
        else:
            self.place(
                region, Ops.STORE, dtypes.void, (memory, self.index_vector(address, lanes), value, *gate)
            )

    # ---- reductions

    def reduce(self, node: UOp) -> None:
        """All REDUCEs of one loop: registers before it, folds inside, combination after it."""
        group = self.groups[node]
        loops = [self.regions[r] for r in node.src[1:] if is_loop(r)]
        work = [Fold(self, member, loops) for member in group]
        for fold in work:
            fold.accumulate()
        for region in reversed(loops):
            self.close(region)
        for fold in work:
            self.values[fold.node] = fold.finish()


def lanes_of(const: UOp) -> tuple[PyConst, ...]:
    return const.arg if isinstance(const.arg, tuple) else (const.arg,) * const.dtype.count


def _is_private(memory: UOp) -> bool:
    return memory.op is Ops.LOCAL and not memory.arg.shared


_LANES = frozenset({Ops.BROADCAST, Ops.STACK, Ops.EXTRACT, Ops.SHUFFLE, Ops.FOLD})
_STRUCTURE = frozenset({Ops.SINK, Ops.END, Ops.STORE})


def _division(op: Op, native: frozenset[Op]) -> Op:
    if op is Ops.FLOORDIV:
        return Ops.TRUNCDIV if Ops.TRUNCDIV in native or Ops.FLOORDIV not in native else op
    return Ops.TRUNCMOD if Ops.TRUNCMOD in native or Ops.FLOORMOD not in native else op


def _fits_int32(node: UOp) -> bool:
    low, high = node.bounds
    return bool(low >= -(1 << 31) and high < (1 << 31))


_EFFECTS = frozenset(
    {Ops.STORE, Ops.SET, Ops.RANGE, Ops.END, Ops.PARAM, Ops.BARRIER, Ops.IF, Ops.ENDIF, Ops.VAR, Ops.SPECIAL}
)


def _live(items: list[UOp]) -> list[UOp]:
    """Drop instructions whose results nothing uses."""
    needed: set[UOp] = set()
    kept: list[UOp] = []
    for node in reversed(items):
        if node in needed or node.op in _EFFECTS:
            needed.update(node.src)
            kept.append(node)
    kept.reverse()
    return kept

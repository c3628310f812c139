"""Blocks of products: loops, register tile and packed operands for the sums of `products.py`.

The nest becomes

    tasks, outer loops, blocks of m [pack the rows of a block], n [pack a panel of columns], tiles of m, k

so that a panel is used by every tile of a block while it is in the caches. `Blocking.cycles` ranks the
choices. The constants were measured on cores with AVX-512; they only have to rank rightly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from whit.codegen.opts import Axis, AxisTable, Opt, OptError, OptKind
from whit.codegen.products import COPY, Product, depends, find_products, merged, size_of
from whit.codegen.scopes import Kernel
from whit.helpers import ceildiv, prod, round_up
from whit.uop import AxisType

LEAST_WORK = 1 << 14  # multiplications below which packing does not pay
THREAD_WORK = 1 << 18  # multiplications below which a second thread does not pay
SCATTER, NEARBY = 10.0, 3.0  # cycles to store an element by itself, and if the next rows are its neighbours
SCATTER_FAR = 24.0  # cycles to add to an element by itself in a result that the second cache does not hold
WINDOW = 0.6  # cycles to pack an element that windows share
HALO = 10  # how many times that where not all of an image is packed at once
MASKED = 6.0  # cycles to pack an element that is gathered under a mask
LOOP, ISSUE = 3, 3.1  # instructions of a loop itself, and how many a cycle
ROOM = 0.6  # of the second cache that a block of packed rows takes
NEAR, FAR = 24, 8  # bytes a cycle from the second cache, and from beyond it
COPY_FAR = 12  # bytes a cycle that a copy reads or writes, from beyond the second cache
ADDED = 4  # bytes a cycle of results beyond the second cache to which tiles add
START = 40  # cycles until the first of a row arrives from beyond the second cache
NESTED = 1.02  # how much longer a step takes whose rows are moved by several loops
BESIDE = 0.03  # of the time: columns in several runs
APART = 1.8  # how much longer a step takes whose rows lie in lines that few other steps read
UNEVEN = 0.03  # of the time, if one thread gets one task: threads are never equally fast


# ---- the choice --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blocking:
    """Sizes: `tile_m` rows and `tile_n` columns in registers, `block` tiles of m in a block (0: all), the
    sum in `pieces`, `tasks` on the axis `shared` ("m", "n", "outer" or ""); whether rows and columns are
    packed, and whether all columns at once, before the blocks of a task (`wide`), not a panel at a time.
    `window`: rows are packed with what their windows share stored once."""

    tile_m: int
    tile_n: int
    block: int = 0
    pieces: int = 1
    shared: str = ""
    tasks: int = 1
    pack_rows: bool = True
    pack_columns: bool = True
    wide: bool = False
    tile_o: int = 1  # of p.across, beside the columns
    window: bool = False

    @property
    def columns(self) -> int:
        """Columns of a register tile."""
        return self.tile_n * self.tile_o

    def tiles_n(self, p: Product) -> int:
        """Register tiles along the columns, for each of the other outer axes."""
        along = ceildiv(size_of(p.across), self.tile_o) if p.across is not None else 1
        return int(along * ceildiv(p.size_n, self.tile_n))

    def cycles(self, p: Product) -> float:
        """Estimated cycles of the slowest thread."""
        tiles_m, tiles_n = ceildiv(p.size_m, self.tile_m), self.tiles_n(p)
        block = self.block or tiles_m
        blocks = ceildiv(tiles_m, block)
        work = p.batches * blocks * block * tiles_n * self._tile(p, block)
        if self.window:
            work += self._window_copies(p) * p.row_elements * WINDOW
        elif self.pack_rows:
            packing = max(p.row_packing, 2 * p.itemsize / COPY_FAR) if p.rows_beyond else p.row_packing
            work += self._row_copies(p) * blocks * block * self.tile_m * p.folded * packing
        if self.pack_columns:
            passes = blocks if not self.wide else self.tasks if self.shared == "m" else 1
            if self.shared == "outer" and not p.moves_columns(p.outer[0]):
                passes *= self.tasks
            work += p.column_batches * passes * tiles_n * self.columns * p.folded * self._column_copy(p)
        if not p.is_near:
            far = self.pieces > 1 and p.elements * p.itemsize > p.target.l2_bytes
            held = p.rows_are_windows and p.elements * p.itemsize <= p.target.l2_bytes // 4
            store = SCATTER_FAR if far else NEARBY if p.steps_along_m or held else SCATTER
            work += p.elements * store * self.pieces
        threads = p.target.threads if self.tasks > 1 else 1
        waiting = UNEVEN * threads / self.tasks if threads > 1 else 0.0
        return float(work * (ceildiv(self.tasks, threads) / self.tasks + waiting / threads))

    def _column_copy(self, p: Product) -> float:
        """Cycles to pack an element of the columns."""
        packing = 2 * COPY if p.run and self.tile_n % p.run == 0 else p.packing
        if self.window and p.size_n % self.tile_n:
            packing = MASKED
        return max(packing, 2 * p.itemsize / COPY_FAR) if p.columns_far else packing

    def _tile(self, p: Product, block: int) -> float:
        """Cycles of one register tile."""
        depth, total = p.folded // self.pieces, self.tile_m * ceildiv(self.columns, p.lanes)
        panel, strip = depth * self.columns * p.itemsize, depth * self.tile_m * p.itemsize
        if self.window:
            strip = int(strip * p.row_share)
        # a panel too large for the first cache streams from the second one for each tile of rows
        streamed = panel + strip if panel > 0.6 * p.target.l1_bytes else strip
        cycles = max(depth * self.step(p), streamed / NEAR)
        if not self.pack_rows and p.rows_masked:
            cycles *= 2.0 if p.is_near else 8.0  # each element of the rows is read under a mask
        if not self.pack_rows and p.rows_apart:
            cycles *= APART
        if not self.pack_rows and p.nested:
            cycles *= NESTED
        if not self.pack_rows and p.rows_beyond:
            cycles += START * self.tile_m
        cycles *= 1 + BESIDE * (self.tile_o - 1)
        near = panel + strip * (block if self.pack_rows else 1) <= ROOM * p.target.l2_bytes
        cycles += 0.0 if near else max(strip, panel - ROOM * p.target.l2_bytes) / FAR
        far = FAR if self.pieces == 1 else ADDED
        touched = p.elements * p.itemsize
        result = self.tile_m * self.columns * p.itemsize / (far if touched > p.target.l2_bytes else NEAR)
        return float(self.pieces * (cycles + 8 + total + result * (1 if self.pieces == 1 else 2)))

    def step(self, p: Product) -> float:
        """Cycles of one step of the sum for a register tile, all operands at hand."""
        vectors = ceildiv(self.columns, p.lanes)
        loads = self.tile_m + vectors * (1.0 if self.pack_columns else 2.0 if p.packing == COPY else p.lanes)
        total = self.tile_m * vectors
        if not self.pack_rows:
            total += self.tile_m * p.row_work
        issue = (total + loads + LOOP) / ISSUE
        cycles = max(total / p.target.multiplies, loads / 2, issue, 4.0 * min(1.0, total / 8)) + 0.4
        if self.tile_m * p.itemsize > 32 and not self.window:
            cycles *= 1.25  # measured: strips of more than half a cache line a step
        if self.tile_m * vectors + vectors >= p.target.vector_registers:
            cycles += 3.0  # the last registers are taken
        return float(cycles)

    def per_product(self, p: Product) -> float:
        """Cycles of a product in the middle of a tile, what the edges waste included."""
        return float(self.step(p) * ceildiv(p.size_m, self.tile_m) * self.tiles_n(p))

    def _moving_rows(self, p: Product) -> tuple[list[Axis], bool]:
        """The outer axes along which rows change, and whether each task packs the same rows again."""
        outer = [a for a in p.outer if any(depends(value, a) for _, value in p.rows)]
        return outer, self.shared == "n" or (self.shared == "outer" and p.outer[0] not in outer)

    def _window_copies(self, p: Product) -> int:
        """How often all elements of windowed rows are packed."""
        outer, again = self._moving_rows(p)
        panels = self.tiles_n(p) if any(not p.moves_columns(a) for a in outer) else 1
        image = p.row_elements * p.itemsize // (size_of(outer[0]) if outer else 1) // self.pieces
        overlaps = HALO if image > ROOM * p.target.l2_bytes else 1  # rows of windows, copied a few at a time
        return panels * overlaps * (self.tasks if again and panels == 1 else 1)

    def _row_copies(self, p: Product) -> int:
        """How often all rows are packed."""
        outer, again = self._moving_rows(p)
        copies: int = prod([size_of(a) for a in outer])
        if any(not p.moves_columns(a) for a in p.outer):  # such loops stand inside of those over panels
            copies *= self.tiles_n(p)
        return copies * self.tasks if again else copies


def best_blocking(p: Product, pieces: bool = True) -> Blocking | None:
    """The blocking of least cost: first register tiles by themselves, then all else for the best of them."""
    tiles = sorted(_tiles(p), key=lambda b: b.per_product(p))[: 10 if p.rows_are_windows else 6]
    return min(
        [b for tile in tiles for b in _variants(p, tile, pieces)], key=lambda b: b.cycles(p), default=None
    )


def _bare_cycles(p: Product) -> float:
    """Cycles of the products alone, on all threads, with the best register tile."""
    least = min([tile.per_product(p) for tile in _tiles(p)], default=0.0)
    return least * p.folded * p.batches / p.target.threads


def _tiles(p: Product) -> Iterator[Blocking]:
    registers = p.target.vector_registers
    runs = lcm(p.run, p.lanes) // p.lanes
    for vectors in sorted({1, 2, 3, 4, *([runs] if 0 < runs <= 8 else [])}):
        spare = 1 - p.rows_are_windows  # of registers
        most = min((registers - spare - vectors) // vectors, 14, p.size_m)
        for beside in [n for n in (1, 2, 3, 4) if vectors <= 4 and vectors % n == 0] or [1]:
            tile_n = vectors // beside * p.lanes
            if tile_n - p.lanes >= p.size_n or (
                beside > 1 and (p.across is None or beside > size_of(p.across))
            ):
                continue
            for tile_m in range(max(1, most // 2), most + 1):
                yield Blocking(tile_m, tile_n, tile_o=beside)


def _variants(p: Product, tile: Blocking, pieces: bool) -> Iterator[Blocking]:
    tiles_m, tiles_n = ceildiv(p.size_m, tile.tile_m), ceildiv(p.size_n, tile.tile_n)
    threads = p.target.threads if p.work >= THREAD_WORK else 1
    for cut in _pieces(p) if pieces else [1]:
        for block, fits in _blocks(p, tile, cut, tiles_m):
            blocks = ceildiv(tiles_m, block) if block else 1
            for shared, tasks in _shares(p, threads, tiles_n, blocks):
                place = bool(shared or block or len(p.outer) > (p.across is not None) or cut > 1)
                uses = tile.tiles_n(p) * (p.row_uses if not block and cut == 1 else 1)
                choice = replace(
                    tile, block=block, pieces=cut, shared=shared, tasks=tasks,
                    pack_rows=uses >= (1 if p.rows_odd else 3) and place,
                    pack_columns=(block or tiles_m) * p.column_uses >= 2,
                )  # fmt: skip
                if choice.pack_rows and p.rows_are_read and not p.rows_odd:
                    yield replace(choice, pack_rows=False)
                if fits or not choice.pack_rows:
                    yield choice
                if p.rows_are_windows and place:
                    yield replace(choice, pack_rows=True, window=True)
                held = p.folded // cut * p.itemsize * (tile.tiles_n(p) * tile.columns + block * tile.tile_m)
                several = blocks > (tasks if shared == "m" else 1) and (cut > 1 or bool(shared))
                if several and fits and choice.pack_columns and held <= p.target.scratch_bytes:
                    yield replace(choice, wide=True)


def _pieces(p: Product) -> list[int]:
    """Into how many pieces to cut the sum: so that one is a few hundred steps long."""
    size, rest = size_of(p.fold), p.folded // size_of(p.fold)
    found = [n for n in range(2, 257) if size % n == 0 and size > n and 192 <= size // n * rest <= 1024]
    return [1, *found[:3]]


def _blocks(p: Product, tile: Blocking, pieces: int, tiles_m: int) -> list[tuple[int, bool]]:
    """How many tiles of rows make a block: all (0), or what fits the second cache in a few sizes; whether
    they fit."""
    depth = p.folded // pieces * p.itemsize
    if depth * tile.columns > p.target.scratch_bytes:
        return []
    room = min(ROOM * p.target.l2_bytes, p.target.scratch_bytes) - depth * tile.columns
    most = max(1, int(room / (depth * tile.tile_m)))
    found: set[int] = set()
    for parts in (1, 2, 4):
        found |= {ceildiv(tiles_m, parts * p.target.threads)}
    found |= {ceildiv(tiles_m, round_up(ceildiv(tiles_m, most), p.target.threads))}
    return [(0, most >= tiles_m), *sorted([(b, True) for b in found if b <= most and 1 < b < tiles_m])]


def _shares(p: Product, threads: int, tiles_n: int, blocks: int) -> list[tuple[str, int]]:
    """What the tasks can be: blocks of m, pieces of n, or an outer axis."""
    if threads < 2:
        return [("", 1)]
    found = [("m", tasks) for tasks in (threads, 2 * threads, 4 * threads) if blocks % tasks == 0]
    if blocks > threads and ("m", blocks) not in found:
        found.append(("m", blocks))
    found += [("n", parts * threads) for parts in (1, 2, 4, 8) if tiles_n % (parts * threads) == 0]
    if tiles_n % threads and threads < tiles_n <= 16 * threads:
        found.append(("n", tiles_n))
    if p.outer:
        size = size_of(p.outer[0]) if p.outer[0] is not p.across else 0
        found += [("outer", d) for d in range(threads, min(size, 8 * threads) + 1) if size % d == 0]
    return found


# ---- carrying it out ---------------------------------------------------------------------------------------


def block(k: Kernel) -> bool:
    """Apply the best blocking if the kernel is a product with reuse, and large enough. Whether it was."""
    before = tuple(k.table.opts)
    for pieces in (True, False):
        forms = [p for p in find_products(k) if p.work >= LEAST_WORK and p.size_m >= 4] if k.lanes > 1 else []
        forms += [both for p in forms if (both := merged(p, k.table.ast)) is not None]
        forms = [p for p in forms if p.size_n * 2 > p.lanes]
        found = _best(forms, pieces)
        if found is None:
            return False
        try:
            _carry_out(k.table, *found)
        except OptError:
            k.table = _replayed(k, before)
        else:
            return True
    return False


def _best(forms: list[Product], pieces: bool) -> tuple[Product, Blocking] | None:
    """The best blocking of any form; forms whose products alone cost more than that are not looked at."""
    bare = sorted([(_bare_cycles(p), number) for number, p in enumerate(forms)])
    best: tuple[float, Product, Blocking] | None = None
    for cycles, number in bare:
        if best is not None and cycles >= best[0]:
            break
        choice = best_blocking(forms[number], pieces)
        if choice is not None and (choice.pack_columns or choice.pack_rows):
            total = choice.cycles(forms[number])
            if best is None or total < best[0]:
                best = total, forms[number], choice
    return None if best is None else best[1:]


def _replayed(k: Kernel, opts: Sequence[Opt]) -> AxisTable:
    table = AxisTable.of(k.table.ast, k.target)
    for opt in opts:
        table.apply(opt)
    return table


def _part(table: AxisTable, number: int, kind: OptKind, amount: int) -> tuple[Axis | None, Axis | None]:
    """Split an axis, padded if need be: its outer and its inner part, None where nothing is left of one."""
    if amount == 1:
        return table.axes[number], None
    if size_of(table.axes[number]) % amount:
        table.apply(Opt(OptKind.PADTO, number, amount))
    before = set(table.axes)
    table.apply(Opt(kind, number, amount))
    new = set(table.axes) - before
    if not new:
        return None, table.axes[number]
    added = table.axes[new.pop()]
    return (added, table.axes[number]) if kind is OptKind.ACCUMULATE else (table.axes[number], added)


def _carry_out(table: AxisTable, p: Product, b: Blocking) -> None:
    """Apply the opts of a blocking. OptError if one is not legal."""
    loops = _Loops(table, p, b)
    shared = {"m": loops.m_share, "n": loops.n_share, "outer": p.outer[0] if p.outer else None}.get(b.shared)
    outer = [a for a in p.outer if a is not p.across]
    moving = [a for a in outer if p.moves_columns(a)]
    still = [a for a in outer if not p.moves_columns(a) and a is not shared]  # the same columns serve again
    steps = [loops.step, loops.m_block] if b.wide else [loops.m_block, loops.step]
    around = dict.fromkeys([a for a in (shared, *moving, loops.n_share, *steps) if a is not None])
    panels = [a for a in (loops.across, loops.n) if a is not None]
    tiles = [loops.m] if loops.m is not None else []
    _arrange(table, [*around, *panels, *still, *tiles])
    if shared is not None and b.tasks > 1:
        table.apply(Opt(OptKind.THREAD, shared.number, b.tasks if b.shared == "outer" else 0))
    # THREAD may have left a LOOP of its axis, the innermost of those around
    inside = {a.number for a in (*panels, *tiles)}
    levels = [a for a in table.of_type(AxisType.THREAD, AxisType.LOOP) if a.number not in inside]
    outside = [a for a in levels if a not in still]
    while len(outside) > 1 and b.window and not p.moves_columns(outside[-1]):
        outside.pop()  # of the shared axis: columns stay for all of a task
    panel = outside[-2:-1] if b.wide and loops.m_block is not None else panels[-1:] or outside[-1:]
    for number, _ in p.columns if b.pack_columns and (tiles or still) and panel else ():
        table.apply(Opt(OptKind.STAGE, panel[0].number, number))
    if b.window and levels:
        _stage_windows(table, p, levels)
        return
    for number, _ in p.rows if b.pack_rows and levels else ():
        table.apply(Opt(OptKind.STAGE, levels[-1].number, number))


def _stage_windows(table: AxisTable, p: Product, levels: Sequence[Axis]) -> None:
    """Stage the rows at the outermost level where they fit beside the columns."""
    room = int(ROOM * p.target.l2_bytes)
    for (number, _), found in zip(p.rows, p.row_windows, strict=True):
        kind = OptKind.STAGE if found is None else OptKind.WINDOW
        fitting = [a for a in levels if table.scratch_of(Opt(kind, a.number, number)) <= room]
        table.apply(Opt(kind, (fitting or levels[-1:])[0].number, number))


class _Loops:
    """The axes of a blocking after its splits; None where nothing is left of one."""

    def __init__(self, table: AxisTable, p: Product, b: Blocking) -> None:
        if p.merged:
            inner = next(a for a in table.axes.values() if a.roots == p.n.roots[1:])
            table.apply(Opt(OptKind.MERGE, p.n.number, inner.number))
        if b.block and p.size_m > b.tile_m * b.block:
            table.apply(Opt(OptKind.PADTO, p.m.number, b.tile_m * b.block))
        self.m, _ = _part(table, p.m.number, OptKind.UPCAST, b.tile_m)
        self.across: Axis | None = p.across
        if p.across is not None and b.tile_o > 1:
            self.across, _ = _part(table, p.across.number, OptKind.UPCAST, b.tile_o)
        self.n, _ = _part(table, p.n.number, OptKind.UPCAST, b.tile_n)
        self.m_block: Axis | None = None
        self.step: Axis | None = None
        self.n_share: Axis | None = None
        self.m_share: Axis | None = None
        if b.block and self.m is not None:
            self.m_block, self.m = _part(table, self.m.number, OptKind.SPLIT, b.block)
        if b.pieces > 1:
            self.step, _ = _part(table, p.fold.number, OptKind.ACCUMULATE, b.pieces)
        if b.shared == "n" and self.n is not None:
            self.n_share, self.n = _part(table, self.n.number, OptKind.SPLIT, size_of(self.n) // b.tasks)
        if b.shared == "m" and self.m_block is not None:
            amount = size_of(self.m_block) // b.tasks
            self.m_share, self.m_block = _part(table, self.m_block.number, OptKind.SPLIT, amount)


def _arrange(table: AxisTable, nest: Sequence[Axis]) -> None:
    """Bring the LOOPs into this order."""
    places = sorted([a.number for a in nest])
    for place, axis in zip(places, nest, strict=True):
        if axis.number != place:
            table.apply(Opt(OptKind.SWAP, place, axis.number))

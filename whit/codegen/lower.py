"""Lowering passes on kernels whose tiles are still folded: before opts (`prepare`) and after them
(`lower_passes`).

No pass here sees a value per lane: UPCAST and UNROLL ranges stay RANGE nodes until `linearize` expands
them once.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any

from whit.codegen.block_dots import split_words
from whit.codegen.block_sums import split_blocks
from whit.codegen.crop import crop_loops
from whit.codegen.decompose import decompose
from whit.codegen.dots import match_signs, use_dots
from whit.codegen.edges import free_edges
from whit.codegen.keep import keep_values
from whit.codegen.masks import simplify_masks
from whit.codegen.simplify import simplify_values, simplify_values_pass
from whit.codegen.stages import lower_stages, next_uid, rename_free
from whit.codegen.target import Target
from whit.uop import AxisType, LocalArg, Ops, RangeArg, SpecialArg, UOp, dtypes
from whit.uop.rewrite import Pass, rebuild, run_passes
from whit.uop.symbolic import conjunction, simplify

# ---- before opts -------------------------------------------------------------------------------------------


def prepare(ast: UOp, target: Target | None = None) -> UOp:
    """The kernel in the form that opts and `linearize` expect; the same kernel when it is in that form
    already. With a target it uses the sums of products that this one has instructions for."""
    while True:
        separate = run_passes(ast, _PREPARE[:-1])
        shared = run_passes(separate, _PREPARE[-1:])
        if shared is separate:
            return shared if target is None else run_passes(shared, _PREPARE_FOR, target)
        ast = shared  # sums over one loop may have become equal, and what contains them simpler


def drop_unit_ranges(ast: UOp) -> UOp:
    """RANGE(1) -> 0, also among the ranges that a REDUCE or END closes."""
    units = {
        u for u in ast.toposort() if u.op is Ops.RANGE and u.src[0].op is Ops.CONST and u.src[0].arg == 1
    }
    if not units:
        return ast

    def drop(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.REDUCE and old.op is not Ops.END:
            return new
        kept = [r for r in old.src[1:] if r not in units]
        return new.replace(src=(new.src[0], *kept)) if kept else new.src[0]  # a store or a fold of one value

    return simplify(rebuild(ast, drop, dict.fromkeys(units, UOp.index(0))))


def hoist_factors(ast: UOp) -> UOp:
    """sum_k (a[k] * s) -> (sum_k a[k]) * s for floats.

    Before:  REDUCE(MUL(INDEX(q, k), s), k; ADD)
    After:   MUL(REDUCE(INDEX(q, k), k; ADD), s)
    """

    def hoist(old: UOp, new: UOp) -> UOp:
        is_sum = old.op is Ops.REDUCE and old.arg.op is Ops.ADD and old.dtype.is_float
        return _hoist(new) if is_sum else new

    return rebuild(ast, hoist)


def _hoist(reduce: UOp) -> UOp:
    ranges = frozenset(reduce.src[1:])
    inside: list[UOp] = []
    outside: list[UOp] = []
    stack = [reduce.src[0]]
    while stack:
        node = stack.pop()
        if node.op is Ops.MUL and (node is reduce.src[0] or node.ranges & ranges):
            stack += node.src[::-1]
        else:
            (inside if node.ranges & ranges else outside).append(node)
    if not outside or not inside:
        return reduce
    product = functools.reduce(operator.mul, inside)
    return reduce.replace(src=(product, *reduce.src[1:])) * functools.reduce(operator.mul, outside)


def _reduces_below(order: Iterable[UOp]) -> tuple[dict[UOp, int], dict[UOp, int]]:
    """For each node its level (how many REDUCEs lie one after another below it), and for each REDUCE its
    own level."""
    level: dict[UOp, int] = {}
    own: dict[UOp, int] = {}
    for node in order:
        below = max([level[s] for s in node.src], default=0)
        if node.op is Ops.REDUCE:
            below += 1
            own[node] = below
        level[node] = below
    return level, own


def separate_loops(ast: UOp) -> UOp:
    """Give each loop its own RANGE where one RANGE serves several: REDUCEs of different levels or
    surroundings.

    REDUCEs with equal ranges, level and outer ranges keep sharing; any other second owner of a RANGE gets
    a new one. Ranges of the tile are no loops: they stay.
    """
    order = ast.toposort()
    _, levels = _reduces_below(order)
    if not levels:
        return ast
    uids = itertools.count(next_uid(order))
    owners: dict[UOp, Any] = {}
    for node in order:
        if node.op is Ops.END:
            for r in node.src[1:]:
                owners[r] = "store"

    def separate(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.REDUCE:
            return new
        loops = [r for r in old.src[1:] if not r.arg.axis.is_tile]
        around = frozenset([r for r in new.ranges if not r.arg.axis.is_tile])
        key = (tuple(loops), levels[old], around)
        renamed: dict[UOp, UOp] = {}
        for r in loops:
            if owners.setdefault(r, key) != key:
                renamed[r] = UOp(Ops.RANGE, dtypes.index, r.src, RangeArg(next(uids), r.arg.axis))
                owners[renamed[r]] = key
        if not renamed:
            return new
        return new.replace(
            src=(rename_free(new.src[0], renamed), *[renamed.get(r, r) for r in old.src[1:]])
        )

    return rebuild(ast, separate)


def share_loops(ast: UOp) -> UOp:
    """Independent REDUCEs of one level, equal surroundings and sizes that read a common buffer become one
    loop.

    Before:  m = REDUCE(x[k], k; ADD); v = REDUCE(x[l] * x[l], l; ADD)
    After:   m = REDUCE(x[k], k; ADD); v = REDUCE(x[k] * x[k], k; ADD)
    """
    order = ast.toposort()
    _, levels = _reduces_below(order)
    if len(levels) < 2:
        return ast
    groups: dict[Any, list[tuple[tuple[UOp, ...], set[UOp]]]] = {}
    changes: dict[UOp, UOp] = {}
    for reduce, level in sorted(levels.items(), key=lambda item: [r.arg.uid for r in item[0].src[1:]]):
        ranges = reduce.src[1:]
        key = (level, reduce.ranges, tuple([(r.src[0], r.arg.axis) for r in ranges]))
        body = reduce.src[0].toposort(lambda u: u.op is Ops.STAGE)  # what fills scratch is read by others
        reads = {u.src[0] for u in body if u.op is Ops.INDEX}
        if any(r in changes for r in ranges):
            continue
        for first, known in groups.setdefault(key, []):
            if first == ranges:
                known |= reads
                break
            if known & reads and not set(first) & set(ranges):
                changes.update(zip(ranges, first, strict=True))
                known |= reads
                break
        else:
            groups[key].append((ranges, reads))
    return _substitute_everywhere(ast, changes) if changes else ast


def _substitute_everywhere(ast: UOp, changes: dict[UOp, UOp]) -> UOp:
    return simplify(ast.substitute(changes))


# ---- after opts --------------------------------------------------------------------------------------------


def group_reduces(ast: UOp) -> UOp:
    """A REDUCE over GROUP_REDUCE ranges becomes partial results in shared scratch and a loop that combines
    them.

    Before:  STORE(p, i, REDUCE(v, k, g; ADD))
    After:   part = AFTER(LOCAL, STORE(LOCAL, g, REDUCE(v, k; ADD)))
             STORE(p, i, REDUCE(INDEX(part, h), h; ADD), g == 0)
    """
    order = ast.toposort()
    items = [u for u in order if u.op is Ops.RANGE and u.arg.axis in (AxisType.LOCAL, AxisType.GROUP_REDUCE)]
    groups = [u for u in items if u.arg.axis is AxisType.GROUP_REDUCE]
    if not groups:
        return ast
    uids, numbers = itertools.count(next_uid(order)), itertools.count()

    def share(old: UOp, new: UOp) -> UOp:
        if old.op is Ops.STORE and old.src[0].op is Ops.PARAM:
            alone = conjunction(*new.src[3:], *[g.equal(0) for g in groups])
            return new.replace(src=(*new.src[:3], *_mask(alone)))
        mine = [r for r in old.src[1:] if r in groups] if old.op is Ops.REDUCE else []
        if not mine:
            return new
        rest = [r for r in old.src[1:] if r not in mine]
        part = UOp(Ops.REDUCE, old.dtype, (new.src[0], *rest), old.arg) if rest else new.src[0]
        again = [r.replace(arg=RangeArg(next(uids), AxisType.REDUCE)) for r in mine]
        return _combine(old, part, mine, again, items, next(numbers))

    return rebuild(ast, share)


def _combine(node: UOp, part: UOp, mine: list[UOp], again: list[UOp], items: list[UOp], number: int) -> UOp:
    """Store `part` of each work-item, then fold the parts over the ranges `again`."""
    outer = sorted([r for r in node.ranges if r in items], key=lambda r: r.arg.uid)
    tile = sorted([r for r in node.ranges if r.arg.axis.is_tile], key=lambda r: r.arg.uid)
    index = other = UOp.index(0)
    size = 1
    for r, h in [(r, r) for r in outer] + list(zip(mine, again, strict=True)) + [(r, r) for r in tile]:
        index, other, size = index * r.src[0].arg + r, other * r.src[0].arg + h, size * r.src[0].arg
    memory = UOp(Ops.LOCAL, node.dtype, (), LocalArg(number, size, True))
    alone = conjunction(*[r.equal(0) for r in items if r not in mine and r not in outer])
    stored = memory.after(UOp(Ops.STORE, dtypes.void, (memory, index, part, *_mask(alone))))
    return UOp(Ops.REDUCE, node.dtype, (UOp(Ops.INDEX, node.dtype, (stored, other)), *again), node.arg)


def _mask(condition: UOp | None) -> tuple[UOp, ...]:
    return () if condition is None else (condition,)


def bind_specials(ast: UOp) -> UOp:
    """THREAD, GLOBAL, LOCAL and GROUP_REDUCE ranges become SPECIAL indices; ranges beyond what the
    hardware has share the last.

    Before:  RANGE(4; THREAD 3)
    After:   SPECIAL("thread", 4)
    """
    found = sorted([u for u in ast.toposort() if u.op is Ops.RANGE], key=lambda u: (u.arg.axis, u.arg.uid))
    changes: dict[UOp, UOp] = {}
    for name, limit, types in _SPECIALS:
        mine = [u for u in found if u.arg.axis in types]
        for number in range(min(limit, len(mine))):
            taken = mine[number:] if number == limit - 1 else mine[number : number + 1]
            total = math.prod([r.src[0].arg for r in taken])
            arg = SpecialArg(name if limit == 1 else f"{name}{number}", total)
            index = UOp(Ops.SPECIAL, dtypes.index, (), arg)
            for r in taken:
                total //= r.src[0].arg
                changes[r] = (index // total) % r.src[0].arg if len(taken) > 1 else index
    if not changes:
        return ast

    def bind(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.END:
            return new
        return new.src[0].end(*[r for r in old.src[1:] if r not in changes])

    return rebuild(ast, bind, changes)


def nest_stores(ast: UOp) -> UOp:
    """Give a store its own RANGE where its loops nest in another order than those of the stores before it.

    Before:  SINK(END(a, i), END(b, j, i))
    After:   SINK(END(a, i), END(b', j, k))
    """
    if len(ast.src) < 2:
        return ast
    uid = -1
    around: dict[UOp, UOp | None] = {}
    ends: list[UOp] = []
    for end in ast.src:
        outer: UOp | None = None
        renamed: dict[UOp, UOp] = {}
        for r in end.src[1:] if end.op is Ops.END else ():
            if r.arg.axis.is_tile:
                continue
            if around.setdefault(r, outer) is not outer:
                uid = uid + 1 if uid >= 0 else next_uid(ast.toposort())
                renamed[r] = UOp(Ops.RANGE, dtypes.index, r.src, RangeArg(uid, r.arg.axis))
                r = renamed[r]
                around[r] = outer
            outer = r
        if renamed:
            end = rename_free(end.src[0], renamed).end(*[renamed.get(r, r) for r in end.src[1:]])
        ends.append(end)
    return UOp.sink(*ends).replace(arg=ast.arg) if tuple(ends) != ast.src else ast


# name, how many of them, the ranges that become one
_SPECIALS = (
    ("gidx", 3, (AxisType.GLOBAL,)),
    ("thread", 1, (AxisType.THREAD,)),
    ("lidx", 3, (AxisType.LOCAL, AxisType.GROUP_REDUCE)),
)


def _decompose(ast: UOp, target: Target) -> UOp:
    return decompose(ast, target)


def lower_passes() -> tuple[Pass, ...]:
    """The pipeline between opts and `linearize`; each pass takes the Target as its context."""
    return (
        Pass("match signs", match_signs, "tiled", "tiled", "products of bytes with the signs that there are"),
        Pass("keep values", keep_values, "tiled", "tiled", "what two loops compute comes from scratch"),
        Pass(
            "bind specials",
            lambda u, _: nest_stores(bind_specials(lower_stages(group_reduces(u)))),
            "tiled",
            "tiled",
            "work-items share reductions; THREAD, GLOBAL and LOCAL ranges are hardware indices",
        ),
        Pass("simplify indices", lambda u, _: simplify(u), "tiled", "tiled", "canonical index arithmetic"),
        Pass("crop loops", lambda u, _: crop_loops(u), "tiled", "tiled", "no iterations that are masked off"),
        Pass("free edges", free_edges, "tiled", "tiled", "rows that no store keeps are read without masks"),
        Pass("decompose", _decompose, "tiled", "tiled", "only ops and dtypes that the target computes"),
        Pass(
            "simplify again",
            lambda u, _: separate_loops(simplify(u)),
            "tiled",
            "tiled",
            "decompositions leave index arithmetic; of sums in one loop, one may be further out by now",
        ),
    )


def _separated(before: UOp, after: UOp) -> UOp:
    return before if after is before else separate_loops(hoist_factors(simplify_values(after)))


_PREPARE_FOR = (
    Pass("use dots", use_dots, "kernel", "kernel", "sums of products of small integers"),
    Pass(
        "split words",
        lambda u, target: _separated(u, split_words(u, target)),
        "kernel",
        "kernel",
        "sums of products of bytes in blocks: four in a word",
    ),
    Pass(
        "split blocks",
        lambda u, target: _separated(u, split_blocks(u, target)),
        "kernel",
        "kernel",
        "sums over weights in blocks: scales stand outside",
    ),
)
_PREPARE = (
    simplify_values_pass,
    Pass("drop unit ranges", lambda u, _: drop_unit_ranges(u), "kernel", "kernel", "a RANGE of size 1 is 0"),
    Pass("simplify masks", lambda u, _: simplify_masks(u), "kernel", "kernel", "masks and nested sums"),
    Pass(
        "hoist factors",
        lambda u, _: hoist_factors(u),
        "kernel",
        "kernel",
        "factors of a sum that do not change stand outside",
    ),
    Pass("separate loops", lambda u, _: separate_loops(u), "kernel", "kernel", "a RANGE belongs to one loop"),
    Pass(
        "share loops",
        lambda u, _: share_loops(u),
        "kernel",
        "kernel",
        "independent REDUCEs that read one buffer share a loop",
    ),
)

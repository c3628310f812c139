"""The beam on made-up times: it finds what it should, never loses to the heuristics, and tries every kind of
opt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from tests.codegen.opts_kernels import (
    AVX512,
    GROUPS,
    conv,
    elementwise,
    fold,
    folds,
    loops,
    matmul,
    param,
    read,
    softmax,
    store,
    transpose,
)
from whit.codegen import search as module
from whit.codegen.heuristics import choose
from whit.codegen.lower import prepare
from whit.codegen.opts import AxisTable, Opt, OptKind
from whit.codegen.search import Opts, Search, Timing, actions
from whit.codegen.target import Target
from whit.uop import Ops, UOp


class Times:
    """A judge with made-up seconds: rough ones, and those of races (the same ones if not given)."""

    def __init__(
        self,
        rough: Callable[[Opts], float],
        race: Callable[[Opts], float] | None = None,
        wrong: Callable[[Opts], bool] = lambda opts: False,
        most: int = 10**9,
    ) -> None:
        self.rough, self.fair, self.wrong, self.most = rough, race or rough, wrong, most
        self.measured: list[Opts] = []
        self.raced: list[list[Opts]] = []

    def measure(self, candidates: Sequence[Opts]) -> list[float]:
        self.measured += candidates
        return [self.rough(opts) for opts in candidates]

    def race(self, candidates: Sequence[Opts], careful: bool) -> list[Timing]:
        self.raced.append(list(candidates))
        return [Timing(self.fair(opts), self.fair(opts)) for opts in candidates]

    def verify(self, opts: Opts) -> bool:
        return not self.wrong(opts)

    def expired(self) -> bool:
        return len(self.measured) >= self.most


def search(ast: UOp, target: Target, width: int, judge: Times, hints: Sequence[Opts] = ()) -> Opts:
    return Search(ast, target, width, judge, hints).run()


def start_of(ast: UOp) -> Opts:
    return choose(prepare(ast), AVX512)


MATMUL = matmul(64, 64, 64)


@pytest.mark.parametrize("kind", [k for k in OptKind if not k.name.startswith(("G", "L", "P"))])
def test_every_kind_of_opt_is_found_when_it_pays(kind: OptKind) -> None:
    special = {OptKind.ACCUMULATE: matmul(16, 16, 1024), OptKind.WINDOW: conv(2, 4, 8, 12, 12, 3, 3)}
    ast = special.get(kind, MATMUL)
    start = start_of(ast)
    few = sum(o.kind is kind for o in start)
    judge = Times(lambda opts: 0.5 if sum(o.kind is kind for o in opts) > few else 1.0)
    if kind in (OptKind.MERGE, OptKind.THREAD):  # of loops that the heuristics left
        ast = elementwise(8, 9, 5) if kind is OptKind.MERGE else transpose(96, 64)
        few = -1
        judge = Times(lambda opts: 0.5 if [o.kind for o in opts] == [kind] else 1.0)
    assert any(o.kind is kind for o in search(ast, AVX512, 2, judge))


def test_padding_is_found_where_nothing_divides() -> None:
    judge = Times(lambda opts: 0.5 if any(o == Opt(OptKind.PADTO, 0, 4) for o in opts) else 1.0)
    assert Opt(OptKind.PADTO, 0, 4) in search(matmul(61, 67, 59), AVX512, 2, judge)


def test_groups_are_tried_where_there_are_some() -> None:
    kinds = {opt.kind for more in actions(AxisTable.of(matmul(64, 64, 64), GROUPS)) for opt in more}
    assert {OptKind.LOCAL, OptKind.GROUP, OptKind.GROUPTOP} <= kinds and OptKind.THREAD not in kinds


def test_what_the_heuristics_chose_can_be_changed_in_every_part() -> None:
    start = start_of(MATMUL)
    for at, opt in enumerate(start):
        if opt.kind is OptKind.PADTO:
            continue
        judge = Times(lambda opts, opt=opt: 0.5 if opts.count(opt) < start.count(opt) else 1.0)
        assert search(MATMUL, AVX512, 1, judge) != start, at


def test_never_slower_than_the_heuristics() -> None:
    """Careless timing favours everything else, the race does not."""
    start = start_of(MATMUL)
    judge = Times(lambda opts: 1.0 if opts == start else 0.5, lambda opts: 1.0 if opts == start else 2.0)
    assert search(MATMUL, AVX512, 2, judge) == start
    assert judge.raced and all(start in entrants for entrants in judge.raced)


@pytest.mark.parametrize("gain", [1.0, 0.99])
def test_a_tie_keeps_the_heuristics(gain: float) -> None:
    start = start_of(MATMUL)
    judge = Times(lambda opts: 1.0 if opts == start else 0.5, lambda opts: 1.0 if opts == start else gain)
    assert search(MATMUL, AVX512, 2, judge) == start


def test_a_lucky_run_does_not_win() -> None:
    start = start_of(MATMUL)

    class Lucky(Times):
        def race(self, candidates: Sequence[Opts], careful: bool) -> list[Timing]:
            return [Timing(1.0, 1.1) if opts == start else Timing(0.9, 1.2) for opts in candidates]

    assert search(MATMUL, AVX512, 2, Lucky(lambda opts: 1.0 if opts == start else 0.5)) == start


def test_a_winner_has_to_win_most_turns_and_once_more_alone() -> None:
    start = start_of(MATMUL)

    class Seldom(Times):
        def race(self, candidates: Sequence[Opts], careful: bool) -> list[Timing]:
            return [Timing(1.0, 1.0, 0.0) if opts == start else Timing(0.9, 0.9, 0.5) for opts in candidates]

    class Crowd(Times):
        """Only in a crowd is anything faster."""

        def race(self, candidates: Sequence[Opts], careful: bool) -> list[Timing]:
            fast = 0.5 if len(candidates) > 2 else 1.0
            return [Timing(1.0, 1.0, 0.0) if opts == start else Timing(fast, fast) for opts in candidates]

    for judge in (Seldom, Crowd):
        assert search(MATMUL, AVX512, 2, judge(lambda opts: 1.0 if opts == start else 0.5)) == start


def test_a_winner_that_is_wrong_on_other_data_is_dropped() -> None:
    good, wrong = Opt(OptKind.UPCAST, 0, 2), Opt(OptKind.UPCAST, 0, 4)

    def seconds(opts: Opts) -> float:
        return 0.2 if wrong in opts else 0.5 if good in opts else 1.0

    judge = Times(seconds, wrong=lambda opts: wrong in opts)
    found = search(transpose(64, 64), AVX512, 3, judge)
    assert wrong not in found
    assert sum(found in entrants for entrants in judge.raced) >= 1


def test_all_candidates_fail() -> None:
    ast = softmax(64, 64)
    assert search(ast, AVX512, 1, Times(lambda opts: math.inf)) == start_of(ast)


def test_heuristics_that_fail_are_replaced() -> None:
    start = start_of(MATMUL)
    judge = Times(lambda opts: math.inf if opts == start else 1.0)
    assert search(MATMUL, AVX512, 1, judge) != start


def test_hints_are_tried_first() -> None:
    hint = (Opt(OptKind.UPCAST, 1, 16),)
    judge = Times(lambda opts: 0.5 if opts == hint else 1.0, most=0)
    assert search(MATMUL, AVX512, 1, judge, [hint, (Opt(OptKind.UPCAST, 77, 3),)]) == hint


def test_nothing_new_is_tried_when_the_time_is_over() -> None:
    judge = Times(lambda opts: 1.0 / (1 + len(judge.measured)), most=20)
    search(MATMUL, AVX512, 2, judge)
    assert 20 <= len(judge.measured) <= 20 + module.BATCH


def test_a_kernel_that_is_heavy_without_opts_does_not_run_without_them() -> None:
    heavy, light = Times(lambda opts: 1.0, most=0), Times(lambda opts: 1.0, most=0)
    search(matmul(512, 512, 512), AVX512, 1, heavy)
    search(matmul(16, 16, 16), AVX512, 1, light)
    assert () not in heavy.measured and () in light.measured


def test_an_interrupt_leaves_the_winner_of_the_last_race() -> None:
    class Interrupted(Times):
        def measure(self, candidates: Sequence[Opts]) -> list[float]:
            if len(self.raced) == 2:
                raise KeyboardInterrupt
            return super().measure(candidates)

    judge = Interrupted(lambda opts: 1.0 - 0.01 * len(opts) - 0.3 * (len(opts) > len(start_of(MATMUL))))
    state = Search(MATMUL, AVX512, 1, judge)
    with pytest.raises(KeyboardInterrupt):
        state.run()
    assert state.best != state.start and state.best in judge.raced[-1]


def test_no_kernel_is_measured_twice_and_all_are_legal() -> None:
    ast, seen = transpose(64, 64), []
    judge = Times(lambda opts: 1.0 / (1 + len(judge.measured)))
    search(ast, AVX512, 2, judge)
    for opts in judge.measured:
        table = AxisTable.of(ast, AVX512)
        for opt in opts:
            table.apply(opt)
        seen.append(table.build().replace(arg=None))
    assert len(seen) == len(set(seen)) > 10


def test_actions_name_axes_that_exist() -> None:
    table = AxisTable.of(matmul(64, 48, 30), AVX512)
    found = list(actions(table))
    assert (Opt(OptKind.PADTO, 2, 4), Opt(OptKind.UNROLL, 2, 4)) in found
    assert {o.axis for opts in found for o in opts} <= {0, 1, 2}


def test_symbolic_sizes_are_left_alone() -> None:
    n = UOp.variable("n", 1, 64)
    i, j = loops(n, 32)
    (k,) = folds(2, 16)
    factor, other = read(param(1, 64 * 16), i * 16 + k), read(param(2, 16 * 32), k * 32 + j)
    ast = UOp.sink(store(param(0, 64 * 32), i * 32 + j, fold(Ops.ADD, factor * other, k), i, j))
    judge = Times(lambda opts: 1.0 - 0.01 * len(opts), most=60)
    search(ast, AVX512, 2, judge)
    assert len(judge.measured) > 10
    assert all(
        o.axis != 0 or o.kind in (OptKind.SWAP, OptKind.STAGE)
        for opts in judge.measured
        for o in opts
        if not any(p.kind is OptKind.SWAP for p in opts)
    )

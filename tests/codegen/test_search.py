"""The beam: with made-up times it finds what it should; with real workers it survives every kind of bad
candidate."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.codegen.opts_kernels import AVX512, elementwise, matmul, softmax, transpose
from whit.codegen.heuristics import choose
from whit.codegen.opts import AxisTable, Opt, OptKind, parse_opts
from whit.codegen.search import actions, search
from whit.engine import beam
from whit.helpers import Context, cache_dir
from whit.runtime.device import Device

# ---- the search itself, on made-up times -----------------------------------------------------------------


def test_finds_the_fastest_reachable_kernel():
    wanted = Opt(OptKind.UPCAST, 0, 8)

    def measure(candidates, repeats):
        return [0.5 if wanted in opts else 1.0 for opts in candidates]

    assert wanted in search(matmul(64, 64, 64), AVX512, 2, measure)


def test_never_slower_than_the_heuristics():
    ast = matmul(64, 64, 64)
    start = choose(ast, AVX512)

    def fooled(candidates, repeats):
        """Careless timing favours everything else, careful timing does not."""
        return [1.0 if opts == start else 0.5 if repeats == 1 else 2.0 for opts in candidates]

    assert search(ast, AVX512, 2, fooled) == start


def test_all_candidates_fail():
    ast = softmax(64, 64)
    assert search(ast, AVX512, 1, lambda candidates, _: [math.inf] * len(candidates)) == choose(ast, AVX512)


def test_heuristics_that_fail_are_replaced():
    ast = matmul(64, 64, 64)
    start = choose(ast, AVX512)
    found = search(
        ast, AVX512, 1, lambda candidates, _: [math.inf if o == start else 1.0 for o in candidates]
    )
    assert found != start


def test_no_kernel_is_measured_twice_in_a_round_and_all_are_legal():
    ast, seen = transpose(64, 64), []

    def measure(candidates, repeats):
        if repeats == 1:
            for opts in candidates:
                table = AxisTable.of(ast, AVX512)
                for opt in opts:
                    table.apply(opt)
                seen.append(table.build().replace(arg=None))
        return [1.0 / (1 + len(seen))] * len(candidates)

    search(ast, AVX512, 1, measure)
    assert len(seen) == len(set(seen)) > 10


def test_actions_name_axes_that_exist():
    table = AxisTable.of(matmul(64, 48, 30), AVX512)
    found = list(actions(table))
    assert (Opt(OptKind.PADTO, 2, 4), Opt(OptKind.UNROLL, 2, 4)) in found
    assert {o.axis for opts in found for o in opts} <= {0, 1, 2}


# ---- real workers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    made = beam.Pool(2)
    yield made
    made.close()


AST = elementwise(16)


def bad(body: str) -> beam.Compiled:
    """A kernel with the CPU's calling convention and any LLVM body."""
    source = f"define void @bad(ptr %b, ptr %v, i64 %t) {{\n{body}\n}}\n"
    return beam.Compiled("bad", 1, (1, 1, 1), (1, 1, 1), Device.get("CPU").compile(source, "bad"))


def test_good_candidate_is_timed(pool):
    measure = beam.Measure(AST, "CPU", pool)
    times = measure([(), parse_opts("UPCAST axis 0 by 16")], 1)
    assert all(0 < t < 1 for t in times) and measure.failed == 0


def test_a_candidate_that_computes_nothing_is_rejected(pool):
    measure = beam.Measure(AST, "CPU", pool)
    assert measure.time(bad("ret void")) == math.inf
    assert measure([()], 1)[0] < 1


def test_a_candidate_that_computes_something_else_is_rejected(pool):
    measure = beam.Measure(AST, "CPU", pool)
    wrong = bad("%p = load ptr, ptr %b\nstore <16 x float> splat (float 1.0), ptr %p\nret void")
    assert measure.time(wrong) == math.inf


def test_a_candidate_that_crashes_is_survived(pool):
    measure = beam.Measure(AST, "CPU", pool)
    assert measure.time(bad("store i64 1, ptr inttoptr (i64 8 to ptr)\nret void")) == math.inf
    assert measure.time(bad("call void @llvm.trap()\nunreachable")) == math.inf
    assert measure([()], 1)[0] < 1


def test_a_candidate_that_hangs_is_survived(pool, monkeypatch):
    measure = beam.Measure(AST, "CPU", pool)
    measure([()], 1)
    start = time.monotonic()
    assert measure.time(bad("br label %loop\nloop:\nbr label %loop")) == math.inf
    assert time.monotonic() - start < 10
    assert measure([()], 1)[0] < 1


def test_candidates_that_do_not_compile_are_survived(pool):
    measure = beam.Measure(AST, "CPU", pool)
    times = measure([parse_opts("UPCAST axis 7 by 3"), ()], 1)
    assert times[0] == math.inf and times[1] < 1 and measure.failed == 1


def test_a_compiler_that_crashes_or_hangs_costs_its_worker_only(pool):
    requests = [
        ("compile", AST, "CPU", ""),
        ("settings", None),
        ("compile", AST, "CPU", "UPCAST axis 0 by 4"),
    ]
    answers = pool.map(requests, 30.0)  # the second request kills its worker: None has no settings
    assert answers[1] is None and answers[0] is not None and answers[2] is not None
    os.kill(pool.workers[1].process.pid, signal.SIGSTOP)
    pool.map([requests[0], requests[2]], 2.0)  # the stopped worker is given up after two seconds
    assert all(a is not None for a in pool.map([requests[0], requests[2]], 30.0))


def test_a_kernel_that_cannot_run_at_all(pool):
    assert not pool.runner_knows(AST, "CPU:NOSUCH")
    assert beam.Measure(AST, "CPU:NOSUCH", pool)([()], 1) == [math.inf]


def test_winner_is_remembered_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("whit.codegen.search.MOST_CANDIDATES", 4)
    monkeypatch.setattr("whit.codegen.search.MOST_ROUNDS", 1)
    with Context(WHIT_CACHE=str(tmp_path)):
        ast = matmul(32, 32, 32)
        opts = beam.search(ast, "CPU", 1)
        files = list((Path(cache_dir()) / "beam").iterdir())
        assert len(files) == 1
        monkeypatch.setattr(beam, "Measure", None)  # a second search must not measure
        assert beam.search(ast, "CPU", 1) == opts
        files[0].write_bytes(b"damaged")
        with pytest.raises(TypeError):
            beam.search(ast, "CPU", 1)


PROGRAM = """
import os, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
import sys; sys.path.insert(0, {folder!r})
from tests.codegen.opts_kernels import elementwise
from whit.engine import beam
pool = beam.Pool.shared()
assert beam.Measure(elementwise(16), "CPU")([()], 1)[0] < 1
child = os.fork()
if child == 0:
    assert beam.Pool.shared() is not pool
    ok = beam.Measure(elementwise(16), "CPU")([()], 1)[0] < 1
    beam.Pool.shared().close()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert beam.Measure(elementwise(16), "CPU")([()], 1)[0] < 1
print("done")
"""


def test_threads_and_forks_do_not_matter():
    code = PROGRAM.format(folder=os.path.dirname(__file__))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "done\n", result.stderr

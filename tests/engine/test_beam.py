"""BEAM with real workers: every kind of bad candidate is survived and never kept, a search ends in time, and
nothing of it stays behind however it ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.codegen.opts_kernels import (
    buffers_for,
    conv,
    elementwise,
    fold,
    folds,
    full_sum,
    kept_softmax,
    loops,
    matmul,
    outputs,
    param,
    read,
    row_sum,
    softmax,
    store,
    two_stores,
)
from whit.codegen.opts import parse_opts
from whit.engine import beam, trial, tuning, workers
from whit.engine.trial import Compiled, Runner, compile_candidate
from whit.helpers import Context, DeviceError
from whit.runtime.device import Device
from whit.uop import Ops, UOp, dtypes

ROOT = Path(__file__).parents[2]
AST = elementwise(16)


@pytest.fixture(scope="module")
def pool() -> Iterator[workers.Pool]:
    made = workers.Pool(2)
    yield made
    made.close()


def bad(body: str, tasks: int = 1) -> Compiled:
    """A kernel with the CPU's calling convention and any LLVM body."""
    source = f"define void @bad(ptr %b, ptr %v, i64 %t) {{\n{body}\n}}\n"
    return Compiled("bad", tasks, (1, 1, 1), (1, 1, 1), Device.get("CPU").compile(source, "bad"))


# ---- workers -----------------------------------------------------------------------------------------------


def test_good_candidates_are_timed(pool: workers.Pool) -> None:
    measure = beam.Measure(AST, "CPU", pool)
    candidates = [(), parse_opts("UPCAST axis 0 by 16")]
    assert all(0 < t < 1 for t in measure.measure(candidates)) and measure.failed == 0
    assert all(0 < t.least <= t.quarter < 1 for t in measure.race(candidates, False))
    assert all(measure.verify(opts) for opts in candidates)


WRONG = {
    "it computes nothing": "ret void",
    "it computes something else": "%p = load ptr, ptr %b\n"
    "store <16 x float> splat (float 1.0), ptr %p\nret void",
    "it writes where nothing may be": "store i64 1, ptr inttoptr (i64 8 to ptr)\nret void",
    "it traps": "call void @llvm.trap()\nunreachable",
}


@pytest.mark.parametrize("why", WRONG)
def test_a_bad_candidate_is_rejected(pool: workers.Pool, why: str) -> None:
    measure = beam.Measure(AST, "CPU", pool)
    assert measure.time(bad(WRONG[why])) == math.inf
    assert measure.measure([()])[0] < 1


# p0 = p1 * 2 + p2, and then something that it should not do
RIGHT = """
%p0 = load ptr, ptr %b
%g1 = getelementptr ptr, ptr %b, i64 1
%p1 = load ptr, ptr %g1
%g2 = getelementptr ptr, ptr %b, i64 2
%p2 = load ptr, ptr %g2
%x = load <16 x float>, ptr %p1, align 4
%y = load <16 x float>, ptr %p2, align 4
%d = fmul <16 x float> %x, splat (float 2.0)
%s = fadd <16 x float> %d, %y
store <16 x float> %s, ptr %p0, align 4
"""


@pytest.mark.parametrize(
    "more, message",
    [
        ("", None),
        ("%e = getelementptr float, ptr %p0, i64 16\nstore float 0.0, ptr %e", "outside of buffer 0"),
        ("%e = getelementptr float, ptr %p1, i64 -3\nstore float 0.0, ptr %e", "outside of buffer 1"),
        ("%e = getelementptr float, ptr %p2, i64 1039\nstore float 0.0, ptr %e", "outside of buffer 2"),
        ("store float 7.0, ptr %p1", "only reads"),
        (
            "%e = getelementptr float, ptr %p1, i64 16\n%q = load float, ptr %e\nstore float %q, ptr %p0",
            "differs",
        ),
    ],
)
def test_writes_and_reads_beyond_a_buffer_are_noticed(more: str, message: str | None) -> None:
    candidate = bad(RIGHT + more + "\nret void")
    runner = Runner(AST, "CPU")

    def check() -> None:
        runner.check(candidate)
        runner.check_inputs(candidate)

    if message is None:
        check()
        return
    for _ in range(2):  # also when the same is asked again
        with pytest.raises(DeviceError, match=message):
            check()


def test_a_candidate_that_is_right_on_one_input_only_is_not_verified(pool: workers.Pool) -> None:
    """It stores what the reference gives on the data of the search."""
    values = np.frombuffer(Runner(AST, "CPU").reference[0], np.uint32)
    constant = "<" + ", ".join(f"i32 {v}" for v in values) + ">"
    cheat = bad(f"%p = load ptr, ptr %b\nstore <16 x i32> {constant}, ptr %p, align 4\nret void")
    measure = beam.Measure(AST, "CPU", pool)
    assert measure.time(cheat) < 1
    measure.known[parse_opts("UPCAST axis 0 by 2")] = cheat
    assert not measure.verify(parse_opts("UPCAST axis 0 by 2"))


def test_a_candidate_that_hangs_is_survived(pool: workers.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = beam.Measure(AST, "CPU", pool)
    measure.measure([()])
    limits, ask = [], pool.ask_runner
    monkeypatch.setattr(
        pool, "ask_runner", lambda request, limit: limits.append(limit) or ask(request, limit)
    )
    hanging = bad("br label %loop\nloop:\nbr label %loop")
    assert measure.time(hanging) == math.inf
    assert limits[-1] < 3  # seconds that it was waited for
    measure.known[parse_opts("UPCAST axis 0 by 4")] = hanging
    times = measure.race([(), parse_opts("UPCAST axis 0 by 4")], False)
    assert times[0].least < 1 and times[1].least == math.inf


def test_candidates_that_do_not_compile_are_survived(pool: workers.Pool) -> None:
    measure = beam.Measure(AST, "CPU", pool)
    times = measure.measure([parse_opts("UPCAST axis 7 by 3"), ()])
    assert times[0] == math.inf and times[1] < 1 and measure.failed == 1


def test_a_compiler_that_crashes_or_hangs_costs_its_worker_only(pool: workers.Pool) -> None:
    requests = [
        ("compile", AST, "CPU", ""),
        ("settings", None),
        ("compile", AST, "CPU", "UPCAST axis 0 by 4"),
    ]
    answers = pool.map(requests, 30.0)  # the second request kills its worker: None has no settings
    assert answers[1] is None and answers[0] is not None and answers[2] is not None
    os.kill(pool.workers[1].process.pid, signal.SIGSTOP)
    pool.map([requests[0], requests[2]], 1.0)  # the stopped worker is given up after a second
    assert all(a is not None for a in pool.map([requests[0], requests[2]], 30.0))


def test_many_requests_have_one_end(pool: workers.Pool) -> None:
    requests = [("compile", AST, "CPU", "")] * 9
    assert all(pool.map(requests[:2], 30.0))
    for worker in pool.workers:
        os.kill(worker.process.pid, signal.SIGSTOP)
    start = time.monotonic()
    assert pool.map(requests, 30.0, 0.5) == [None] * 9
    assert time.monotonic() - start < 20
    assert all(pool.map(requests[:2], 30.0, 30.0))


def test_a_kernel_that_cannot_run_at_all(pool: workers.Pool) -> None:
    assert not pool.runner_knows(AST, "CPU:NOSUCH", 30.0)
    assert beam.Measure(AST, "CPU:NOSUCH", pool).measure([()]) == [math.inf]


# ---- the reference -----------------------------------------------------------------------------------------


def test_sampled_kernels_compute_the_same_at_fewer_places() -> None:
    """The sample and its marks against NumPy, for outputs with gaps between the sampled places."""
    for ast in (
        matmul(61, 50, 33),
        softmax(40, 31),
        conv(1, 3, 17, 18, 19, 3, 3),
        two_stores(33, 34),
        row_sum(99, 50),
        kept_softmax(40, 50),
    ):
        total = trial.work_of(ast)
        fewer, marks = trial.sampled(ast, total // 20), trial.marking(trial.sampled(ast, total // 20))
        assert trial.work_of(fewer) < total / 3
        whole, part = buffers_for(ast), [np.full_like(b, 77) for b in buffers_for(ast)]
        written = {u.src[0].arg.slot for u in ast.toposort() if u.op is Ops.STORE}
        wanted = outputs(ast, whole)
        part = outputs(fewer, [part[n] if n in written else b for n, b in enumerate(whole)])
        marked = outputs(marks, [np.zeros_like(b) if n in written else b for n, b in enumerate(whole)])
        for slot in written:
            on = marked[slot] == 1
            assert 0 < on.sum() < on.size / 2 and (marked[slot][~on] == 0).all() and on[0] and on[-1]
            np.testing.assert_allclose(part[slot][on], wanted[slot][on], rtol=1e-5)
            assert (part[slot][~on] == 77).all()


def test_small_kernels_and_sums_of_everything_are_not_sampled() -> None:
    small, total = matmul(8, 8, 8), full_sum(1 << 20)
    assert trial.sampled(small) is small and trial.sampled(total, 1000) is total


def test_a_large_kernel_is_compared_where_its_reference_is_computed() -> None:
    ast = matmul(400, 400, 400)
    runner = Runner(ast, "CPU")
    assert runner.marks is not None and 100 < runner.marks[0].sum() < 400 * 400 / 2
    runner.check(compile_candidate(ast, "CPU", None))
    with pytest.raises(DeviceError, match="differs"):
        runner.check(compile_candidate(matmul(400, 400, 399 + 1, right=True), "CPU", None))


def test_in_place_kernels_start_from_the_same_values() -> None:
    """Halving again and again would end in denormals."""
    (i,) = loops(64)
    p = param(0, 64)
    ast = UOp.sink(store(p, i, read(p, i) * 0.5, i))
    runner = Runner(ast, "CPU")
    candidate = compile_candidate(ast, "CPU", None)
    assert runner.is_in_place and runner.time(candidate, math.inf) < 1 and runner.race([candidate] * 2, 0.01)
    got = np.frombuffer(runner.buffers[0].copyout(), np.float32)
    np.testing.assert_array_equal(got, np.frombuffer(runner.data[0], np.float32) * 0.5)


def test_symbolic_sizes_are_verified_at_several() -> None:
    """A kernel that is right for the greatest size only is found out."""
    n = UOp.variable("n", 1, 40)

    def kernel(limit: UOp | int) -> UOp:
        (i,) = loops(limit)
        (k,) = folds(1, 9)
        return UOp.sink(store(param(0, 40), i, fold(Ops.ADD, read(param(1, 360), i * 9 + k), k), i))

    good, wrong = [compile_candidate(kernel(limit), "CPU", ()) for limit in (n, 40)]
    assert trial.verify(kernel(n), "CPU", good)
    Runner(kernel(n), "CPU").check(wrong)
    with pytest.raises(DeviceError, match="differs"):
        trial.verify(kernel(n), "CPU", wrong)


@pytest.mark.parametrize(
    "dtype", [dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.int8, dtypes.bool, dtypes.float64]
)
def test_contents_and_comparison_of_every_kind(dtype: object) -> None:
    p = param(0, 100, dtype)
    data = trial.contents(p, 3)
    assert len(data) == 100 * p.dtype.itemsize and data == trial.contents(p, 3) != trial.contents(p, 4)
    assert trial.is_close(data, bytes(data), p)
    other = trial.contents(p, 4)
    assert not trial.is_close(data, other, p)
    marks = np.zeros(100, bool)
    assert trial.is_close(data, other, p, marks)


def test_sums_in_another_order_are_equal_and_nan_is_not_a_number() -> None:
    p = param(0, 3)
    a = np.array([1.0, np.nan, 1000.0], np.float32)
    assert trial.is_close(a.tobytes(), (a * np.float32(1 + 1e-5)).tobytes(), p)
    assert not trial.is_close(a.tobytes(), np.array([1.0, 2.0, 1000.0], np.float32).tobytes(), p)
    assert not trial.is_close(a.tobytes(), np.array([1.2, np.nan, 1000.0], np.float32).tobytes(), p)


# ---- whole searches ----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with Context(WHIT_CACHE=str(tmp_path)):
        yield tmp_path / "beam"


def test_a_search_ends_in_time_and_is_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ast = matmul(96, 96, 96)
    with Context(BEAM_TIME=2):
        start = time.monotonic()
        opts = beam.search(ast, "CPU", 2)
        assert time.monotonic() - start < 30  # 2 on an idle machine
    (file,) = cache.iterdir()
    entry = tuning.load(ast, Device.get("CPU").target.key)
    assert entry is not None and entry.complete and entry.opts == tuning.repr_opts(opts)
    assert 0 < entry.after <= entry.before < 1
    monkeypatch.setattr(beam, "Measure", None)  # a second search must not measure
    assert beam.search(ast, "CPU", 2) == beam.search(ast, "CPU", 1) == opts
    for outdated in (entry._replace(base=""), entry._replace(complete=False), entry._replace(width=1)):
        tuning.save(outdated)
        with pytest.raises(TypeError):
            beam.search(ast, "CPU", 2)
    file.write_bytes(b"damaged")
    with pytest.raises(TypeError):
        beam.search(ast, "CPU", 2)


@pytest.mark.slow
def test_the_seconds_of_a_search_hold_for_a_kernel_that_runs_long(cache: Path) -> None:
    """One run takes a good part of the time, and without opts ten times all of it."""
    with Context(BEAM_TIME=3):
        start = time.monotonic()
        beam.search(matmul(640, 640, 2048), "CPU", 2)
        assert time.monotonic() - start < 30  # 3 on an idle machine


def test_an_interrupt_keeps_the_best_so_far(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ast = elementwise(64, 64)
    better = parse_opts("UPCAST axis 1 by 8")

    class Half(beam.Measure):
        def race(self, candidates: object, careful: bool) -> object:
            from whit.codegen.search import Timing

            found = [Timing(0.5, 0.5) if opts == better else Timing(1.0, 1.0) for opts in candidates]  # type: ignore[attr-defined]  # a sequence
            if better in candidates:  # type: ignore[operator]  # a sequence
                Half.raced = True
            return found

        def measure(self, candidates: object) -> list[float]:
            if Half.raced:
                raise KeyboardInterrupt
            return [0.1 if opts == better else 1.0 for opts in candidates]  # type: ignore[attr-defined]  # a sequence

        def verify(self, opts: object) -> bool:
            return True

        raced = False

    monkeypatch.setattr(beam, "Measure", Half)
    tuning.save(
        tuning.Entry(
            tuning.kernel_key(ast),
            Device.get("CPU").target.key,
            "",
            tuning.repr_opts(better),
            "",
            9,
            True,
            1.0,
            1.0,
        )
    )
    with pytest.raises(KeyboardInterrupt):
        beam.search(ast, "CPU", 2)
    entry = tuning.load(ast, Device.get("CPU").target.key)
    assert entry is not None and not entry.complete and entry.opts == "UPCAST axis 1 by 8"
    with Context(BEAM=2):
        assert beam.known(ast, Device.get("CPU").target.key) is None  # the search goes on next time


def _known_base(ast: UOp) -> str:
    entry = tuning.load(ast, Device.get("CPU").target.key)
    assert entry is not None
    return entry.base


@pytest.mark.slow
@pytest.mark.parametrize(
    "ast",
    [
        matmul(200, 300, 100),
        softmax(200, 300),
        conv(1, 8, 16, 20, 20, 3, 3),
        row_sum(500, 500),
        two_stores(99, 300),
    ],
)
def test_a_winner_is_not_slower(cache: Path, ast: UOp) -> None:
    """A race after the search, against what the heuristics choose."""
    with Context(BEAM_TIME=4):
        opts = beam.search(ast, "CPU", 2)
    runner = Runner(ast, "CPU")
    base, best = runner.race([compile_candidate(ast, "CPU", o) for o in (None, opts)], 2.0)
    assert opts == parse_opts(_known_base(ast)) or (best[0] <= base[0] * 1.05 and best[2] > 0.5)


def python(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "WHIT_CACHE": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=settings, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def children_of(pid: int) -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(name))
    return found


def gone(pids: set[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(os.path.exists(f"/proc/{pid}") and _alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SEARCH = """
    import sys
    from tests.codegen.opts_kernels import matmul
    from whit.engine import beam, trial, workers
    {more}
    print("searching", flush=True)
    beam.search(matmul(128, 128, 128), "CPU", 2)
"""
HANG = """
    pool = workers.Pool.shared()
    source = "define void @bad(ptr %b, ptr %v, i64 %t) {\\nbr label %loop\\nloop:\\nbr label %loop\\n}\\n"
    from whit.runtime.device import Device
    from tests.codegen.opts_kernels import elementwise
    made = trial.Compiled("bad", 1, (1, 1, 1), (1, 1, 1), Device.get("CPU").compile(source, "bad"))
    measure = beam.Measure(elementwise(16), "CPU", pool)
    measure.measure([()])
    print("hanging", flush=True)
    pool.ask_runner(("time", made, 1.0), 60.0)
"""


@pytest.mark.parametrize("how", ["hang", pytest.param("search", marks=pytest.mark.slow)])
def test_a_killed_process_leaves_no_worker_and_a_usable_cache(how: str, tmp_path: Path) -> None:
    process = python(
        SEARCH.format(more=HANG.replace("\n    ", "\n    ").strip() if how == "hang" else ""), tmp_path
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().strip() in ("searching", "hanging")
    end = time.monotonic() + 20
    while not (found := children_of(process.pid)) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.5)
    found |= children_of(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    assert found and gone(found, 20.0)
    again = python(SEARCH.format(more="") + "\n    print('done')", tmp_path, BEAM_TIME="1")
    out, err = again.communicate(timeout=60)
    assert out.split() == ["searching", "done"], err


def test_ctrl_c_ends_a_search_at_once(tmp_path: Path) -> None:
    process = python(SEARCH.format(more=""), tmp_path, BEAM_TIME="60")
    assert process.stdout is not None and process.stdout.readline().strip() == "searching"
    end = time.monotonic() + 20
    while not (found := children_of(process.pid)) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(1.0)
    found |= children_of(process.pid)
    for pid in [process.pid, *found]:  # a terminal sends it to all of them
        os.kill(pid, signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 20 and "KeyboardInterrupt" in err
    assert gone(found, 20.0)


def test_a_notebook_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """The answers to the interrupted requests must not be taken for those of the next search."""
    code = """
        import signal
        from tests.codegen.opts_kernels import elementwise, matmul
        from whit.engine import beam
        def stop(*_): raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, stop)
        for seconds in (0.5, 0.9):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try: beam.search(matmul(64, 64, 64), "CPU", 2)
            except KeyboardInterrupt: print("stopped")
        times = beam.Measure(elementwise(16), "CPU").measure([()])
        assert times[0] < 1
        print("fine")
    """
    out, err = python(code, tmp_path, BEAM_TIME="30").communicate(timeout=60)
    assert out.split() == ["stopped"] * 2 + ["fine"], err


def test_threads_and_forks_do_not_matter(tmp_path: Path) -> None:
    code = """
        import os, threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        from tests.codegen.opts_kernels import elementwise
        from whit.engine import beam, workers
        pool = workers.Pool.shared()
        assert beam.Measure(elementwise(16), "CPU").measure([()])[0] < 1
        child = os.fork()
        if child == 0:
            assert workers.Pool.shared() is not pool
            ok = beam.Measure(elementwise(16), "CPU").measure([()])[0] < 1
            workers.Pool.shared().close()
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert beam.Measure(elementwise(16), "CPU").measure([()])[0] < 1
        found = []
        threads = [threading.Thread(target=lambda n=n: found.append(beam.search(elementwise(n, 8), "CPU", 1)))
                   for n in (4, 6)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert len(found) == 2
        print("done")
    """
    out, err = python(code, tmp_path, BEAM_TIME="1").communicate(timeout=60)
    assert out == "done\n", err


def test_a_program_under_beam_computes_what_numpy_does_and_starts_warm_without_a_search(
    tmp_path: Path,
) -> None:
    code = """
        import numpy as np
        from whit import Tensor
        from whit.engine import compile, counters
        x = np.random.default_rng(0).standard_normal((37, 41)).astype(np.float32)
        y = np.random.default_rng(1).standard_normal((41, 29)).astype(np.float32)
        got = (Tensor(x) @ Tensor(y)).relu().softmax(-1).numpy()
        z = np.maximum(x @ y, 0); e = np.exp(z - z.max(-1, keepdims=True))
        np.testing.assert_allclose(got, e / e.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
        import sys
        print("whit.engine.workers" in sys.modules, "whit.codegen.pipeline" in sys.modules)
    """
    for wanted in (["True", "True"], ["False", "False"]):
        out, err = python(code, tmp_path, BEAM="1", BEAM_TIME="1").communicate(timeout=60)
        assert out.split() == wanted, err

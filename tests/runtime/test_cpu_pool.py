"""The pool of native threads and the replay of plans: right under load, after a fork, with several Python
threads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.linear_kernels import Kernel, buffer, program, read, run
from whit.runtime import pool
from whit.runtime.cpu import CPUProgram
from whit.runtime.device import Device, Plan, PlanCall
from whit.uop import Ops, SpecialArg, UOp, dtypes

ROOT = Path(__file__).parents[2]


def add_thread(tasks: int, each: int = 1) -> UOp:
    """out[t] += t + 1 for each of `each` times, t = the task's number."""
    kernel = Kernel()
    out = kernel.param(0, dtypes.int64)
    thread = kernel.add(Ops.SPECIAL, dtypes.index, arg=SpecialArg("thread", tasks))
    loop = kernel.range(each)
    one = kernel.const(1)
    value = kernel.add(Ops.CAST, dtypes.int64, kernel.alu(Ops.ADD, thread, one))
    kernel.store(out, thread, kernel.alu(Ops.ADD, kernel.load(out, thread), value))
    kernel.end(loop)
    return kernel.linear()


def axpy(size: int) -> UOp:
    """out = a * n + out, n a variable."""
    kernel = Kernel()
    out, a, n = kernel.param(0, dtypes.int64), kernel.param(1, dtypes.int64), kernel.var("n", 0, 100)
    loop = kernel.range(size)
    factor = kernel.add(Ops.CAST, dtypes.int64, n)
    product = kernel.alu(Ops.MUL, kernel.load(a, loop), factor)
    kernel.store(out, loop, kernel.alu(Ops.ADD, product, kernel.load(out, loop)))
    kernel.end(loop)
    return kernel.linear()


def prefix(size: int, tasks: int) -> UOp:
    """out[t] = sum of all of a, in every task: wrong if the kernel before has not finished."""
    kernel = Kernel()
    out, a = kernel.param(0, dtypes.int64), kernel.param(1, dtypes.int64)
    thread = kernel.add(Ops.SPECIAL, dtypes.index, arg=SpecialArg("thread", tasks))
    total = kernel.add(Ops.REG, dtypes.int64, kernel.const(0, dtypes.int64), arg=0)
    loop = kernel.range(size)
    kernel.add(Ops.SET, dtypes.void, total, kernel.alu(Ops.ADD, kernel.load(a, loop), total))
    kernel.end(loop)
    kernel.store(out, thread, total)
    return kernel.linear()


@pytest.mark.parametrize("tasks", [2, 3, 17, 1000])
def test_every_task_runs_once(tasks: int) -> None:
    got = run("CPU", add_thread(tasks), np.zeros(tasks, np.int64), tasks=tasks)
    np.testing.assert_array_equal(got, np.arange(1, tasks + 1))


def test_many_jobs_in_a_row_and_after_pauses() -> None:
    kernel, small = program("CPU", add_thread(7), tasks=7), program("CPU", add_thread(2), tasks=2)
    data = buffer("CPU", np.zeros(7, np.int64))
    pause = threading.Event()
    for turn in range(3000):
        (kernel if turn % 2 else small)([data.handle], [])
        if turn % 500 == 0:
            pause.wait(0.002)  # long enough for the workers to fall asleep
    expected = 1500 * np.arange(1, 8) + 1500 * np.array([1, 2, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(read(data, np.int64, 7), expected)


def test_python_threads_share_the_pool() -> None:
    kernel = program("CPU", add_thread(5, 100), tasks=5)
    arrays = [buffer("CPU", np.zeros(5, np.int64)) for _ in range(4)]

    def work(data: Any) -> None:
        for _ in range(300):
            kernel([data.handle], [])

    threads = [threading.Thread(target=work, args=(data,)) for data in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for data in arrays:
        np.testing.assert_array_equal(read(data, np.int64, 5), 30000 * np.arange(1, 6))


def test_more_threads_than_cores() -> None:
    crowd = pool.Pool(4 * (os.cpu_count() or 1) + 3)
    try:
        kernel = program("CPU", add_thread(50, 20), tasks=50)
        assert isinstance(kernel, CPUProgram)
        data = buffer("CPU", np.zeros(50, np.int64))
        from whit.runtime.cpu import pointers, values

        for _ in range(200):
            crowd.run(crowd.state, kernel.address, pointers([data.handle]), values([]), 50)
        np.testing.assert_array_equal(read(data, np.int64, 50), 200 * 20 * np.arange(1, 51))
    finally:
        crowd.close()


def test_close_and_start_again() -> None:
    for _ in range(3):
        got = run("CPU", add_thread(4), np.zeros(4, np.int64), tasks=4)
        np.testing.assert_array_equal(got, [1, 2, 3, 4])
        pool.shutdown()


def random_plan(seed: int) -> tuple[list[PlanCall], list[np.ndarray[Any, Any]]]:
    """Thirty dependent calls over four arrays, some threaded, some with a variable."""
    rng = random.Random(seed)
    kinds = [
        (program("CPU", add_thread(8), tasks=8), 1, 0),
        (program("CPU", axpy(8)), 2, 1),
        (program("CPU", prefix(8, 8), tasks=8), 2, 0),
    ]
    calls = []
    for _ in range(30):
        kernel, buffers, variables = rng.choice(kinds)
        calls.append(
            PlanCall(kernel, tuple(rng.sample(range(4), buffers)), tuple(rng.choices(range(2), k=variables)))
        )
    return calls, [np.array([rng.randrange(5) for _ in range(8)], np.int64) for _ in range(4)]


@pytest.mark.parametrize("seed", range(5))
def test_replay_equals_one_by_one(seed: int) -> None:
    calls, arrays = random_plan(seed)
    for values in ([3, 7], [0, 1]):
        one, two = [[buffer("CPU", a) for a in arrays] for _ in range(2)]
        Plan(calls).run([b.handle for b in one], values)
        native = Device.get("CPU").plan(calls)
        assert isinstance(native, pool.NativePlan)
        native.run([b.handle for b in two], values)
        for a, b in zip(one, two):
            assert a.copyout() == b.copyout()
        again = [buffer("CPU", a) for a in arrays]
        native.run([b.handle for b in again], values)  # other buffers, same plan
        for a, b in zip(one, again):
            assert a.copyout() == b.copyout()


def test_an_empty_plan() -> None:
    Device.get("CPU").plan([]).run([], [])


SCRIPT = """
import os, sys
import numpy as np
from tests.runtime.linear_kernels import *
from tests.runtime.test_cpu_pool import add_thread
def check(kernel):
    data = buffer("CPU", np.zeros(9, np.int64))
    for _ in range(50):
        kernel([data.handle], [])
    np.testing.assert_array_equal(read(data, np.int64, 9), 50 * np.arange(1, 10))
kernel = program("CPU", add_thread(9), tasks=9)
check(kernel)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        check(kernel)
        check(program("CPU", add_thread(9, 1), "another", tasks=9))
        grandchild = os.fork()
        if grandchild == 0:
            check(kernel)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    children.append(child)
check(kernel)
print([os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children])
"""


def test_fork() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip().splitlines()[-1:] == ["[0, 0, 0]"], result.stderr
    assert result.returncode == 0


def test_process_ends_while_workers_spin_or_sleep() -> None:
    for pause in ("", "import time; time.sleep(0.01)"):
        code = SCRIPT.split("children = []")[0] + pause + "\nprint('end')"
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        assert result.stdout.strip().endswith("end") and result.returncode == 0, result.stderr


def test_a_replayed_kernel_costs_less_than_a_microsecond() -> None:
    """Claiming tasks and waiting for all of them included; the least of many replays."""
    data = buffer("CPU", np.zeros(8, np.int64))
    for tasks in (1, 2, 8):
        kernel = program("CPU", add_thread(tasks), tasks=tasks)
        plan = pool.NativePlan([PlanCall(kernel, (0,), ())] * 1000)
        best = 1.0
        for _ in range(200):
            start = time.perf_counter()
            plan.run([data.handle], [])
            best = min(best, time.perf_counter() - start)
            if best < 0.5e-3:
                break
        assert best < 1e-3, f"{best * 1e6:.0f} ns a kernel of {tasks} tasks"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_number_of_threads_as_set(threads: int) -> None:
    code = (
        "from whit import Tensor, dtypes\n"
        "from whit.runtime import pool\n"
        "from whit.runtime.device import Device\n"
        "x = (Tensor.arange(3_000_001, dtype=dtypes.int64) * 2).sum().item()\n"
        "print(x, len(pool.pool().workers), Device.get('CPU').target.threads)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NUM_CPU_THREADS": str(threads)},
    )
    expected = [3_000_000 * 3_000_001, threads - 1, threads]
    assert result.stdout.split() == [str(number) for number in expected], result.stderr


def test_a_negative_number_of_threads_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from whit import Tensor; (Tensor([1]) + 1).tolist()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NUM_CPU_THREADS": "-3"},
    )
    assert result.returncode and "NUM_CPU_THREADS=-3: there is no negative number of threads" in result.stderr

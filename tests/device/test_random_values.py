"""Random scalar expressions over every dtype, as kernels on each device, against NumPy bit for bit."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.codegen.test_simplify import evaluate, leaves_of, random_value, same
from tests.numpy_values import NUMPY, TYPES, nasty
from whit.engine import compiled
from whit.runtime.device import Buffer
from whit.uop import Ops, ParamArg, UOp, dtypes
from whit.uop.text import show

POINTS = 37  # a prime, so that vectors have a ragged end


def run(expression: UOp, at: dict[UOp, list[Any]], device: str) -> Any:
    """out[i] = expression(leaf[i] …) for every point, on a device."""
    i = UOp.range(POINTS, uid=0)
    names = list(at)
    placed = {old: UOp(Ops.INDEX, old.dtype, (UOp(Ops.PARAM, old.dtype, (), ParamArg(n + 1, POINTS)), i))
              for n, old in enumerate(names)}
    out = UOp(Ops.PARAM, expression.dtype, (), ParamArg(0, POINTS))
    kernel = UOp.sink(UOp(Ops.STORE, dtypes.void, (out, i, expression.substitute(placed))).end(i))
    buffers = [Buffer(device, POINTS * expression.dtype.itemsize)]
    buffers[0].copyin(memoryview(bytearray(buffers[0].nbytes)))
    for name in names:
        data = np.array(at[name], dtype=NUMPY[name.dtype]).tobytes()
        buffers.append(Buffer(device, len(data)))
        buffers[-1].copyin(memoryview(bytearray(data)))
    compiled(kernel, device).program([b.handle for b in buffers], [], True)
    return np.frombuffer(bytes(buffers[0].copyout()), NUMPY[expression.dtype])


def without_contraction(u: UOp) -> bool:
    """a * b + c of floats may round once instead of twice: not for this test."""
    return not any(n.op in (Ops.ADD, Ops.SUB) and n.dtype.is_float and any(s.op is Ops.MUL for s in n.src)
                   for n in u.toposort())


def check(seed: int, device: str) -> None:
    rng = random.Random(seed)
    pool = {d: [UOp(Ops.INDEX, d, (UOp(Ops.PARAM, d, (), ParamArg(2 * n + k, 1)), UOp.index(0))) for k in (0,
                                                                                                           1)]
            for n, d in enumerate(TYPES)}
    expression = random_value(rng, rng.choice(TYPES), rng.randint(1, 4), pool)
    if not without_contraction(expression):
        return
    at = {name: [rng.choice(nasty(name.dtype)) for _ in range(POINTS)] for name in leaves_of(expression)}
    got = run(expression, at, device)
    for n in range(POINTS):
        point = {name: values[n] for name, values in at.items()}
        expected = evaluate(expression, point)
        assert same(got[n], expected), f"seed {seed} on {device}: {list(point.values())} gives {got[n]!r}, " \
            f"not {expected!r}\n{show(expression)}"


@pytest.mark.parametrize("device", ["PYTHON", "CPU"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 48))
def test_random_values(device: str, seed: int) -> None:
    check(seed, device)

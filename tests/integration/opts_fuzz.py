"""Kernels of real programs under random opts, on every device, against NumPy.

`kernel(seed)` makes a kernel as the schedule does, `random_opts` draws opts for it (illegal ones among them,
which must change nothing), `check` runs it with them and compares. A failure is shrunk, and printed with the
command that runs it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.codegen.linear_eval import ALU, NUMPY
from tests.codegen.opts_kernels import KERNELS as RAW
from tests.codegen.opts_kernels import read_scratch, scratch
from whit import Tensor, UOp, dtypes
from whit.codegen.heuristics import choose
from whit.codegen.lower import prepare
from whit.codegen.opts import STAGING, AxisTable, Opt, OptError, OptKind
from whit.codegen.target import Target
from whit.engine.trial import Runner, compile_candidate
from whit.runtime.device import Device
from whit.schedule import schedule
from whit.uop import AxisType, DType, Ops
from whit.uop.dtype import FLOAT_INFO
from whit.uop.text import show
from whit.uop.uop import variables_of

LARGE = 0.03  # share of kernels with large sizes

# ---- kernels -----------------------------------------------------------------------------------------------

Numbers = random.Random
FLOATS = [dtypes.float32, dtypes.float32, dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.float64]
ANY = [*FLOATS, dtypes.int32, dtypes.int8, dtypes.uint8, dtypes.int64, dtypes.uint16]


def size(r: Numbers, most: int = 40) -> int:
    """1, primes, powers of two and their neighbours, and anything else."""
    return min(most, r.choice([1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 23, 31, 32, 33, 37, r.randint(1, 40)]))


def tensor(r: Numbers, *shape: Any, dtype: DType | None = None) -> Tensor:
    """An input: memory, sometimes seen through a view."""
    dtype = dtype or r.choice(FLOATS)
    kind = r.random()
    if kind < 0.1 and len(shape) == 2:
        return empty(shape[::-1], dtype).transpose(0, 1)
    if kind < 0.2:
        return empty(shape, dtype).flip(r.randrange(len(shape)))
    if kind < 0.3:
        return empty((shape[0] + 3, *shape[1:]), dtype)[1 : shape[0] + 1]
    return empty(shape, dtype)


def empty(shape: Sequence[int], dtype: DType) -> Tensor:
    return Tensor.zeros(*shape, dtype=dtype).contiguous().realize()


def matmul(r: Numbers) -> Tensor:
    dtype, m, n, k = r.choice(ANY), size(r), size(r), size(r)
    result = tensor(r, m, k, dtype=dtype) @ tensor(r, k, n, dtype=dtype)
    return r.choice([lambda x: x, lambda x: x.relu(), lambda x: x + tensor(r, n, dtype=dtype)])(result)


def batched(r: Numbers) -> Tensor:
    dtype, b, m, n, k = r.choice(FLOATS), size(r, 5), size(r, 17), size(r, 17), size(r, 17)
    right = (
        tensor(r, b, k, n, dtype=dtype)
        if r.random() < 0.5
        else tensor(r, b, n, k, dtype=dtype).transpose(1, 2)
    )
    return tensor(r, b, m, k, dtype=dtype) @ right


def conv(r: Numbers) -> Tensor:
    dtype, groups = r.choice(FLOATS), r.choice([1, 1, 2])
    ci, co, h, w, kernel = (
        2 * size(r, 3),
        2 * size(r, 5),
        size(r, 13) + 3,
        size(r, 13) + 3,
        r.choice([1, 2, 3]),
    )
    image = tensor(r, size(r, 2), ci, h, w, dtype=dtype)
    weight = tensor(r, co, ci // groups, kernel, kernel, dtype=dtype)
    return image.conv2d(weight, groups=groups, stride=r.choice([1, 2]), padding=r.choice([0, 1]),
                        dilation=r.choice([1, 1, 2]) if kernel < 3 else 1)  # fmt: skip


def conv_gradient(r: Numbers) -> Tensor:
    ci, co, h, kernel = size(r, 3), size(r, 4), size(r, 9) + 3, r.choice([1, 2, 3])
    image = tensor(r, 2, ci, h, h, dtype=dtypes.float32)
    weight = tensor(r, co, ci, kernel, kernel, dtype=dtypes.float32)
    image.requires_grad = weight.requires_grad = True
    image.conv2d(weight, padding=r.choice([0, 1]), stride=r.choice([1, 2])).sum().backward()
    found = r.choice([image, weight]).grad
    assert found is not None
    return found


def softmax(r: Numbers) -> Tensor:
    return r.choice([Tensor.softmax, Tensor.log_softmax])(tensor(r, size(r), size(r)), axis=r.choice([0, 1]))


def norm(r: Numbers) -> Tensor:
    rows, columns = size(r), size(r) + 1
    x = tensor(r, rows, columns, dtype=dtypes.float32)
    return x.layernorm() * tensor(r, columns, dtype=dtypes.float32) + tensor(r, columns, dtype=dtypes.float32)


def attention(r: Numbers) -> Tensor:
    b, t, d = size(r, 3), size(r, 13), size(r, 9)
    q, k, v = [tensor(r, b, t, d, dtype=dtypes.float32) for _ in range(3)]
    scores = q @ k.transpose(1, 2) * d**-0.5
    if r.random() < 0.6:
        scores = Tensor.ones(t, t).tril().cast("bool").where(scores, float("-inf"))
    return r.choice([lambda: scores.softmax(-1), lambda: scores.softmax(-1) @ v, lambda: scores])()


def attention_gradient(r: Numbers) -> Tensor:
    b, t, d = size(r, 3), r.choice([5, 16, 33, size(r)]), r.choice([4, 8, size(r, 17)])
    inputs = [empty((b, t, d), dtypes.float32) for _ in range(3)]
    for x in inputs:
        x.requires_grad = True
    q, k, v = inputs
    result = q.scaled_dot_product_attention(k, v, is_causal=r.random() < 0.5)
    result.square().sum().backward()
    found = r.choice(inputs).grad
    assert found is not None
    return found


def views(r: Numbers) -> Tensor:
    dtype, m, n = r.choice(ANY), size(r), size(r)
    a, b = tensor(r, m, n, dtype=dtype), tensor(r, m, size(r), dtype=dtype)
    joined = a.cat(b, dim=1).pad(((r.randint(0, 2), 0), (1, r.randint(0, 3)))).flip(r.choice([0, 1]))
    return r.choice([
        lambda: joined * 2, lambda: joined.sum(r.choice([0, 1])), lambda: joined.transpose(0, 1) + 1,
        lambda: joined.max(1), lambda: joined.reshape(-1) + 1, lambda: joined.repeat(2, 1) + 1,
    ])()  # fmt: skip


def elementwise(r: Numbers) -> Tensor:
    dtype, shape = r.choice(FLOATS), [size(r, 23) for _ in range(r.randint(1, 3))]
    x, y = tensor(r, *shape, dtype=dtype), tensor(r, *shape[-1:], dtype=dtype)
    return r.choice([
        lambda: (x * y + 1).relu(), lambda: x.sigmoid() * y, lambda: (x - y).abs().sqrt(),
        lambda: x.tanh() + y,
        lambda: x.gelu(), lambda: x.maximum(y) - x.minimum(y),
        lambda: (x > y).where(x, y * 2), lambda: x.exp(),
    ])()  # fmt: skip


def integers(r: Numbers) -> Tensor:
    dtype, shape = r.choice([dtypes.int32, dtypes.int8, dtypes.int64, dtypes.uint8]), (size(r), size(r))
    x, y = tensor(r, *shape, dtype=dtype), tensor(r, *shape, dtype=dtype)
    return r.choice([
        lambda: (x * y) ^ (x + 3), lambda: x // (y + 1), lambda: x % (y + 2), lambda: (x & y).sum(0),
        lambda: x.prod(1), lambda: x.min(0), lambda: (x == y).sum(1), lambda: x.cumsum(1),
        lambda: (x > y).any(0),
        lambda: x.cast(dtypes.float32).mean(1), lambda: (x < y).all(1),
    ])()  # fmt: skip


def picked(r: Numbers) -> Tensor:
    m, n = size(r), size(r)
    x = tensor(r, m, n, dtype=dtypes.float32)
    index = tensor(r, size(r), dtype=dtypes.int32)
    return r.choice([
        lambda: x.argmax(1), lambda: x.argmin(0), lambda: x[index % m], lambda: index.one_hot(n) * 2,
        lambda: x.cumsum(0), lambda: Tensor.arange(m * n).reshape(m, n) + x,
        lambda: x.var(1), lambda: x.tril(),
        lambda: x.max_pool2d(min(2, m, n)) if min(m, n) > 1 else x + 1,
    ])()  # fmt: skip


def reductions(r: Numbers) -> Tensor:
    dtype, shape = r.choice(FLOATS), [size(r, 17) for _ in range(3)]
    x = tensor(r, *shape, dtype=dtype)
    axis = r.choice([0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)])
    return r.choice([
        lambda: x.sum(axis), lambda: x.max(axis), lambda: x.min(axis), lambda: x.mean(axis),
        lambda: (x * x).sum(axis).sqrt(), lambda: x - x.mean(axis, keepdim=True),
        lambda: x.sum(axis, keepdim=True) + x,
    ])()  # fmt: skip


def symbolic(r: Numbers) -> Tensor:
    most, m = size(r) + 1, size(r, 17)
    n = UOp.variable("n", 1, most).bind(r.randint(1, most))
    x = tensor(r, most, m, dtype=dtypes.float32).shrink(((0, n), None))
    w = tensor(r, m, size(r, 17), dtype=dtypes.float32)
    return r.choice([
        lambda: x @ w, lambda: x.sum(0), lambda: x.sum(1), lambda: x + 1,
        lambda: x.softmax(1), lambda: x.max(0),
        lambda: x.transpose(0, 1) @ x,
    ])()  # fmt: skip


def large(r: Numbers) -> Tensor:
    """Sizes at which the heuristics cut loops into blocks and pack operands; few million steps."""
    dtype, k = r.choice(FLOATS), r.choice([1100, 512, 333, 128])
    m = r.choice([1, 8, 64, 67, 100, 130])
    n = max(1, min(r.choice([300, 256, 96, 61]), 4_000_000 // (m * k)))
    left = empty((m, k), dtype) if r.random() < 0.5 else empty((k, m), dtype).transpose(0, 1)
    right = empty((k, n), dtype) if r.random() < 0.5 else empty((n, k), dtype).transpose(0, 1)
    return r.choice([
        lambda: left @ right, lambda: (left @ right).relu(), lambda: empty((1, 16, 24, 25), dtype).conv2d(
            empty((32, 16, 3, 3), dtype), padding=1),
        lambda: empty((m, k), dtypes.float32).softmax(1), lambda: empty((m, k), dtype).sum(r.choice([0, 1])),
    ])()  # fmt: skip


PROGRAMS: list[Callable[[Numbers], Tensor]] = [
    matmul, matmul, batched, conv, conv, conv_gradient, softmax, norm, attention, attention_gradient, views,
    elementwise, integers, picked, reductions, symbolic, symbolic,
]  # fmt: skip


def kernel(seed: int) -> UOp:
    """A kernel as the schedule gives it to codegen."""
    r = random.Random(seed)
    if r.random() < 0.08:
        return RAW[r.choice(sorted(RAW))]()
    if r.random() < LARGE:
        return _kernel_of(large(r), r) or kernel(seed + 1)
    while True:
        found = _kernel_of(r.choice(PROGRAMS)(r), r)
        if found is not None:
            return found


def _kernel_of(result: Tensor, r: Numbers) -> UOp | None:
    """One of the kernels that compute a tensor; None if there are none."""
    plan, _, _ = schedule([result.contiguous().uop])
    found = [call.ast for call in plan.calls if call.ast is not None]
    found = [ast for ast in found if all(u.op is not Ops.THREEFRY for u in ast.toposort())]
    return r.choice(found) if found else None


# ---- opts --------------------------------------------------------------------------------------------------

TWICE = [OptKind.UPCAST, OptKind.UPCAST, OptKind.UNROLL, OptKind.UNROLL, OptKind.SPLIT, OptKind.SWAP]
KINDS = [*OptKind, *TWICE, OptKind.ACCUMULATE, OptKind.ACCUMULATE]
AMOUNTS = [0, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32]
MOST_TILE = 256  # values: larger ones only take longer to compile


def snapshot(table: AxisTable) -> Any:
    """Everything of a table that an opt may change."""
    axes = {n: (id(a), a.number, a.type, a.size, a.owners, a.roots, a.made_of) for n, a in table.axes.items()}
    return axes, list(table.opts), list(table.pads), list(table.stages), dict(table.scratch)


def attempt(table: AxisTable, opt: Opt) -> bool:
    """Apply an opt. If it is illegal the table must be as before, and the error says why and what to do."""
    before = snapshot(table)
    try:
        table.apply(opt)
    except OptError as error:
        assert snapshot(table) == before, f"{opt} is illegal and changed the table"
        assert error.asked.strip() and error.because.strip() and error.fix.strip(), f"{opt}: {error}"
        return False
    assert table.opts[-1] == opt and Opt.parse(repr(opt)) == opt
    return True


def random_opts(ready: UOp, target: Target, r: Numbers) -> tuple[Opt, ...]:
    """Legal opts, drawn among illegal ones; sometimes those of the heuristics with changes at the end."""
    table = AxisTable.of(ready, target)
    if r.random() < 0.25:
        for opt in choose(ready, target)[: r.randint(0, 12)]:
            if not attempt(table, opt):
                break
    for _ in range(r.choice([1, 2, 4, 6, 9, 14])):
        kind = r.choice(KINDS)
        if kind in STAGING or not table.axes:
            continue
        axis = r.choice(sorted(table.axes)) if r.random() < 0.95 else r.randint(-1, 40)
        amount = r.choice(AMOUNTS) if r.random() < 0.97 else r.choice([-1, 1, 10**9, 999])
        if kind in (OptKind.SWAP, OptKind.MERGE):
            amount = r.choice(sorted(table.axes)) if r.random() < 0.95 else amount
        elif kind is OptKind.THREAD and r.random() < 0.7:
            first = table.of_type(AxisType.LOOP)
            axis = first[0].number if first else axis
        elif kind is OptKind.ACCUMULATE and r.random() < 0.7:
            axis = r.choice([a.number for a in table.of_type(AxisType.REDUCE)] or [axis])
        if kind in (OptKind.UPCAST, OptKind.UNROLL) and _tile(table, axis, amount) > MOST_TILE:
            continue
        if r.random() < 0.5 and amount > 1 and kind not in (OptKind.SWAP, OptKind.MERGE, OptKind.PADTO):
            attempt(table, Opt(OptKind.PADTO, axis, amount))
        attempt(table, Opt(kind, axis, amount))
    while table.axes and r.random() < 0.6:
        attempt(
            table,
            Opt(r.choice(STAGING), r.choice(sorted(table.axes)), r.randint(-1 if r.random() < 0.1 else 0, 4)),
        )
    if r.random() < 0.05 and table.axes:
        attempt(table, Opt(r.choice(list(OptKind)), r.choice(sorted(table.axes)), 2))
    return tuple(table.opts)


def _tile(table: AxisTable, axis: int, amount: int) -> int:
    """Values of the register tile after one more axis."""
    present = [a.size for a in table.axes.values() if a.type.is_tile and isinstance(a.size, int)]
    found = table.axes.get(axis)
    whole = found.size if found is not None and isinstance(found.size, int) else 1
    return int(np.prod(present, dtype=float)) * max(1, amount or whole)


# ---- what a kernel computes, by NumPy ----------------------------------------------------------------------

_NUMPY = {**NUMPY, dtypes.bfloat16: ml_dtypes.bfloat16, dtypes.fp8e4m3: ml_dtypes.float8_e4m3fn,
          dtypes.fp8e5m2: ml_dtypes.float8_e5m2}  # fmt: skip
_FOLD = {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.MIN: np.minimum}


def evaluate(ast: UOp, buffers: dict[int, np.ndarray], variables: dict[str, int]) -> dict[int, np.ndarray]:
    """What a kernel without opts writes: every RANGE is an axis, every value an array over the axes it
    depends on. Each operation rounds to its dtype; sums of floats are taken in float64."""
    order = ast.toposort()
    ranges = [u for u in order if u.op is Ops.RANGE]
    values: dict[UOp, Any] = {}
    with np.errstate(all="ignore"):
        for node in order:
            if node.op not in (Ops.SINK, Ops.END, Ops.STORE):
                values[node] = _value(node, values, ranges, buffers, variables)
        result = {slot: data.copy() for slot, data in buffers.items()}
        for end in ast.src:
            store = end.src[0] if end.op is Ops.END else end
            on = values[store.src[3]] if len(store.src) > 3 else True
            mine = [values[r.src[0]] for r in end.src[1:]] if end.op is Ops.END else []
            if any(int(np.ravel(n)[0]) == 0 for n in mine):
                continue
            index, value, on = np.broadcast_arrays(values[store.src[1]], values[store.src[2]], on)
            result[store.src[0].arg.slot][index[on]] = value[on]
    return result


def _value(node: UOp, values: dict[UOp, Any], ranges: list[UOp], buffers: dict[int, np.ndarray],
           variables: dict[str, int]) -> Any:  # fmt: skip
    op, kind = node.op, _NUMPY[node.dtype]
    src = [values[s] for s in node.src]
    if op is Ops.CONST or op is Ops.VAR:
        value = node.arg if op is Ops.CONST else variables[node.arg.name]
        return np.array(value).astype(kind).reshape((1,) * len(ranges))
    if op is Ops.RANGE:
        shape = [1] * len(ranges)
        shape[ranges.index(node)] = int(np.ravel(src[0])[0])
        return np.arange(shape[ranges.index(node)]).reshape(shape)
    if op is Ops.PARAM:
        return buffers[node.arg.slot]
    if op is Ops.STAGE:  # the elements along a further axis, in the order of its ranges
        sizes = [int(np.ravel(values[r.src[0]])[0]) for r in ranges]
        return scratch(src[0], [ranges.index(r) for r in node.src[1:]], sizes)
    if op is Ops.INDEX and node.src[0].op is Ops.STAGE:
        return read_scratch(src)
    if op is Ops.INDEX:
        index, on = np.broadcast_arrays(src[1], src[2] if len(src) > 2 else True)
        assert ((index >= 0) & (index < src[0].size))[on].all(), "the kernel itself reads outside of a buffer"
        return np.where(on, src[0][np.where(on, index, 0)], np.zeros((), kind)).astype(kind)
    if op is Ops.REDUCE:
        axes = [ranges.index(r) for r in node.src[1:]]
        full = [int(np.ravel(values[r.src[0]])[0]) if n in axes else length
                for (n, r), length in zip(enumerate(ranges), src[0].shape, strict=True)]  # fmt: skip
        wide = np.broadcast_to(src[0], full)
        fold = _FOLD[node.arg.op]
        if node.dtype.is_bool:
            fold = np.logical_or if node.arg.op in (Ops.ADD, Ops.MAX) else np.logical_and
        if node.dtype.is_float and node.arg.op in (Ops.ADD, Ops.MUL):
            wide = wide.astype(np.float64)
        return fold.reduce(wide, axis=tuple(axes), keepdims=True, **_start(node, wide)).astype(kind)
    if op is Ops.CAST:
        return _cast(src[0], node.dtype)
    if op is Ops.BITCAST:
        return np.ascontiguousarray(src[0]).view(kind)
    if node.src[-1].dtype.is_bool and node.dtype.is_bool and op in _FOLD:
        return (np.logical_or if op in (Ops.ADD, Ops.MAX) else np.logical_and)(*src)
    if op in (Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD):
        safe = np.where(src[1] == 0, 1, src[1])
        return np.where(src[1] == 0, 0, ALU[op](src[0], safe)).astype(kind)
    if op is Ops.SHL or op is Ops.SHR:
        assert ((src[1] >= 0) & (src[1] < node.dtype.itemsize * 8)).all(), "a shift by the width or more"
    return ALU[op](*src).astype(kind)


def _start(node: UOp, wide: np.ndarray) -> dict[str, Any]:
    """An initial value for folds of nothing."""
    if node.dtype.is_bool or node.arg.op in (Ops.ADD, Ops.MUL):
        return {}
    info = np.iinfo(wide.dtype) if node.dtype.is_int else None
    low, high = (info.min, info.max) if info else (-np.inf, np.inf)
    return {"initial": low if node.arg.op is Ops.MAX else high}


def _cast(value: np.ndarray, dtype: DType) -> np.ndarray:
    kind = _NUMPY[dtype]
    if dtype.is_int and value.dtype.kind not in "iub":
        info = np.iinfo(kind)
        whole = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=2.0**70, neginf=-(2.0**70))
        inside = np.clip(whole, float(info.min), float(info.max) * (1 - 2**-52)).astype(kind)
        return np.where(whole >= info.max, info.max, np.where(whole <= info.min, info.min, inside))
    return value.astype(kind)


# ---- checking ----------------------------------------------------------------------------------------------


def data_for(ast: UOp, seed: int) -> dict[int, bytes]:
    """Contents of every buffer: multiples of 1/4 whose sums are exact, sometimes anything, sometimes with
    infinities, NaN and -0. Not for kernels with masks: there a factor that is masked off makes a product 0
    whatever the other is (whit/codegen/crop.py)."""
    rng = np.random.default_rng(seed)
    how = rng.random()
    if any(u.op is Ops.WHERE or (u.op is Ops.INDEX and len(u.src) > 2) for u in ast.toposort()):
        how *= 0.9
    found = {}
    for p in sorted({u for u in ast.toposort() if u.op is Ops.PARAM}, key=lambda u: u.arg.slot):
        kind, count = _NUMPY[p.dtype], p.arg.size
        if not p.dtype.is_float:
            low = 0 if p.dtype.is_bool or np.iinfo(kind).min == 0 else -3
            data = rng.integers(low, 2 if p.dtype.is_bool else 7, count)
        else:
            data = rng.integers(-8, 9, count) / 4 if how < 0.6 else rng.normal(size=count)
            if how > 0.9:
                special = rng.random(count) < 0.1
                data = np.where(special, rng.choice([np.inf, -np.inf, np.nan, -0.0, 0.0], count), data)
        found[p.arg.slot] = data.astype(kind).tobytes()
    return found


class Subject:
    """A kernel with contents of its buffers, what NumPy says it writes, and a Runner for every device."""

    def __init__(self, ast: UOp, seed: int) -> None:
        self.ast = ast
        self.params = {u.arg.slot: u for u in ast.toposort() if u.op is Ops.PARAM}
        r = random.Random(seed)
        self.variables = {v.arg.name: r.choice([v.arg.min, v.arg.max, r.randint(v.arg.min, v.arg.max)])
                          for v in variables_of(ast.toposort())}  # fmt: skip
        self.data = data_for(ast, seed)
        arrays = {n: np.frombuffer(d, _NUMPY[self.params[n].dtype]).copy() for n, d in self.data.items()}
        self.written = sorted({u.src[0].arg.slot for u in ast.toposort() if u.op is Ops.STORE})
        self.expected = evaluate(ast, arrays, self.variables)
        self.runners: dict[str, Runner] = {}

    def spread(self, slot: int) -> np.ndarray:
        """How far each element of an output moves when the inputs change in their last bits."""
        total = np.zeros(self.expected[slot].size)
        for seed in range(4):
            rng = np.random.default_rng(seed)
            arrays = {}
            for number, data in self.data.items():
                dtype = self.params[number].dtype
                values = np.frombuffer(data, _NUMPY[dtype])
                if dtype.is_float:
                    steps = rng.integers(-1, 2, values.size) * 2.0 ** -FLOAT_INFO[dtype].mantissa
                    with np.errstate(all="ignore"):
                        values = (values.astype(np.float64) * (1 + steps)).astype(values.dtype)
                arrays[number] = values.copy()
            moved = evaluate(self.ast, arrays, self.variables)[slot].astype(np.float64)
            with np.errstate(invalid="ignore"):
                total = np.fmax(total, np.abs(moved - self.expected[slot].astype(np.float64)))
        return np.nan_to_num(total, posinf=0.0)

    def run(self, device: str, opts: Sequence[Opt] | None) -> None:
        """AssertionError if the kernel with these opts computes something else than NumPy."""
        runner = self.runners.get(device)
        if runner is None:
            runner = self.runners[device] = Runner(self.ast, device, data=self.data, variables=self.variables)
        candidate = compile_candidate(self.ast, device, opts)
        found = runner.run(candidate)
        for slot in self.written:
            got = np.frombuffer(found[slot], _NUMPY[self.params[slot].dtype])
            dtype = self.params[slot].dtype
            try:
                compare(got, self.expected[slot], dtype, slot)
            except AssertionError:  # values that cancel move far when what is read changes in its last bits
                compare(got, self.expected[slot], dtype, slot, self.spread(slot))
        runner.check_guards(candidate)
        runner.check_inputs(candidate)


_RTOL = {8: 1e-9, 4: 1e-4, 2: 2e-2, 1: 0.3}


def compare(got: np.ndarray, wanted: np.ndarray, dtype: DType, slot: int, spread: Any = 0.0) -> None:
    """AssertionError naming the first element that differs by more than the order of sums explains."""
    if dtype.is_float:
        a, b = got.astype(np.float64), wanted.astype(np.float64)
        finite = b[np.isfinite(b)]
        limit = 16 * spread + _RTOL[dtype.itemsize] * max(0.03, float(np.abs(finite).max(initial=0)))
        with np.errstate(invalid="ignore"):
            bad = ~((np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b)))
    else:
        a, b, bad = got, wanted, got != wanted
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise AssertionError(
            f"buffer {slot}, element {at}: {a[at]} instead of {b[at]} ({bad.sum()} of {bad.size})"
        )


# ---- failures ----------------------------------------------------------------------------------------------


def failure(subject: Subject, device: str, opts: Sequence[Opt]) -> BaseException | None:
    """What goes wrong with these opts; None if nothing does, or if they are illegal."""
    try:
        subject.run(device, opts)
    except OptError:
        return None
    except Exception as error:
        return error
    return None


def shrunk(subject: Subject, device: str, opts: tuple[Opt, ...]) -> tuple[Opt, ...]:
    """The fewest and smallest opts that still fail."""
    smaller = True
    while smaller:
        smaller = False
        for at in range(len(opts)):
            less = [(*opts[:at], *opts[at + 1 :])]
            if opts[at].kind not in (OptKind.SWAP, OptKind.MERGE, OptKind.STAGE):
                less += [(*opts[:at], Opt(opts[at].kind, opts[at].axis, n), *opts[at + 1 :])
                         for n in (2, 4) if n < opts[at].amount]  # fmt: skip
            for candidate in less:
                if failure(subject, device, candidate) is not None:
                    opts, smaller = candidate, True
                    break
            if smaller:
                break
    return opts


def report(subject: Subject, device: str, opts: tuple[Opt, ...], where: str) -> str:
    """The shrunk failure as text, with the command that runs it."""
    opts = shrunk(subject, device, opts)
    text = ", ".join(map(repr, opts))
    return (
        f"{where}: {failure(subject, device, opts)!r}\n"
        f'python -m whit.repro --device {device} --opts "{text}" - <<END\n{show(subject.ast)}\nEND\n'
        f"variables: {subject.variables}"
    )


def _chosen(subject: Subject, target: Target, r: Numbers) -> tuple[Opt, ...]:
    """Random opts, or sometimes what the heuristics choose."""
    if r.random() < 0.15:
        return tuple(choose(prepare(subject.ast, target), target))
    return random_opts(prepare(subject.ast, target), target, r)


def check(seed: int, devices: Sequence[str], times: int = 1) -> None:
    """A kernel, and random opts for it on each device; AssertionError with a shrunk failure."""
    subject = Subject(kernel(seed), seed)
    for device in devices:
        target = Device.get(device).target
        for number in range(times):
            opts = _chosen(subject, target, random.Random(f"{seed} {device} {number}"))
            if failure(subject, device, opts) is not None:
                raise AssertionError(report(subject, device, opts, f"seed {seed}"))


def use_random_opts(seed: int) -> None:
    """From now on every kernel of this process is compiled with random opts, drawn from its graph and the
    seed. Nothing is read from or left in the disk cache."""
    from whit.codegen import pipeline
    from whit.helpers import CACHE

    def draw(ready: UOp, target: Target) -> tuple[Opt, ...]:
        return random_opts(ready, target, random.Random(f"{seed} {ready.key.hex()}"))

    CACHE.value = 0
    pipeline.choose = draw

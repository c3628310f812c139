"""Products of narrow types: DOT ops, where they are used, and whole matrix products, against NumPy in 64
bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.codegen.linear_eval import LinearProgram
from tests.codegen.numpy_evaluator import NUMPY, compute, dot, operand
from tests.codegen.test_linearize import fold, loop, param, read, write
from tests.renderer.test_ops import DEVICES, several
from tests.runtime.linear_kernels import Kernel
from tests.runtime.linear_kernels import run as run_linear
from whit import Device, Tensor
from whit.codegen import generate
from whit.codegen.decompose import decompose
from whit.codegen.lower import prepare
from whit.codegen.target import Target
from whit.renderer import llvm
from whit.renderer.llvm_values import x86_dots
from whit.uop import ALU, AxisType, DType, Op, Ops, ReduceArg, UOp, dtypes
from whit.uop.ops import DOTS

WORDS = [0, 1, -1, 0x7F7F7F7F, -0x7F7F7F80, 0x01FF807F, -0x00FF7F81, 0x7FFFFFFF, -0x80000000, 0x00FF00FF, 77]
PLAIN = frozenset(ALU) - DOTS.keys()
WHOLE = [op for op in DOTS if op is not Ops.DOT2B]  # those of whole numbers
BRAIN = dtypes.bfloat16
OWN = Device.get("CPU").target


def target(*dots: Op, lanes: int = 8) -> Target:
    return Target(
        "narrow", "llvm", vector_bytes=4 * lanes, threads=2, native=PLAIN | {Ops.CAST, Ops.BITCAST, *dots}
    )


def ops_of(linear: UOp) -> set[Op]:
    return {u.op for u in linear.toposort()}


# ---- the ops


def words(dtype: DType) -> list[np.ndarray]:
    points = np.array(list(itertools.product(WORDS, WORDS, WORDS[:5])), np.int64).T
    return [p.astype(NUMPY[dtype]) for p in points]


@pytest.mark.parametrize("op", WHOLE, ids=str)
def test_meaning(op: Op) -> None:
    """The table's row against views of memory as bytes and halves."""
    assert op.meaning is not None
    x, y, z = words(dtypes.int32)
    expected = dot(op, x, y, z)
    got = [op.meaning(int(a), int(b), int(c)) for a, b, c in zip(x, y, z, strict=True)]
    assert np.array(got, np.int64).astype(np.int32).tolist() == expected.tolist()
    assert op.meaning(0x80, 2, 5) == {Ops.DOT4: -251, Ops.DOT4U: 261, Ops.DOT2: 261}[op]


@pytest.mark.parametrize("dtype", dtypes.ints, ids=str)
@pytest.mark.parametrize("op", WHOLE, ids=str)
def test_decomposed(op: Op, dtype: DType) -> None:
    x, y, z = words(dtype)
    root = UOp(op, dtype, (operand(dtype), operand(dtype, 1), operand(dtype, 2)))
    for native in (PLAIN, PLAIN | DOTS.keys()):
        result = decompose(root, Target("t", "c", native=native))
        kept = dtype is dtypes.int32 and op in native
        assert kept == (op in {u.op for u in result.toposort()})
        np.testing.assert_array_equal(compute(result, x, y, z), dot(op, x, y, z))


# ---- where they are used


def product(
    m: int, n: int, k: int, a: DType, b: DType, turned: bool = False, out: DType = dtypes.int32
) -> UOp:
    """C[m, n] = sum_k A[m, k] * B[k, n], or of B[n, k]."""
    i, j, x = loop(m, 0), loop(n, 1), fold(k, 2)
    left = read(param(1, m * k, a), i * k + x).cast(out)
    right = read(param(2, k * n, b), j * k + x if turned else x * n + j).cast(out)
    total = UOp(Ops.REDUCE, out, (left * right, x), ReduceArg(Ops.ADD))
    return UOp.sink(write(param(0, m * n, out), i * n + j, total, i, j))


KINDS = [dtypes.int8, dtypes.uint8, dtypes.int16]


def data(shape: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    """Random values; rows of extremes among them."""
    info = np.iinfo(NUMPY[dtype])
    values = np.random.default_rng(seed).integers(info.min, info.max, shape, NUMPY[dtype], endpoint=True)
    values[..., :1, :] = info.min
    values[..., 1:2, :] = info.max
    return values


def exact(a: np.ndarray, b: np.ndarray, kind: Any = np.int32) -> np.ndarray:
    return (a.astype(np.int64) @ b.astype(np.int64)).astype(kind)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(KINDS, KINDS)), ids=str)
@pytest.mark.parametrize("native", [(Ops.DOT4,), (Ops.DOT4U,), (Ops.DOT2,), (Ops.DOT4, Ops.DOT4U, Ops.DOT2)])
def test_every_machine(native: tuple[Op, ...], a: DType, b: DType) -> None:
    """Programs for machines with these ops, run by an evaluator in NumPy."""
    m, n, k, turned = 11, 29, 54, (a is b) == (Ops.DOT2 in native)
    machine = target(*native)
    linear = generate(product(m, n, k, a, b, turned), machine).linear
    signs = {a, b}
    has_op = Ops.DOT2 in native or (dtypes.int16 not in signs and signs != {dtypes.uint8})
    assert (not ops_of(linear).isdisjoint(DOTS)) == has_op
    assert ops_of(linear) & DOTS.keys() <= set(native)
    x, y = data((m, k), a, 1), data((k, n), b, 2)
    out = np.zeros(m * n, np.int32)
    LinearProgram(linear)([out, x.reshape(-1), np.ascontiguousarray(y.T if turned else y).reshape(-1)])
    np.testing.assert_array_equal(out.reshape(m, n), exact(x, y))


def test_left_alone() -> None:
    """Kernels that DOT ops are no use for, or would compute something else in."""
    machine = target(*DOTS)
    i8 = dtypes.int8
    for kernel in (
        product(3, 64, 256, i8, i8),  # three rows: nothing to pack for
        product(8, 8, 8, i8, i8),  # little work
        product(32, 32, 3, i8, i8),  # a sum of three
        product(32, 32, 64, i8, i8, out=dtypes.int64),  # does not wrap at 32 bits
        product(32, 32, 64, dtypes.int32, i8),
        product(32, 32, 64, dtypes.uint16, i8),
        product(32, 32, 64, i8, i8, out=dtypes.float32),
    ):
        assert prepare(kernel, machine) is prepare(kernel)
    used = prepare(product(32, 32, 64, i8, i8), machine)
    assert Ops.DOT4 in ops_of(used) and prepare(used, machine) is used
    assert prepare(product(32, 32, 64, i8, i8), target()) is prepare(product(32, 32, 64, i8, i8))
    assert prepare(product(32, 32, 64, i8, i8), machine._replace(vector_bytes=0)).op is Ops.SINK


# ---- on this machine


SHAPES = [(64, 64, 64), (37, 61, 53), (16, 130, 5), (130, 16, 1030), (5, 64, 200)]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_int_matmul(m: int, n: int, k: int) -> None:
    for a, b in [(np.int8, np.int8), (np.uint8, np.int8), (np.int8, np.uint8), (np.uint8, np.uint8)]:
        x, y = (
            data(s, dtypes.int8 if t is np.int8 else dtypes.uint8, n) for s, t in (((m, k), a), ((k, n), b))
        )
        got = Tensor(x).cast("int32").matmul(Tensor(y).cast("int32"))
        np.testing.assert_array_equal(got.numpy(), exact(x, y), err_msg=f"{a} {b}")
    x, y = data((m, k), dtypes.int16, 1), data((k, n), dtypes.int16, 2)
    np.testing.assert_array_equal(Tensor(x).matmul(Tensor(y), dtype="int32").numpy(), exact(x, y))


def test_kept_types_and_orders() -> None:
    """Sums that wrap in 8 bits, transposed and batched operands, an epilogue, and int8 made on the way."""
    x, y = data((3, 40, 72), dtypes.int8, 1), data((3, 72, 50), dtypes.int8, 2)
    p, q = Tensor(x), Tensor(y)
    np.testing.assert_array_equal((p @ q).numpy(), exact(x, y, np.int8))
    wide = exact(x, y)
    np.testing.assert_array_equal(p.matmul(q, dtype="int32").numpy(), wide)
    turned = [Tensor(np.ascontiguousarray(v.swapaxes(1, 2))).transpose(1, 2) for v in (x, y)]
    for left, right in [(p, turned[1]), (turned[0], q), (turned[0], turned[1])]:
        np.testing.assert_array_equal(left.matmul(right, dtype="int32").numpy(), wide)
    relu = (p.matmul(q, dtype="int32").maximum(0) + 3).cast("float32") * 0.5
    np.testing.assert_array_equal(relu.numpy(), ((np.maximum(wide, 0) + 3) * 0.5).astype(np.float32))
    made = (Tensor(x[0].astype(np.float32) * 2) * 0.5).cast("int8")
    np.testing.assert_array_equal(made.matmul(q[0], dtype="int32").numpy(), wide[0])


def test_int8_convolution() -> None:
    x, w = data((2, 8, 14, 14), dtypes.int8, 1), data((12, 8, 3, 3), dtypes.int8, 2)
    got = Tensor(x).cast("int32").conv2d(Tensor(w).cast("int32"), padding=1).numpy()
    padded = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    expected = np.einsum("bchwij,ocij->bohw", windows, w.astype(np.int64))
    np.testing.assert_array_equal(got, expected)


ROUNDED: list[tuple[str, Any, float]] = [
    ("bfloat16", ml_dtypes.bfloat16, 2**-8),
    ("float16", np.float16, 2**-11),
]


@pytest.mark.parametrize(("name", "kind", "half_step"), ROUNDED)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 96, 80), (37, 61, 1030), (4, 70, 300)])
def test_half_matmul(name: str, kind: Any, half_step: float, m: int, n: int, k: int) -> None:
    """Added up in float32 and rounded once: half a step off, and float32's own error."""
    rng = np.random.default_rng(k)
    x, y = rng.standard_normal((m, k)).astype(kind), rng.standard_normal((k, n)).astype(kind)
    got = (Tensor(x) @ Tensor(y)).float().numpy()
    exactly = x.astype(np.float64) @ y.astype(np.float64)
    room = np.abs(x.astype(np.float64)) @ np.abs(y.astype(np.float64)) * 2**-22
    assert (np.abs(got - exactly) <= np.abs(exactly) * half_step * 1.01 + room).all()


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("op", WHOLE, ids=str)
def test_llvm(op: Op, lanes: int) -> None:
    """Each op as this machine's compiler makes it, with and without an instruction of its own."""
    x, y, z = (np.resize(v, 640) for v in words(dtypes.int32))
    got = several("CPU", [op], dtypes.int32, dtypes.int32, (x, y, z), lanes)[0]
    np.testing.assert_array_equal(got, dot(op, x, y, z))


# ---- on machines elsewhere


def assembly(linear: UOp, triple: str, cpu: str, dots: Any = None) -> str:
    import llvmlite.binding as binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = binding.parse_assembly(llvm.render(linear, "f", dots=dots))
    module.triple = triple
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=2)
    return str(machine.emit_assembly(module))


ELSEWHERE: list[tuple[str, str, tuple[Op, ...], int, Callable[[], Any], str]] = [
    ("aarch64-unknown-linux-gnu", "neoverse-n1", (Ops.DOT4,), 4, lambda: llvm.ARM_DOTS, "sdot"),
    ("aarch64-unknown-linux-gnu", "neoverse-v1", (Ops.DOT4, Ops.DOT4U), 4, lambda: llvm.ARM_DOTS, "sdot"),
    ("x86_64-unknown-linux-gnu", "haswell", (Ops.DOT2,), 8, lambda: x86_dots(32), "vpmaddwd"),
    ("x86_64-unknown-linux-gnu", "skylake-avx512", (Ops.DOT2,), 16, lambda: x86_dots(64), "vpmaddwd"),
    ("x86_64-unknown-linux-gnu", "alderlake", (Ops.DOT4U,), 8, lambda: x86_dots(32), "vpdpbusd"),
    ("x86_64-unknown-linux-gnu", "icelake-server", (Ops.DOT4U,), 16, lambda: x86_dots(64), "vpdpbusd"),
]


@pytest.mark.parametrize(("triple", "cpu", "native", "lanes", "dots", "instruction"), ELSEWHERE)
def test_compiles_elsewhere(
    triple: str, cpu: str, native: tuple[Op, ...], lanes: int, dots: Callable[[], Any], instruction: str
) -> None:
    for a in (dtypes.int8, dtypes.uint8):
        linear = generate(product(64, 64, 64, a, dtypes.int8), target(*native, lanes=lanes)).linear
        wanted = "usdot" if a is dtypes.uint8 and cpu == "neoverse-v1" else instruction
        assert assembly(linear, triple, cpu, dots()).count(wanted) >= 4, f"{cpu} {a}"


@pytest.mark.skipif(OWN.native.isdisjoint(DOTS), reason="this machine has no such instruction")
def test_used_here() -> None:
    generated = generate(product(128, 128, 128, dtypes.int8, dtypes.int8), OWN)
    tile = [o for o in generated.opts if o.kind.name in ("UPCAST", "STAGE")]
    assert len(tile) >= 3 and not ops_of(generated.linear).isdisjoint(DOTS)
    assert all(u.arg.axis is not AxisType.UNROLL for u in generated.linear.toposort() if u.op is Ops.RANGE)


# ---- pairs of bfloat16


def brains(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values of many sizes, no subnormal ones."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)).astype(ml_dtypes.bfloat16)


def words_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.float32)


def test_meaning_of_pairs() -> None:
    x, y = brains((50, 2), 1), brains((50, 2), 2)
    z = np.random.default_rng(3).standard_normal(50).astype(np.float32)
    meaning = Ops.DOT2B.meaning
    assert meaning is not None
    got = [
        meaning(*[float(v) for v in row]) for row in zip(words_of(x)[:, 0], words_of(y)[:, 0], z, strict=True)
    ]
    np.testing.assert_allclose(got, z + (x.astype(np.float64) * y.astype(np.float64)).sum(1), rtol=1e-12)


def test_pairs_decomposed() -> None:
    f32 = dtypes.float32
    x, y = words_of(brains((40, 2), 4))[:, 0], words_of(brains((40, 2), 5))[:, 0]
    z = np.zeros(40, np.float32)
    root = UOp(Ops.DOT2B, f32, (operand(f32), operand(f32, 1), operand(f32, 2)))
    assert decompose(root, Target("t", "c", native=PLAIN | {Ops.DOT2B})) is root
    result = decompose(root, Target("t", "c", native=PLAIN))
    assert Ops.DOT2B not in {u.op for u in result.toposort()}
    np.testing.assert_allclose(compute(result, x, y, z), dot(Ops.DOT2B, x, y, z), rtol=1e-6)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(11, 29, 54), (32, 64, 63), (16, 16, 128)])
def test_products_of_pairs(m: int, n: int, k: int, turned: bool) -> None:
    """The program for a machine with the instruction, run by an evaluator in NumPy."""
    linear = generate(product(m, n, k, BRAIN, BRAIN, turned, dtypes.float32), target(Ops.DOT2B)).linear
    assert Ops.DOT2B in ops_of(linear)
    x, y = brains((m, k), 6), brains((k, n), 7)
    out = np.zeros(m * n, np.float32)
    LinearProgram(linear)([out, x.reshape(-1), np.ascontiguousarray(y.T if turned else y).reshape(-1)])
    a, b = x.astype(np.float64), y.astype(np.float64)
    room = np.abs(a) @ np.abs(b) * k * 2**-24
    assert (np.abs(out.reshape(m, n) - a @ b) <= room).all()


def test_pairs_are_only_bfloat16() -> None:
    machine = target(*DOTS)
    for a, b in ((dtypes.float16, dtypes.float16), (BRAIN, dtypes.float16), (BRAIN, dtypes.float32)):
        kernel = product(32, 32, 64, a, b, out=dtypes.float32)
        assert prepare(kernel, machine) is prepare(kernel)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_pairs_compile_elsewhere(lanes: int) -> None:
    kernel = product(64, 64, 64, BRAIN, BRAIN, out=dtypes.float32)
    linear = generate(kernel, target(Ops.DOT2B, lanes=lanes)).linear
    text = assembly(linear, "x86_64-unknown-linux-gnu", "cooperlake", x86_dots(4 * lanes))
    assert text.count("vdpbf16ps") >= 4
    plain = assembly(linear, "x86_64-unknown-linux-gnu", "haswell", {})
    assert "vdpbf16ps" not in plain and "mulps" in plain


@pytest.mark.skipif(Ops.DOT2B not in OWN.native, reason="this machine has no such instruction")
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_pairs_here(lanes: int) -> None:
    f32 = dtypes.float32
    x, y = [np.resize(words_of(brains((320, 2), seed))[:, 0], 640) for seed in (8, 9)]
    z = np.random.default_rng(10).standard_normal(640).astype(np.float32)
    got = several("CPU", [Ops.DOT2B], f32, f32, (x, y, z), lanes)[0]
    np.testing.assert_allclose(got, dot(Ops.DOT2B, x, y, z), rtol=1e-5, atol=1e-3)


# ---- words loaded whole


@pytest.mark.parametrize("turned", [False, True])
def test_neighbours_are_loaded_as_words(turned: bool) -> None:
    """Rows, and turned columns, are packed by loading words; padding inside of a word is masked."""
    machine = target(Ops.DOT4)
    for k, whole in [(64, True), (66, False)]:
        linear = generate(product(32, 64, k, dtypes.int8, dtypes.int8, turned), machine).linear
        regrouped = [u for u in linear.src if u.op is Ops.BITCAST and u.src[0].dtype.count != u.dtype.count]
        assert bool(regrouped) == whole
        if whole and turned:
            assert not any(u.op is Ops.OR and u.dtype.scalar is dtypes.int32 for u in linear.src)


@pytest.mark.parametrize("device", [*DEVICES, "PYTHON"])
@pytest.mark.parametrize(("before", "lanes", "after"), [
    (dtypes.int8, 4, dtypes.int32), (dtypes.uint8, 16, dtypes.int32), (dtypes.int16, 8, dtypes.uint32),
    (dtypes.uint32, 2, dtypes.int8), (dtypes.int16, 4, dtypes.uint64), (dtypes.int64, 1, dtypes.int16),
    (dtypes.bfloat16, 16, dtypes.int32), (dtypes.float32, 4, dtypes.uint16),
    (dtypes.uint8, 8, dtypes.float64),
])  # fmt: skip
def test_lanes_regrouped(device: str, before: DType, lanes: int, after: DType) -> None:
    """BITCAST of a vector to lanes of another width, on every device."""
    kernel, size = Kernel(), 64
    out_size = size * before.itemsize // after.itemsize
    out, source = kernel.param(0, after), kernel.param(1, before)
    count = lanes * before.itemsize // after.itemsize
    loop_ = kernel.range(size // lanes)
    loaded = kernel.load(source, kernel.alu(Ops.MUL, loop_, kernel.const(lanes)), lanes)
    regrouped = kernel.add(Ops.BITCAST, after.vec(count), loaded)
    kernel.store(out, kernel.alu(Ops.MUL, loop_, kernel.const(count)), regrouped)
    kernel.end(loop_)
    octets: np.ndarray = np.random.default_rng(3).integers(0, 256, size * before.itemsize, np.uint8)
    data_in: np.ndarray = octets.view(NUMPY[before])
    if before.is_float:  # which NaN it is is nothing that every device keeps
        data_in[np.isnan(data_in)] = 0
    got = run_linear(device, kernel.linear(), np.zeros(out_size, NUMPY[after]), data_in)
    np.testing.assert_array_equal(got, data_in.view(NUMPY[after]))


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.int16])
def test_words_made_by_hand(kind: Any) -> None:
    """Only parts without a sign make a word of memory; in any order, and from the right places."""
    parts = 4 // np.dtype(kind).itemsize
    values = data((1, 64, parts), dtypes.int8, 5)[0].astype(np.int64).astype(kind)
    for order in (range(parts), range(parts)[::-1]):
        x = Tensor(values)
        got, expected = x[:, 0].cast("int32") * 0, np.zeros(64, np.int32)
        for at, source in enumerate(order):
            shift = 32 // parts * at
            got = got | (x[:, source].cast("int32") << shift)
            expected |= values[:, source].astype(np.int32) << shift
        np.testing.assert_array_equal(got.numpy(), expected)

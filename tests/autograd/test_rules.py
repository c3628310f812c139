"""Every rule against torch.autograd, to second order, and against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.autograd.graph_in_torch import run
from whit.autograd import RULES, gradient
from whit.uop import Op, Ops, UOp, dtypes
from whit.uop.ops import all_ops

Graph = Callable[..., UOp]
TENSOR_LEVEL = ("unary", "binary", "compare", "ternary", "cast", "movement", "reduce", "take")
TENSOR_MEMORY = (Ops.CONTIGUOUS, Ops.COPY, Ops.AFTER, Ops.DETACH, Ops.STORE)


def leaf(*shape: int, dtype: object = dtypes.float64) -> UOp:
    """An input with memory of its own (CONTIGUOUS: a reshape of a reshape would be built on the buffer)."""
    return UOp.new_buffer(math.prod(shape), dtype, "CPU").reshape(shape).contiguous()  # type: ignore[arg-type]


def number(value: float) -> UOp:
    return UOp.const(value, dtypes.float64)


def test_every_differentiable_op_has_a_rule_and_no_other() -> None:
    at_tensor_level = [op for op in all_ops() if op.category in TENSOR_LEVEL or op in TENSOR_MEMORY]
    assert set(RULES) == {op for op in at_tensor_level if op.differentiable}


def test_a_rule_has_one_function_per_source() -> None:
    for op, rule in RULES.items():
        sources = {Ops.REDUCE: 1, Ops.AFTER: 3}.get(op, op.arity)
        assert len(rule) == sources, op


# name, graph of the leaves, shapes of the leaves, bounds of random values
CASES: list[tuple[str, Graph, list[tuple[int, ...]], tuple[float, float]]] = [
    ("neg", lambda x: -x, [(3, 2)], (-2, 2)),
    ("reciprocal", lambda x: x.alu(Ops.RECIPROCAL), [(5,)], (0.3, 2)),
    ("sqrt", lambda x: x.alu(Ops.SQRT), [(5,)], (0.3, 2)),
    ("exp2", lambda x: x.alu(Ops.EXP2), [(5,)], (-2, 2)),
    ("log2", lambda x: x.alu(Ops.LOG2), [(5,)], (0.3, 2)),
    ("sin", lambda x: x.alu(Ops.SIN), [(7,)], (-9, 9)),
    ("erf", lambda x: x.alu(Ops.ERF), [(7,)], (-2, 2)),
    ("trunc", lambda x: x.alu(Ops.TRUNC) + x, [(7,)], (-3, 3)),
    ("floor", lambda x: x.alu(Ops.FLOOR) + x, [(7,)], (-3, 3)),
    ("add", lambda x, y: x + y, [(2, 3), (3,)], (-2, 2)),
    ("sub", lambda x, y: x - y, [(3,), (2, 1)], (-2, 2)),
    ("mul", lambda x, y: x * y, [(2, 3), (2, 1)], (-2, 2)),
    ("mul by a constant", lambda x: x * 3.0, [(2, 3)], (-2, 2)),
    ("square", lambda x: x * x, [(2, 3)], (-2, 2)),
    ("fdiv", lambda x, y: x / y, [(4, 1, 3), (2, 1)], (0.3, 2)),
    ("max", lambda x, y: x.maximum(y), [(4, 3), (3,)], (-2, 2)),
    ("min", lambda x, y: x.minimum(y), [(1,), (2, 5)], (-2, 2)),
    ("pow", lambda x, y: x.alu(Ops.POW, y), [(2, 3), (3,)], (0.3, 2)),
    ("where", lambda x, y: x.lt(0.0).where(x * y, y), [(4, 3), (3,)], (-2, 2)),
    ("mulacc", lambda x, y, z: x.alu(Ops.MULACC, y, z), [(4, 3), (3,), ()], (-2, 2)),
    ("cast", lambda x: x.cast(dtypes.float32).cast(dtypes.float64), [(4,)], (-2, 2)),
    ("reshape", lambda x: x.reshape((3, 4)), [(2, 6)], (-2, 2)),
    ("permute", lambda x: x.permute((2, 0, 1)), [(2, 3, 4)], (-2, 2)),
    ("expand", lambda x: x.expand((2, 5, 3)), [(2, 1, 3)], (-2, 2)),
    ("pad", lambda x: x.pad(((1, 2), (0, 3))), [(2, 3)], (-2, 2)),
    ("shrink", lambda x: x.shrink(((1, 3), (0, 2))), [(4, 2)], (-2, 2)),
    ("flip", lambda x: x.flip((0, 2)), [(2, 3, 2)], (-2, 2)),
    ("sum", lambda x: x.reduce(Ops.ADD, (0, 2)), [(2, 3, 4)], (-2, 2)),
    ("max reduce", lambda x: x.reduce(Ops.MAX, (1,)), [(3, 5)], (-2, 2)),
    ("min reduce", lambda x: x.reduce(Ops.MIN, (0, 1)), [(3, 5)], (-2, 2)),
    ("prod", lambda x: x.reduce(Ops.MUL, (1,)), [(3, 5)], (-2, 2)),
    ("prod of two axes", lambda x: x.reduce(Ops.MUL, (0, 2)), [(3, 2, 2)], (-2, 2)),
    ("prod of one", lambda x: x.reduce(Ops.MUL, (0,)), [(1, 4)], (-2, 2)),
    ("contiguous", lambda x: x.contiguous() * x, [(3,)], (-2, 2)),
    ("copy", lambda x: x.copy_to("PYTHON"), [(3,)], (-2, 2)),
    ("detach", lambda x: x.detach() * x, [(3,)], (-2, 2)),
    (
        "softmax",
        lambda x: (x * 1.5).alu(Ops.EXP2) / (x * 1.5).alu(Ops.EXP2).reduce(Ops.ADD, (1,)).reshape((3, 1)),
        [(3, 4)],
        (-2, 2),
    ),
    (
        "matmul",
        lambda x, y: (x.reshape((2, 1, 3)) * y.permute((1, 0)).reshape((1, 4, 3))).reduce(Ops.ADD, (2,)),
        [(2, 3), (3, 4)],
        (-2, 2),
    ),
]


def random_values(
    shapes: list[tuple[int, ...]], bounds: tuple[float, float], seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low, high = bounds
    return [
        torch.rand(shape, dtype=torch.float64, generator=generator) * (high - low) + low for shape in shapes
    ]


def check(build: Graph, shapes: list[tuple[int, ...]], bounds: tuple[float, float], seed: int = 0) -> None:
    """First and second derivatives of a random weighting of the outputs."""
    inputs, weights = [leaf(*shape) for shape in shapes], None
    values = [v.requires_grad_() for v in random_values(shapes, bounds, seed)]
    out = build(*inputs)
    weights = random_values([tuple(out.shape)], (-1, 1), seed + 1)[0]
    upstream = leaf(*out.shape)
    leaves = dict(zip(inputs, values, strict=True)) | {upstream: weights}

    got = gradient([out], inputs, [upstream])
    want = torch.autograd.grad((run(out, leaves) * weights).sum(), values, create_graph=True)
    for g, w, node in zip(got, want, inputs, strict=True):
        assert g is not None and g.shape == node.shape and g.dtype is node.dtype
        torch.testing.assert_close(run(g, leaves), w)
    total = got[0] * got[0]
    for g in got[1:]:
        assert g is not None
        total = total.reduce(Ops.ADD, tuple(range(total.ndim))) + (g * g).reduce(
            Ops.ADD, tuple(range(g.ndim))
        )
    check_second(total, inputs, values, leaves, want)


def check_second(
    total: UOp,
    inputs: list[UOp],
    values: list[torch.Tensor],
    leaves: dict[UOp, torch.Tensor],
    first: tuple[torch.Tensor, ...],
) -> None:
    ones = UOp.const(1.0, dtypes.float64).reshape((1,) * total.ndim).expand(total.shape)
    got = gradient([total], inputs, [ones])
    scalar = sum((w * w).sum() for w in first)
    if not scalar.requires_grad:
        assert all(g is None or not run(g, leaves).any() for g in got)
        return
    want = torch.autograd.grad(scalar, values, allow_unused=True)
    for g, w in zip(got, want, strict=True):
        value = torch.zeros((), dtype=torch.float64) if g is None else run(g, leaves)
        torch.testing.assert_close(
            value.expand_as(w) if w is not None else value, w if w is not None else torch.zeros_like(value)
        )


@pytest.mark.parametrize("name,build,shapes,bounds", CASES, ids=[case[0] for case in CASES])
def test_rule_against_torch(
    name: str, build: Graph, shapes: list[tuple[int, ...]], bounds: tuple[float, float]
) -> None:
    check(build, shapes, bounds)


@pytest.mark.parametrize("name,build,shapes,bounds", CASES, ids=[case[0] for case in CASES])
def test_rule_against_finite_differences(
    name: str, build: Graph, shapes: list[tuple[int, ...]], bounds: tuple[float, float]
) -> None:
    if name in ("cast", "detach"):
        pytest.skip("differences of rounded values, and of a value held fixed, are not its gradient")
    inputs = [leaf(*shape) for shape in shapes]
    values = random_values(shapes, bounds, seed=5)
    out = build(*inputs)
    upstream = leaf(*out.shape)
    leaves = dict(zip(inputs, values, strict=True))
    weights = random_values([tuple(out.shape)], (-1, 1), seed=6)[0]
    got = gradient([out], inputs, [upstream])
    step = 1e-6
    for g, node, value in zip(got, inputs, values, strict=True):
        assert g is not None
        computed = run(g, leaves | {upstream: weights}).reshape(-1)
        flat = value.reshape(-1)
        for i in range(flat.numel()):
            kick = torch.zeros_like(flat)
            kick[i] = step
            up = run(out, leaves | {node: (flat + kick).reshape(value.shape)})
            down = run(out, leaves | {node: (flat - kick).reshape(value.shape)})
            assert computed[i].item() == pytest.approx(
                ((up - down) * weights).sum().item() / (2 * step), abs=1e-6
            )


def test_a_planted_swapped_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: with the two rules of an op exchanged they do."""
    for op, name in (
        (Ops.SUB, "sub"),
        (Ops.MUL, "mul"),
        (Ops.FDIV, "fdiv"),
        (Ops.MAX, "max"),
        (Ops.POW, "pow"),
    ):
        swapped: dict[Op, tuple[object, ...]] = {op: RULES[op][::-1]}
        build, shapes, bounds = next(case[1:] for case in CASES if case[0] == name)
        with monkeypatch.context() as patch:
            patch.setitem(RULES, op, swapped[op])
            with pytest.raises(AssertionError):
                check(build, shapes, bounds)


# ---- edges: ties, zeros, NaN, types ------------------------------------------------------------------------


def first_order(build: Graph, *values: torch.Tensor) -> None:
    inputs = [leaf(*v.shape) for v in values]
    given = [v.detach().clone().requires_grad_() for v in values]
    out = build(*inputs)
    leaves = dict(zip(inputs, given, strict=True))
    ones = UOp.const(1.0, out.dtype).reshape((1,) * out.ndim).expand(out.shape)
    want = torch.autograd.grad(run(out, leaves).sum(), given)
    for g, w in zip(gradient([out], inputs, [ones]), want, strict=True):
        assert g is not None
        torch.testing.assert_close(run(g, leaves), w, equal_nan=True)


def test_ties_share_the_gradient() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    first_order(lambda a: a.reduce(Ops.MAX, (1,)), x)
    first_order(lambda a: a.reduce(Ops.MIN, (0, 1)), x)
    first_order(lambda a, b: a.maximum(b), x, x.clone().flip(0))
    first_order(lambda a, b: a.minimum(b), x, x.clone().flip(0))


def test_ties_with_a_constant_are_those_of_relu_and_hardtanh() -> None:
    x, node = torch.tensor([-1.0, 0.0, 2.0, 6.0, 7.0, math.nan], dtype=torch.float64), leaf(6)
    out = node.maximum(0.0).minimum(6.0)
    (g,) = gradient([out], [node], [number(1.0).reshape((1,)).expand((6,))])
    given = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(torch.nn.functional.relu6(given).sum(), [given])
    assert g is not None
    assert run(g, {node: x}).tolist()[:5] == want.tolist()[:5] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_nan_in_maximum() -> None:
    x = torch.tensor([math.nan, 1.0, 2.0], dtype=torch.float64)
    y = torch.tensor([0.0, math.nan, 1.0], dtype=torch.float64)
    first_order(lambda a, b: a.maximum(b), x, y)
    first_order(lambda a, b: a.minimum(b), x, y)


def test_product_with_zeros_to_second_order() -> None:
    for row in ([2.0, 0.0, 3.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0], [2.0, 5.0, 3.0, 0.0, 7.0]):
        x, node, ones = torch.tensor(row, dtype=torch.float64), leaf(len(row)), number(1.0).reshape((1,))
        first_order(lambda a: a.reduce(Ops.MUL, (0,)), x)
        (first,) = gradient([node.reduce(Ops.MUL, (0,))], [node], [number(1.0)])
        assert first is not None
        (second,) = gradient([first], [node], [ones.expand((len(row),))])
        assert second is not None
        others = [
            [
                0.0 if i == j else math.prod(v for k, v in enumerate(row) if k not in (i, j))
                for j in range(len(row))
            ]
            for i in range(len(row))
        ]
        torch.testing.assert_close(run(second, {node: x}), torch.tensor(others, dtype=torch.float64).sum(0))


def test_power_at_its_edges() -> None:
    x = torch.tensor([0.0, 0.0, 2.0, -2.0, -2.0, 0.0], dtype=torch.float64)
    y = torch.tensor([0.0, 2.0, 0.0, 2.0, 3.0, 1.0], dtype=torch.float64)
    first_order(lambda a: a.alu(Ops.POW, UOp.const(2.0, dtypes.float64)), x)
    first_order(lambda a, b: a.alu(Ops.POW, b), x, y)


def test_take_adds_up_repeated_positions() -> None:
    index = leaf(2, 3, dtype=dtypes.int32)
    where = torch.tensor([[0, 3, 3], [1, 3, 0]], dtype=torch.int32)
    for axis in range(3):
        x = leaf(4, 5, 6)
        value = random_values([(4, 5, 6)], (-1, 1))[0].requires_grad_()
        out = UOp(Ops.TAKE, x.dtype, (x, index), axis)
        upstream = leaf(*out.shape)
        weights = random_values([tuple(out.shape)], (-1, 1), 3)[0]
        (g,) = gradient([out], [x], [upstream])
        assert g is not None
        picked = torch.index_select(value, axis, where.reshape(-1)).reshape(out.shape)
        (want,) = torch.autograd.grad((picked * weights).sum(), [value])
        torch.testing.assert_close(run(g, {upstream: weights, index: where}), want)


def test_take_is_one_reduce() -> None:
    x, index = leaf(7, 3), leaf(5, dtype=dtypes.int32)
    out = UOp(Ops.TAKE, x.dtype, (x, index), 0)
    (g,) = gradient([out], [x], [leaf(5, 3)])
    assert g is not None
    assert [node.op for node in g.toposort()].count(Ops.REDUCE) == 1 and g.src[0].op is Ops.WHERE


def test_writes() -> None:
    def views(x: UOp) -> list[UOp]:
        return [
            x.shrink(((1, 3), (0, 2))),
            x.reshape((12,)).shrink(((2, 5),)),
            x.flip((0,)),
            x.permute((1, 0)).shrink(((0, 1), (1, 4))),
            x,
        ]

    for i in range(5):
        old, value_shape = leaf(4, 3), tuple(views(leaf(4, 3))[i].shape)
        new = leaf(*value_shape)
        view = views(old)[i]
        out = old.after(UOp(Ops.STORE, dtypes.void, (view, new))) * old
        values = random_values([(4, 3), value_shape], (-1, 1), i)
        leaves = {old: values[0].requires_grad_(), new: values[1].requires_grad_()}
        ones = UOp.const(1.0, dtypes.float64).reshape((1, 1)).expand((4, 3))
        want = torch.autograd.grad(run(out, leaves).sum(), values)
        for g, w in zip(gradient([out], [old, new], [ones]), want, strict=True):
            assert g is not None
            torch.testing.assert_close(run(g, leaves), w)


def test_narrow_floats_are_summed_in_float32() -> None:
    for dtype, torch_type in ((dtypes.float16, torch.float16), (dtypes.bfloat16, torch.bfloat16)):
        x, bias = leaf(3000, 2, dtype=dtype), leaf(2, dtype=dtype)
        (g,) = gradient([x + bias], [bias], [x])
        assert g is not None and g.dtype is dtype
        value = torch.full((3000, 2), 0.1, dtype=torch_type)
        torch.testing.assert_close(run(g, {x: value}), value.float().sum(0).to(torch_type))


def test_unreached_and_stepwise_inputs() -> None:
    x, y = leaf(3), leaf(3)
    upstream = leaf(3)
    assert gradient([x * 2.0], [y], [upstream]) == [None]
    assert gradient([x.detach()], [x], [upstream]) == [None]
    assert gradient([x.cast(dtypes.int32).cast(dtypes.float64)], [x], [upstream]) == [None]
    (steps,) = gradient([x.alu(Ops.FLOOR)], [x], [upstream])
    assert steps is not None and run(steps, {}).tolist() == [0.0, 0.0, 0.0]
    assert gradient([x], [x], [upstream]) == [upstream]


def test_inner_nodes_are_inputs_too() -> None:
    x = leaf(3)
    middle = x * x
    out = middle * 5.0
    inner, outer = gradient([out], [middle, x], [number(1.0).reshape((1,)).expand((3,))])
    value = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert inner is not None and outer is not None
    assert run(inner, {x: value}).tolist() == [5.0, 5.0, 5.0] and run(outer, {x: value}).tolist() == [
        10.0,
        20.0,
        30.0,
    ]


def test_many_outputs_add_up_in_a_fixed_order() -> None:
    x = leaf(3)
    ones = number(1.0).reshape((1,)).expand((3,))
    outputs = [x * float(i) for i in range(2, 6)]
    first = gradient(outputs, [x], [ones] * 4)
    assert first == gradient(outputs, [x], [ones] * 4)
    assert first[0] is not None and run(first[0], {}).tolist() == [14.0, 14.0, 14.0]


def test_a_very_deep_graph() -> None:
    x = leaf(2)
    out = x
    for _ in range(50_000):
        out = out + x
    (g,) = gradient([out], [x], [number(1.0).reshape((1,)).expand((2,))])
    assert g is not None and run(g, {}).tolist() == [50_001.0, 50_001.0]


# ---- random graphs -----------------------------------------------------------------------------------------

STEPS: list[Graph] = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - y.alu(Ops.SIN),
    lambda x, y: x.maximum(y * 0.5),
    lambda x, y: x.lt(y).where(x, y * x),
    lambda x, y: x / (y * y + 1.0),
    lambda x, y: x.alu(Ops.ERF),
    lambda x, y: x.reduce(Ops.ADD, (x.ndim - 1,)).reshape((*x.shape[:-1], 1)) * y if x.ndim else x,
    lambda x, y: x.reduce(Ops.MAX, (0,)) + y if x.ndim else x,
    lambda x, y: x.permute(tuple(reversed(range(x.ndim)))),
    lambda x, y: x.flip(tuple(range(x.ndim))),
    lambda x, y: x.pad(((1, 1),) * x.ndim).shrink(tuple((0, size) for size in x.shape)),
    lambda x, y: (x * 0.3).alu(Ops.EXP2),
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=3),
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_random_graphs(shape: list[int], steps: list[int], seed: int) -> None:
    """Graphs that mix the ops, over shapes with ones and primes."""
    square = (shape[0],) * len(shape)  # so that a transposed value still broadcasts

    def build(x: UOp, y: UOp) -> UOp:
        made = [x, y]
        for step in steps:
            made.append(STEPS[step](made[-1], made[-2]))
        return made[-1] + made[0]

    check(build, [square, (shape[0],)], (-1.5, 1.5), seed)


def test_pairwise_order_of_the_table_is_the_op_tables() -> None:
    """The rules stand in the order of the op table, so that a missing one is easy to see."""
    position = {op: i for i, op in enumerate(all_ops())}
    late = {Ops.MULACC, Ops.COPY}  # next to their kin
    rows = [op for op in RULES if op not in late]
    assert all(position[a] < position[b] for a, b in pairwise(rows))

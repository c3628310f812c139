"""Every forward rule and every batching rule, on graphs, against PyTorch running the same graphs."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.autograd.graph_in_torch import run
from tests.autograd.test_rules import CASES, TENSOR_LEVEL, TENSOR_MEMORY, Graph, leaf, random_values
from whit.autograd import FORWARD, RULES, gradient, tangents
from whit.helpers import ArgumentError
from whit.transforms import batching
from whit.transforms.batching import Batch, batch
from whit.uop import Ops, UOp, dtypes
from whit.uop.ops import all_ops
from whit.uop.uop import fresh_uid


def constant_index() -> UOp:
    """Indices as a graph without memory: 2 1 2 3 0 1."""
    number = UOp(Ops.IOTA, dtypes.int32, (), 6)
    wide = number.equal(0) | number.equal(2)
    return wide.where(number.const_like(2), number & number.const_like(3)).reshape((2, 3))


MORE: list[tuple[str, Graph, list[tuple[int, ...]], tuple[float, float]]] = [
    (
        "take",
        lambda x: (
            x * x + UOp(Ops.TAKE, x.dtype, (x, constant_index()), 1).reduce(Ops.ADD, (1, 2)).reshape((2, 1))
        ),
        [(2, 4)],
        (-2, 2),
    ),
    ("take in the middle", lambda x: UOp(Ops.TAKE, x.dtype, (x, constant_index()), 1), [(2, 4, 3)], (-2, 2)),
    (
        "constants",
        lambda x: x + 2.0 * UOp(Ops.IOTA, dtypes.int32, (), 3).cast(dtypes.float64),
        [(2, 3)],
        (-2, 2),
    ),
    ("a scalar", lambda x, y: x * y, [(), (3,)], (-2, 2)),
    ("no axes left", lambda x: (x * x).reduce(Ops.ADD, (0, 1)), [(2, 3)], (-2, 2)),
]
ALL = CASES + MORE
NAMES = [case[0] for case in ALL]


# ---- forward -----------------------------------------------------------------------------------------------


def test_every_rule_backwards_has_one_forwards() -> None:
    assert set(FORWARD) == set(RULES)


@pytest.mark.parametrize("name,build,shapes,bounds", ALL, ids=NAMES)
def test_forward_rule(
    name: str, build: Graph, shapes: list[tuple[int, ...]], bounds: tuple[float, float]
) -> None:
    """First derivatives, for changes of each input alone and of all; and forward over reverse."""
    inputs = [leaf(*shape) for shape in shapes]
    changes = [leaf(*shape) for shape in shapes]
    values, ways = random_values(shapes, bounds, 1), random_values(shapes, (-1, 1), 2)
    leaves = dict(zip([*inputs, *changes], [*values, *ways], strict=True))
    out = build(*inputs)

    def in_torch(*given: torch.Tensor) -> torch.Tensor:
        return run(out, dict(zip(inputs, given, strict=True)))

    for chosen in [[n] for n in range(len(inputs))] + [list(range(len(inputs)))]:
        got = tangents([out], [inputs[n] for n in chosen], [changes[n] for n in chosen])[0]
        want = torch.func.jvp(
            in_torch,
            tuple(values),
            tuple([way if n in chosen else torch.zeros_like(way) for n, way in enumerate(ways)]),
        )[1]
        assert got is not None and got.shape == out.shape and got.dtype is out.dtype
        torch.testing.assert_close(run(got, leaves), want)
    check_forward_over_reverse(out, inputs, changes, leaves)


def check_forward_over_reverse(
    out: UOp, inputs: list[UOp], changes: list[UOp], leaves: dict[UOp, torch.Tensor]
) -> None:
    upstream = leaf(*out.shape)
    weights = random_values([tuple(out.shape)], (-1, 1), 3)[0]
    first = gradient([out], inputs, [upstream])
    second = tangents([g for g in first if g is not None], inputs, changes)

    def gradients(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def weighted(*xs: torch.Tensor) -> torch.Tensor:
            return (run(out, dict(zip(inputs, xs, strict=True))) * weights).sum()

        return torch.func.grad(weighted, tuple(range(len(given))))(*given)

    values, ways = ([leaves[n] for n in nodes] for nodes in (inputs, changes))
    want = torch.func.jvp(gradients, tuple(values), tuple(ways))[1]
    for got, expected in zip(second, want, strict=True):
        value = torch.zeros_like(expected) if got is None else run(got, leaves | {upstream: weights})
        torch.testing.assert_close(value, expected)


def test_forward_through_writes() -> None:
    memory = UOp.new_buffer(6, dtypes.float64, "CPU")
    x, value = memory.reshape((2, 3)), leaf(2)
    view = x.shrink(((0, 2), (1, 2))).reshape((2,))
    after = UOp(
        Ops.AFTER, dtypes.float64, (x, UOp(Ops.STORE, dtypes.void, (view, value * value))), fresh_uid()
    )
    out = after * after
    dx, dv = leaf(2, 3), leaf(2)
    got = tangents([out], [x, value], [dx, dv])[0]
    values = random_values([(2, 3), (2,), (2, 3), (2,)], (-2, 2), 5)

    def in_torch(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        written = torch.cat([old[:, :1], (new * new)[:, None], old[:, 2:]], 1)
        return written * written

    want = torch.func.jvp(in_torch, tuple(values[:2]), tuple(values[2:]))[1]
    assert got is not None
    torch.testing.assert_close(run(got, dict(zip([x, value, dx, dv], values, strict=True))), want)


def test_ties_in_a_maximum_share_the_change() -> None:
    x, dx = leaf(2, 3), leaf(2, 3)
    got = tangents([x.reduce(Ops.MAX, (1,))], [x], [dx])[0]
    assert got is not None
    value = torch.tensor([[1.0, 2.0, 2.0], [3.0, 0.0, 1.0]], dtype=torch.float64)
    change = torch.tensor([[9.0, 1.0, 2.0], [5.0, 7.0, 7.0]], dtype=torch.float64)
    assert run(got, {x: value, dx: change}).tolist() == [1.5, 5.0]


def test_what_does_not_change_has_no_tangent() -> None:
    x, y, dx = leaf(2), leaf(2), leaf(2)
    assert tangents([y * 2.0, x.detach(), x.alu(Ops.FLOOR)], [x], [dx]) == [None, None, None]


# ---- batches -----------------------------------------------------------------------------------------------


def test_every_op_of_the_tensor_level_has_a_batching_rule() -> None:
    at_tensor_level = {op for op in all_ops() if op.category in TENSOR_LEVEL or op in TENSOR_MEMORY}
    assert set(batching.RULES) == at_tensor_level | {Ops.CALL, Ops.OUTPUT}


@pytest.mark.parametrize("name,build,shapes,bounds", ALL, ids=NAMES)
def test_batching_rule(
    name: str, build: Graph, shapes: list[tuple[int, ...]], bounds: tuple[float, float]
) -> None:
    """Every choice of mapped inputs; the graph itself and its gradient."""
    for mapped in product([False, True], repeat=len(shapes)):
        if any(mapped):
            check_batch(build, shapes, bounds, mapped)


def check_batch(
    build: Graph, shapes: list[tuple[int, ...]], bounds: tuple[float, float], mapped: tuple[bool, ...]
) -> None:
    size = 3
    inputs = [leaf(*shape) for shape in shapes]
    many = [leaf(size, *shape) for shape in shapes]
    values = random_values([(size, *s) if m else s for s, m in zip(shapes, mapped, strict=True)], bounds, 4)
    out = build(*inputs)
    upstream = leaf(*out.shape)
    weights = random_values([tuple(out.shape)], (-1, 1), 3)[0]
    parts = [g for g in gradient([out], inputs, [upstream]) if g is not None]
    changes = {one: all_ for one, all_, m in zip(inputs, many, mapped, strict=True) if m}
    known = {all_ if m else one: v for one, all_, m, v in zip(inputs, many, mapped, values, strict=True)}
    for root, found in zip([out, *parts], batch([out, *parts], Batch(size, changes)), strict=True):
        want = [
            run(
                root,
                {one: v[n] if m else v for one, m, v in zip(inputs, mapped, values, strict=True)}
                | {upstream: weights},
            )
            for n in range(size)
        ]
        got = run(found.node, known | {upstream: weights})
        torch.testing.assert_close(got if found.batched else got.expand(size, *got.shape), torch.stack(want))


@pytest.mark.parametrize("mapped", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [dtypes.int32, dtypes.int64], ids=str)
def test_batches_of_take(mapped: tuple[bool, bool], axis: int, dtype: object) -> None:
    x, index = leaf(2, 3, 4), UOp.new_buffer(2, dtype, "CPU").reshape((2, 1)).contiguous()  # type: ignore[arg-type]
    many_x, many_index = leaf(3, 2, 3, 4), UOp.new_buffer(6, dtype, "CPU").reshape((3, 2, 1)).contiguous()  # type: ignore[arg-type]
    out = UOp(Ops.TAKE, dtypes.float64, (x, index), axis)
    changes = {one: all_ for one, all_, m in zip((x, index), (many_x, many_index), mapped, strict=True) if m}
    found = batch([out], Batch(3, changes))[0].node
    found = found.src[1] if found.op is Ops.OUTPUT else found
    values = random_values([(3, 2, 3, 4) if mapped[0] else (2, 3, 4)], (-1, 1))[0]
    numbers = torch.tensor([[[0], [1]], [[1], [1]], [[0], [0]]], dtype=torch.int64)
    numbers = numbers if mapped[1] else numbers[0]
    want = [
        torch.index_select(
            values[n] if mapped[0] else values, axis, (numbers[n] if mapped[1] else numbers).reshape(-1)
        ).reshape(out.shape)
        for n in range(3)
    ]
    got = run(found, {many_x if mapped[0] else x: values, many_index if mapped[1] else index: numbers})
    torch.testing.assert_close(got, torch.stack(want))


def test_what_is_the_same_for_all_is_computed_once() -> None:
    x, y, many = leaf(2), leaf(2), leaf(3, 2)
    shared = y * y
    found = batch([x * shared, shared], Batch(3, {x: many}))
    assert found[1].node is shared and not found[1].batched
    assert shared in found[0].node.toposort()


def test_writes_are_refused_by_name() -> None:
    memory, value = UOp.new_buffer(2, dtypes.float64, "CPU"), leaf(2)
    after = UOp(
        Ops.AFTER, dtypes.float64, (memory, UOp(Ops.STORE, dtypes.void, (memory, value))), fresh_uid()
    )
    with pytest.raises(ArgumentError, match="a write into a tensor of shape"):
        batch([after], Batch(3, {value: leaf(3, 2)}))

"""Movement operations against NumPy and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensor.reference import evaluate
from whit import Tensor, Variable, dtypes
from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.tensor.einops import plan


def counted(*shape: int, kind: Any = np.float32) -> np.ndarray:
    return np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(kind)


def same(got: Tensor, want: Any) -> None:
    np.testing.assert_array_equal(evaluate(got), np.asarray(want))
    assert got.shape == np.shape(want)


@st.composite
def chains(draw: Any) -> tuple[Tensor, np.ndarray]:
    """The same random chain of movements on a tensor and on an array."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), min_size=1, max_size=3)))
    x = counted(*shape)
    t = Tensor(x)
    for _ in range(draw(st.integers(1, 5))):
        step = draw(
            st.sampled_from(
                ["permute", "flip", "pad", "shrink", "reshape", "unsqueeze", "expand", "roll", "squeeze"]
            )
        )
        if step == "permute":
            order = draw(st.permutations(range(x.ndim)))
            t, x = t.permute(*order), x.transpose(order)
        elif step == "flip":
            axes = draw(st.sets(st.integers(0, x.ndim - 1), max_size=x.ndim)) if x.ndim else set()
            if axes:
                t, x = t.flip(*axes), np.flip(x, tuple(axes))
        elif step == "pad" and x.ndim:
            widths = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(x.ndim)]
            value = draw(st.sampled_from([0, -3]))
            t, x = t.pad(widths, value=value), np.pad(x, widths, constant_values=value)
        elif step == "shrink":
            limits = [tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in x.shape]
            t, x = t.shrink(limits), x[tuple(slice(a, b) for a, b in limits)]
        elif step == "reshape":
            new = (-1,) if x.size else (x.size,)
            t, x = t.reshape(*new), x.reshape(new)
        elif step == "unsqueeze":
            at = draw(st.integers(-x.ndim - 1, x.ndim))
            t, x = t.unsqueeze(at), np.expand_dims(x, at)
        elif step == "expand":
            new = tuple(draw(st.integers(1, 3)) if n == 1 else n for n in x.shape)
            t, x = t.expand(2, *new), np.broadcast_to(x, (2, *new))
        elif step == "roll" and x.ndim:
            t, x = t.roll(2, 0), np.roll(x, 2, 0)
        elif step == "squeeze":
            t, x = t.squeeze(), x.squeeze()
        if x.size > 400 or x.ndim > 5:
            break
    return t, x


@settings(max_examples=80, deadline=None)
@given(chains())
def test_chains_of_movements(case: tuple[Tensor, np.ndarray]) -> None:
    same(*case)


def test_reshape() -> None:
    x = counted(2, 3, 4)
    t = Tensor(x)
    same(t.reshape(6, -1), x.reshape(6, 4))
    same(t.view((4, 6)), x.reshape(4, 6))
    same(t.reshape(np.int64(8), 3), x.reshape(8, 3))
    same(t.reshape(None, 12), x.reshape(2, 12))
    same(t.flatten(1), x.reshape(2, 12))
    same(t.unflatten(2, (2, -1)), x.reshape(2, 3, 2, 2))
    for shape, why in (
        ((5, 5), "24 elements into 25"),
        ((-1, -1), "only one"),
        ((7, -1), "no multiple"),
        ((-2, 12), "no size"),
        ((2.0, 12), "no size"),
    ):
        with pytest.raises(ShapeError, match=why):
            t.reshape(*shape)
    with pytest.raises(ShapeError, match="could be anything"):
        Tensor.zeros(0, 3).reshape(0, -1)


def test_permute_and_transpose() -> None:
    x = counted(2, 3, 4)
    t = Tensor(x)
    same(t.permute(2, 0, 1), x.transpose(2, 0, 1))
    same(t.permute((0, -1, 1)), x.transpose(0, 2, 1))
    same(t.transpose(), x.swapaxes(1, 0))
    same(t.transpose(-1, 0), x.swapaxes(-1, 0))
    same(t.T, x.T)
    with pytest.raises(ShapeError, match="each once"):
        t.permute(0, 0, 1)
    with pytest.raises(ShapeError, match="axes run"):
        t.transpose(3, 0)


def test_squeeze_unsqueeze_expand() -> None:
    x = counted(2, 1, 3, 1)
    t = Tensor(x)
    same(t.squeeze(), x.squeeze())
    same(t.squeeze(1), x.squeeze(1))
    same(t.squeeze(0), x)
    same(t.unsqueeze(-1), x[..., None])
    same(t.expand(-1, 4, -1, 2), np.broadcast_to(x, (2, 4, 3, 2)))
    same(t.expand(5, 2, 1, 3, 1), np.broadcast_to(x, (5, 2, 1, 3, 1)))
    with pytest.raises(ShapeError, match="size 1"):
        t.expand(3, 1, 3, 1)
    with pytest.raises(ShapeError, match="fewer axes"):
        t.expand(3)
    with pytest.raises(ShapeError, match="axes run"):
        t.unsqueeze(6)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("widths", [((1, 2), (2, 1)), ((0, 0), (3, 0)), ((2, 0), (0, 3))])
def test_pad_modes(mode: str, widths: Any) -> None:
    x = counted(3, 5)
    numpy_mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]
    same(Tensor(x).pad(widths, mode=mode), np.pad(x, widths, mode=numpy_mode))


def test_pad() -> None:
    x = counted(2, 3)
    t = Tensor(x)
    same(t.pad((1, 2)), np.pad(x, ((0, 0), (1, 2))))
    same(t.pad((1, 2, 3, 0), value=7), np.pad(x, ((3, 0), (1, 2)), constant_values=7))
    same(t.pad((None, (0, 1)), value=-np.inf), np.pad(x, ((0, 0), (0, 1)), constant_values=-np.inf))
    same(t.pad(((-1, 1), (0, -2))), np.pad(x[1:, :1], ((0, 1), (0, 0))))
    same(t.pad_to(4, None), np.pad(x, ((0, 2), (0, 0))))
    same(t.shrink_to(1, 2), x[:1, :2])
    same(Tensor.zeros(0, 2).pad(((1, 0), (0, 0)), value=3), [[3, 3]])
    same(Tensor(np.array([-0.0], np.float32)).pad(((0, 1),), value=5) * 0 == 0, [True, True])
    assert Tensor([1, 2]).pad((0, 1), value=0.5).dtype is dtypes.float32
    for bad, error in (
        (lambda: t.pad((1, 2, 3)), ShapeError),
        (lambda: t.pad(((1, 2),)), ShapeError),
        (lambda: t.pad((3, 0), mode="reflect"), ShapeError),
        (lambda: t.pad((1, 1), mode="mirror"), ArgumentError),
        (lambda: t.shrink(((0, 3), (0, 3))), ShapeError),
        (lambda: t.shrink(((0, 1),)), ShapeError),
    ):
        with pytest.raises(error):
            bad()


def test_cat_and_stack() -> None:
    a, b, c = counted(2, 3), counted(2, 1), counted(2, 4)
    same(Tensor(a).cat(Tensor(b), Tensor(c), dim=1), np.concatenate([a, b, c], 1))
    same(Tensor.cat(Tensor(a), Tensor(a)), np.concatenate([a, a]))
    same(Tensor.cat([Tensor(a), Tensor(b)], dim=-1), np.concatenate([a, b], 1))
    same(Tensor(a).stack(Tensor(a), dim=-1), np.stack([a, a], -1))
    same(Tensor.stack([Tensor(a), Tensor(a)], dim=1), np.stack([a, a], 1))
    same(Tensor.zeros(0, 3).cat(Tensor(a)), a)
    signed = np.array([-0.0, np.nan, np.inf], np.float32)
    got = evaluate(Tensor(signed).cat(Tensor(-signed)))
    np.testing.assert_array_equal(got, np.concatenate([signed, -signed]))
    assert np.signbit(got[0])
    assert Tensor([1]).cat(Tensor([1.5])).dtype is dtypes.float32
    same(Tensor([True]).cat(Tensor([False])), [True, False])
    with pytest.raises(ShapeError, match="differ"):
        Tensor(a).cat(Tensor(counted(3, 4)), dim=1)
    with pytest.raises(ShapeError, match="stack"):
        Tensor(1).cat(Tensor(2))
    with pytest.raises(ShapeError, match="differ"):
        Tensor(a).stack(Tensor(b))


def test_split_chunk_roll_repeat() -> None:
    x = counted(7, 3)
    t = Tensor(x)
    for got, want in zip(t.split(3), np.split(x, [3, 6])):
        same(got, want)
    for got, want in zip(t.split([2, 5]), np.split(x, [2])):
        same(got, want)
    for got, part in zip(t.chunk(3), torch.from_numpy(x).chunk(3)):
        same(got, part.numpy())
    assert len(t.chunk(4)) == len(torch.from_numpy(x).chunk(4))
    same(t.roll(2, 0), np.roll(x, 2, 0))
    same(t.roll(-3), np.roll(x, -3))
    same(t.roll((1, 10), (0, 1)), np.roll(x, (1, 10), (0, 1)))
    same(t.repeat(2, 1, 2), np.tile(x, (2, 1, 2)))
    same(t.repeat_interleave(2, 0), np.repeat(x, 2, 0))
    same(t.repeat_interleave(3), np.repeat(x, 3))
    for bad in (lambda: t.split([2, 4]), lambda: t.repeat(2), lambda: t.split(0), lambda: t.chunk(0)):
        with pytest.raises((ShapeError, ArgumentError)):
            bad()


@pytest.mark.parametrize(
    ("n", "size", "step"),
    [(7, 3, 1), (7, 3, 2), (8, 2, 2), (9, 2, 4), (5, 5, 1), (6, 1, 1), (10, 4, 3), (4, 0, 1)],
)
def test_unfold(n: int, size: int, step: int) -> None:
    x = counted(2, n, 3)
    same(Tensor(x).unfold(1, size, step), torch.from_numpy(x).unfold(1, size, step).numpy())
    same(
        Tensor(x[0, :, 0]).unfold(-1, size, step),
        torch.from_numpy(x[0, :, 0].copy()).unfold(0, size, step).numpy(),
    )


def test_diagonals() -> None:
    x = counted(3, 4, 5)
    for offset in (-3, -1, 0, 2, 4, 9):
        same(Tensor(x).diagonal(offset), np.diagonal(x, offset))
        same(Tensor(x).diagonal(offset, 2, 0), np.diagonal(x, offset, 2, 0))
    same(Tensor(counted(4)).diag(), np.diag(counted(4)))
    same(Tensor(counted(3, 2)).diag(), np.diag(counted(3, 2)))
    with pytest.raises(ShapeError):
        Tensor(x).diag()


def test_turns_and_differences() -> None:
    x = counted(2, 3, 4)
    for k in range(-1, 6):
        same(Tensor(x).rot90(k), np.rot90(x, k))
        same(Tensor(x).rot90(k, (2, 0)), np.rot90(x, k, (2, 0)))
    same(Tensor(x**2).diff(), np.diff(x**2))
    same(Tensor(x**2).diff(2, 0), np.diff(x**2, 2, 0))
    same(Tensor([True, True, False]).diff(), [False, True])


def test_bitcast() -> None:
    x = np.array([[1.0, -2.5], [np.nan, 0.0]], np.float32)
    for kind in ("uint32", "int32", "uint8", "int16", "uint64", "float64"):
        got = evaluate(Tensor(x).bitcast(kind))
        np.testing.assert_array_equal(got.view(np.uint8), x.view(kind).view(np.uint8))
    with pytest.raises(ShapeError, match="multiple"):
        Tensor(counted(3)).bitcast("float64")
    with pytest.raises(DTypeError, match="bool"):
        Tensor([True]).bitcast("uint8")


def test_rearrange() -> None:
    x = counted(6, 4, 5)
    t = Tensor(x)
    same(t.rearrange("a b c -> c a b"), x.transpose(2, 0, 1))
    same(t.rearrange("(x y) b c -> x (y b) c", x=2), x.reshape(2, 12, 5))
    same(
        t.rearrange("(x y) b c -> b (y x) c", y=3),
        x.reshape(2, 3, 4, 5).transpose(2, 1, 0, 3).reshape(4, 6, 5),
    )
    same(t.rearrange("a ... -> ... a"), x.transpose(1, 2, 0))
    same(t.rearrange("a b c -> a 1 b c 1"), x.reshape(6, 1, 4, 5, 1))
    same(t.rearrange("... -> (...)"), x.reshape(-1))
    assert plan("a b -> b a", (2, 3), {}) == ((2, 3), (1, 0), (3, 2))
    for formula, sizes in (
        ("a b -> a b", {}),
        ("a b c -> a b", {}),
        ("a b c a -> a", {}),
        ("(x y) b c -> x y b c", {}),
        ("(x y) b c -> x y b c", {"x": 4}),
        ("a b c", {}),
        ("a (b c -> a", {}),
        ("a b c -> c b a", {"z": 2}),
        ("a b+ c -> a", {}),
    ):
        with pytest.raises((ArgumentError, ShapeError)):
            t.rearrange(formula, **sizes)


def test_symbolic_sizes() -> None:
    n = Variable("n", 1, 8).bind(5)
    x = counted(8, 3)
    t = Tensor(x).shrink(((0, n), None))
    assert t.shape[1] == 3
    np.testing.assert_array_equal(evaluate(t.reshape(-1)), x[:5].reshape(-1))
    np.testing.assert_array_equal(evaluate(t.sum(0)), x[:5].sum(0))
    np.testing.assert_array_equal(evaluate(t.permute(1, 0).flip(0)), x[:5].T[::-1])
    assert t.tolist() == x[:5].tolist()

"""Dense linear algebra against NumPy and PyTorch: values on both devices, batches, shapes, matrices that are
singular, zero or have equal columns; gradients against PyTorch; what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import CLANG, GCC
from whit import Tensor, TinyJit
from whit.helpers import ArgumentError, ShapeError

rng = np.random.default_rng(11)
EPS = {"float32": 2e-5, "float64": 1e-11}


def close(got: Any, want: Any, kind: str = "float64", scale: float = 1.0) -> None:
    want = np.asarray(want)
    size = float(np.abs(want).max(initial=0)) + scale
    np.testing.assert_allclose(
        got.numpy() if isinstance(got, Tensor) else got, want, rtol=0, atol=EPS[kind] * size
    )


def positive(*shape: int) -> np.ndarray:
    x = rng.normal(size=shape)
    return x @ np.swapaxes(x, -1, -2) + np.eye(shape[-1])


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize(
    "device",
    ["CPU", "PYTHON", *[pytest.param(*c.values, marks=[*c.marks, pytest.mark.slow]) for c in (CLANG, GCC)]],
)
def test_everything_on_every_device(kind: str, device: str) -> None:
    a, b = rng.normal(size=(2, 4, 4)).astype(kind), rng.normal(size=(2, 4, 3)).astype(kind)
    spd, sym = positive(2, 4, 4).astype(kind), (a + a.swapaxes(-1, -2))
    t = Tensor(a, device=device)
    close(Tensor(spd, device=device).cholesky(), np.linalg.cholesky(spd), kind)
    close(t.solve(Tensor(b, device=device)), np.linalg.solve(a, b), kind, 10)
    close(t.inv(), np.linalg.inv(a), kind, 10)
    close(t.det(), np.linalg.det(a), kind)
    for ours, theirs in zip(t.slogdet(), np.linalg.slogdet(a), strict=True):
        close(ours, theirs, kind)
    q, r = t.qr()
    want_q, want_r = np.linalg.qr(a)
    close(q, want_q, kind)
    close(r, want_r, kind)
    close(t.svdvals(), np.linalg.svd(a, compute_uv=False), kind)
    close(Tensor(sym, device=device).eigvalsh(), np.linalg.eigvalsh(sym), kind)
    close(
        Tensor(np.tril(a), device=device).solve_triangular(Tensor(b, device=device)),
        np.linalg.solve(np.tril(a), b),
        kind,
        100,
    )


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 40, 40), (2, 2, 3, 3)])
def test_cholesky(shape: tuple[int, ...]) -> None:
    a = positive(*shape)
    close(Tensor(a).cholesky(), np.linalg.cholesky(a))
    close(Tensor(a).cholesky(upper=True), np.linalg.cholesky(a).swapaxes(-1, -2))
    close(Tensor(np.tril(a)).cholesky(), np.linalg.cholesky(a))
    b = rng.normal(size=(*shape[:-1], 2))
    close(Tensor(b).cholesky_solve(Tensor(a).cholesky()), np.linalg.solve(a, b), scale=10)
    assert np.isnan(Tensor([[1.0, 2.0], [2.0, 1.0]]).cholesky().numpy()).any()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_solve_triangular(upper: bool, unit: bool, left: bool) -> None:
    a = rng.normal(size=(3, 6, 6)) + 3 * np.eye(6)
    b = rng.normal(size=(3, 6, 4) if left else (3, 4, 6))
    got = Tensor(a).solve_triangular(Tensor(b), upper=upper, unitriangular=unit, left=left)
    triangle = np.triu(a) if upper else np.tril(a)
    want = torch.linalg.solve_triangular(
        torch.tensor(triangle), torch.tensor(b), upper=upper, unitriangular=unit, left=left
    )
    close(got, want.numpy(), scale=10)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5, 3), (2, 3, 6), (1, 1)])
def test_lu(shape: tuple[int, ...]) -> None:
    a = rng.normal(size=shape)
    want = torch.linalg.lu(torch.tensor(a))
    for ours, theirs in zip(Tensor(a).lu(), want, strict=True):
        close(ours, theirs.numpy())


def test_solve_broadcasts_and_takes_vectors() -> None:
    a, b, v = rng.normal(size=(5, 3, 3)), rng.normal(size=(3, 2)), rng.normal(size=3)
    close(Tensor(a).solve(Tensor(b)), np.linalg.solve(a, np.broadcast_to(b, (5, 3, 2))), scale=10)
    close(Tensor(a[0]).solve(Tensor(v)), np.linalg.solve(a[0], v), scale=10)
    rows = rng.normal(size=(5, 3))
    close(Tensor(a).solve(Tensor(rows)), np.linalg.solve(a, rows[..., None])[..., 0], scale=10)
    whole = np.array([[2, 1], [1, 3]])
    close(Tensor(whole).solve(Tensor([3, 4])), [1, 1], "float32")


def test_a_pivot_is_the_greatest_element() -> None:
    a = np.array([[1e-20, 1.0], [1.0, 1.0]])
    close(Tensor(a).solve(Tensor(np.array([1.0, 2.0]))), [1.0, 1.0])
    assert Tensor([[0.0, 1.0], [1.0, 0.0]]).det().item() == -1
    assert Tensor([[1.0, 2.0], [2.0, 4.0]]).det().item() == 0
    sign, log = Tensor([[1.0, 2.0], [2.0, 4.0]]).slogdet()
    assert (sign.item(), log.item()) == (0, -math.inf)


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (7, 3), (3, 7), (2, 40, 33), (2, 1, 4)])
def test_qr(shape: tuple[int, ...]) -> None:
    a = rng.normal(size=shape)
    for mode in ("reduced", "complete"):
        got, want = Tensor(a).qr(mode), np.linalg.qr(a, mode)
        for ours, theirs in zip(got, want, strict=True):
            close(ours, theirs)


SPECIAL: list[tuple[str, np.ndarray]] = [
    ("zero", np.zeros((4, 3))),
    ("identity", np.eye(5)),
    ("equal columns", np.ones((6, 4))),
    ("a column of zeros", np.array([[1.0, 0, 2], [0, 0, 1], [3, 0, 1], [1, 0, 1]])),
    ("orthogonal columns", np.diag([3.0, 1.0, 2.0])[:, [2, 0, 1]]),
    ("rank one", np.outer(np.arange(1.0, 6), np.arange(1.0, 5))),
    ("graded", np.diag(10.0 ** -np.arange(8)) @ np.triu(np.ones((8, 8)))),
    ("large", rng.normal(size=(4, 4)) * 1e200),
    ("small", rng.normal(size=(4, 4)) * 1e-200),
    ("one row", rng.normal(size=(1, 5))),
    ("Hilbert", 1.0 / (np.arange(6)[:, None] + np.arange(6) + 1)),
    ("clusters", np.linalg.qr(rng.normal(size=(9, 9)))[0] @ np.diag([2.0] * 5 + [1.0] * 4)),
]


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize(("name", "a"), SPECIAL, ids=[s[0] for s in SPECIAL])
def test_svd_of_special_matrices(name: str, a: np.ndarray, kind: str) -> None:
    if kind == "float32" and name in ("large", "small"):
        a = a * (1e-170 if name == "large" else 1e170)
    check_svd(a.astype(kind), kind)
    check_svd(a.T.astype(kind).copy(), kind)


def check_svd(a: np.ndarray, kind: str) -> None:
    m, n = a.shape[-2:]
    size = float(np.abs(a).max(initial=0)) or 1.0
    for full in (True, False):
        u, s, vh = [t.numpy() for t in Tensor(a).svd(full)]
        assert (u.shape, s.shape, vh.shape) == tuple(x.shape for x in np.linalg.svd(a, full))
        k = min(m, n)
        close(
            u.swapaxes(-1, -2) @ u,
            np.broadcast_to(np.eye(u.shape[-1]), (*a.shape[:-2], *(u.shape[-1],) * 2)),
            kind,
        )
        close(
            vh @ vh.swapaxes(-1, -2),
            np.broadcast_to(np.eye(vh.shape[-2]), (*a.shape[:-2], *(vh.shape[-2],) * 2)),
            kind,
        )
        made = (u[..., :k] * s[..., None, :]) @ vh[..., :k, :]
        close(made / size, a / size, kind)
        close(s / size, np.linalg.svd(a.astype(np.float64), compute_uv=False) / size, kind)
        assert (np.diff(s, axis=-1) <= 0).all()


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 5), (64, 64), (2, 2, 3, 3), (50, 20)])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_svd(shape: tuple[int, ...], kind: str) -> None:
    check_svd(rng.normal(size=shape).astype(kind), kind)


SYMMETRIC: list[tuple[str, np.ndarray]] = [
    *[(str(n), positive(n, n) - 2 * n * np.eye(n)) for n in (1, 2, 7, 40)],
    ("batch", np.stack([positive(4, 4), -positive(4, 4)])),
    ("zero", np.zeros((3, 3))),
    ("plus and minus", np.array([[0.0, 1.0], [1.0, 0.0]])),
    ("equal", np.eye(4) * -3),
    ("rank one", np.ones((5, 5))),
    ("large", positive(4, 4) * 1e200),
]


@pytest.mark.parametrize(("name", "a"), SYMMETRIC, ids=[s[0] for s in SYMMETRIC])
def test_eigh(name: str, a: np.ndarray) -> None:
    size = float(np.abs(a).max()) or 1.0
    w, v = [t.numpy() for t in Tensor(a).eigh()]
    close(w / size, np.linalg.eigvalsh(a) / size)
    close(v.swapaxes(-1, -2) @ v, np.broadcast_to(np.eye(a.shape[-1]), a.shape))
    close((v * (w / size)[..., None, :]) @ v.swapaxes(-1, -2), a / size)
    half = np.triu(a) + 7 * np.tril(np.ones_like(a), -1)
    close(Tensor(half).eigvalsh("U").numpy() / size, np.linalg.eigvalsh(a) / size)


def test_pinv_lstsq_rank_and_cond() -> None:
    for shape in [(5, 3), (3, 5), (2, 4, 4)]:
        a = rng.normal(size=shape)
        close(Tensor(a).pinv(), np.linalg.pinv(a), scale=10)
        assert Tensor(a).matrix_rank().tolist() == np.linalg.matrix_rank(a).tolist()
        close(Tensor(a).cond(), np.linalg.cond(a), scale=100)
    low = rng.normal(size=(6, 2)) @ rng.normal(size=(2, 4))
    b = rng.normal(size=(6, 3))
    close(Tensor(low).pinv(), np.linalg.pinv(low), scale=10)
    assert Tensor(low).matrix_rank().item() == 2
    close(Tensor(low).lstsq(Tensor(b)), np.linalg.lstsq(low, b, rcond=None)[0], scale=10)
    close(Tensor(low).lstsq(Tensor(b[:, 0])), np.linalg.lstsq(low, b[:, 0], rcond=None)[0], scale=10)
    assert Tensor.zeros(3, 3).matrix_rank().item() == 0
    square = rng.normal(size=(4, 4))
    for p in (None, 2, -2, 1, np.inf, "fro"):
        close(Tensor(square).cond(p), np.linalg.cond(square, p), scale=100)


def test_powers_and_exponentials() -> None:
    a = rng.normal(size=(2, 5, 5))
    for n in (0, 1, 2, 5, -1, -3):
        close(Tensor(a).matrix_power(n), np.linalg.matrix_power(a, n), scale=1000)
    for scale in (0.0, 1e-3, 1.0, 30.0):
        x = torch.tensor(a * scale)
        close(Tensor(a * scale).matrix_exp(), torch.linalg.matrix_exp(x).numpy())
    single = a.astype(np.float32)
    close(Tensor(single).expm(), torch.linalg.matrix_exp(torch.tensor(single)).numpy(), "float32", 10)


@pytest.mark.parametrize("ord", ["fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf])
def test_matrix_norm(ord: Any) -> None:
    a = rng.normal(size=(3, 4, 5))
    for axis in ((-2, -1), (0, 2), (2, 0)):
        for keepdim in (False, True):
            got = Tensor(a).matrix_norm(ord, axis, keepdim)
            close(got, torch.linalg.matrix_norm(torch.tensor(a), ord, axis, keepdim).numpy())


def symmetric(x: Any) -> Any:
    return (x + x.transpose(-2, -1)) * 0.5


Case = tuple[str, Callable[[Any], Any], Callable[[Any], Any], tuple[int, ...]]
L = torch.linalg
GRADIENTS: list[Case] = [
    (
        "cholesky",
        lambda x: (x @ x.transpose(-2, -1) + Tensor.eye(4, dtype="float64")).cholesky(),
        lambda x: L.cholesky(x @ x.mT + torch.eye(4)),
        (2, 4, 4),
    ),
    (
        "cholesky of x",
        lambda x: symmetric(x * 0.1 + Tensor.eye(3, dtype="float64")).cholesky(),
        lambda x: L.cholesky(symmetric(x * 0.1 + torch.eye(3))),
        (3, 3),
    ),
    (
        "triangular",
        lambda x: x.solve_triangular(x @ x, upper=True),
        lambda x: L.solve_triangular(x, x @ x, upper=True),
        (2, 4, 4),
    ),
    (
        "unit triangular",
        lambda x: x.solve_triangular(x + 1, unitriangular=True),
        lambda x: L.solve_triangular(x, x + 1, upper=False, unitriangular=True),
        (4, 4),
    ),
    ("solve", lambda x: x.solve(x @ x + 1), lambda x: L.solve(x, x @ x + 1), (2, 4, 4)),
    ("inv", lambda x: x.inv(), lambda x: L.inv(x), (3, 3, 3)),
    ("det", lambda x: x.det(), lambda x: L.det(x), (2, 4, 4)),
    ("slogdet", lambda x: x.slogdet()[1], lambda x: L.slogdet(x)[1], (2, 4, 4)),
    ("lu square", lambda x: x.lu()[1] + x.lu()[2], lambda x: L.lu(x)[1] + L.lu(x)[2], (2, 4, 4)),
    ("lu tall", lambda x: x.lu()[1] @ x.lu()[2].exp(), lambda x: L.lu(x)[1] @ L.lu(x)[2].exp(), (5, 3)),
    ("lu wide", lambda x: x.lu()[1].exp() @ x.lu()[2], lambda x: L.lu(x)[1].exp() @ L.lu(x)[2], (3, 5)),
    ("qr square", lambda x: x.qr()[0] @ x.qr()[1].exp(), lambda x: L.qr(x)[0] @ L.qr(x)[1].exp(), (2, 4, 4)),
    ("qr tall", lambda x: x.qr()[0] @ x.qr()[1].exp(), lambda x: L.qr(x)[0] @ L.qr(x)[1].exp(), (5, 3)),
    ("qr wide", lambda x: x.qr()[0] @ x.qr()[1].exp(), lambda x: L.qr(x)[0] @ L.qr(x)[1].exp(), (3, 5)),
    ("q", lambda x: x.qr()[0], lambda x: L.qr(x)[0], (5, 3)),
    ("r", lambda x: x.qr()[1], lambda x: L.qr(x)[1], (2, 5, 3)),
    ("svdvals", lambda x: x.svdvals(), lambda x: L.svdvals(x), (2, 4, 3)),
    (
        "svd squares",
        lambda x: x.svd(False)[0].square() + x.svd(False)[2].square().sum(-1).unsqueeze(-2),
        lambda x: L.svd(x, False)[0].square() + L.svd(x, False)[2].square().sum(-1).unsqueeze(-2),
        (5, 3),
    ),
    (
        "svd tall",
        lambda x: (lambda u, s, v: (u * s.exp().unsqueeze(-2)) @ v)(*x.svd(False)),
        lambda x: (lambda u, s, v: (u * s.exp().unsqueeze(-2)) @ v)(*L.svd(x, False)),
        (2, 5, 3),
    ),
    (
        "svd wide",
        lambda x: (lambda u, s, v: (u * s.exp().unsqueeze(-2)) @ v)(*x.svd(False)),
        lambda x: (lambda u, s, v: (u * s.exp().unsqueeze(-2)) @ v)(*L.svd(x, False)),
        (3, 5),
    ),
    ("eigvalsh", lambda x: symmetric(x).eigvalsh(), lambda x: L.eigvalsh(symmetric(x)), (2, 4, 4)),
    (
        "eigh",
        lambda x: (lambda w, v: (v * w.exp().unsqueeze(-2)) @ v.transpose(-2, -1) + v.square())(
            *symmetric(x).eigh()
        ),
        lambda x: (lambda w, v: (v * w.exp().unsqueeze(-2)) @ v.mT + v.square())(*L.eigh(symmetric(x))),
        (4, 4),
    ),
    ("pinv tall", lambda x: x.pinv(), lambda x: L.pinv(x), (2, 5, 3)),
    ("pinv wide", lambda x: x.pinv(), lambda x: L.pinv(x), (3, 5)),
    ("lstsq", lambda x: x.lstsq(x.sin() + 1), lambda x: L.pinv(x) @ (x.sin() + 1), (5, 3)),
    ("matrix_exp", lambda x: (x * 3).matrix_exp(), lambda x: L.matrix_exp(x * 3), (3, 3)),
    ("matrix_power", lambda x: x.matrix_power(-3), lambda x: L.matrix_power(x, -3), (3, 3)),
    ("nuclear norm", lambda x: x.matrix_norm("nuc"), lambda x: L.matrix_norm(x, "nuc"), (4, 3)),
]


@pytest.mark.parametrize(("name", "ours", "theirs", "shape"), GRADIENTS, ids=[g[0] for g in GRADIENTS])
def test_gradients(name: str, ours: Any, theirs: Any, shape: tuple[int, ...]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        x = np.random.default_rng(5).normal(size=shape)
        if shape[-1] == shape[-2]:
            x = x + 2 * np.eye(shape[-1])
        t, p = Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
        made, other = ours(t), theirs(p)
        weight = np.cos(np.arange(other.numel())).reshape(other.shape)
        (made * Tensor(weight)).sum().backward()
        (other * torch.tensor(weight)).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert t.grad is not None
    assert p.grad is not None
    close(made, other.detach().numpy(), scale=100)
    close(t.grad, p.grad.numpy(), scale=100)


def test_second_derivative() -> None:
    x = rng.normal(size=(3, 3)) + 2 * np.eye(3)
    t, p = Tensor(x), torch.tensor(x, requires_grad=True)
    (first,) = t.inv().square().sum().gradient(t)
    (second,) = first.sin().sum().gradient(t)
    (one,) = torch.autograd.grad(torch.linalg.inv(p).square().sum(), p, create_graph=True)
    (two,) = torch.autograd.grad(one.sin().sum(), p)
    close(second, two.numpy(), scale=100)


def test_jit_and_one_kernel_for_all_of_a_batch() -> None:
    step = TinyJit(lambda t, b: (t.solve(b), t.svdvals()))
    for _ in range(3):
        a, b = rng.normal(size=(3, 6, 6)), rng.normal(size=(3, 6, 1))
        x, s = step(Tensor(a).realize(), Tensor(b).realize())
        close(x, np.linalg.solve(a, b), scale=100)
        close(s, np.linalg.svd(a, compute_uv=False))


def test_empty_and_nan() -> None:
    assert Tensor.zeros(0, 0).det().item() == 1
    assert Tensor.zeros(2, 0, 0).inv().shape == (2, 0, 0)
    assert [t.shape for t in Tensor.zeros(0, 3).svd()] == [(0, 0), (0,), (3, 3)]
    assert [t.shape for t in Tensor.zeros(3, 0).qr()] == [(3, 0), (0, 0)]
    assert Tensor.zeros(0, 2, 2).solve(Tensor.zeros(0, 2, 1)).shape == (0, 2, 1)
    bad = np.full((3, 3), np.nan)
    for made in (Tensor(bad).svdvals(), Tensor(bad).inv(), Tensor(bad).det(), Tensor(bad).eigvalsh()):
        assert np.isnan(made.numpy()).all()


def test_what_is_refused() -> None:
    for name in ("cholesky", "inv", "det", "slogdet", "eigh", "matrix_exp"):
        with pytest.raises(ShapeError, match="not square"):
            getattr(Tensor.zeros(2, 3), name)()
        with pytest.raises(ShapeError, match="two axes"):
            getattr(Tensor.zeros(3), name)()
    with pytest.raises(ShapeError, match="right-hand sides"):
        Tensor.eye(3).solve(Tensor.zeros(2, 2))
    with pytest.raises(ArgumentError, match="no such mode"):
        Tensor.eye(3).qr("raw")
    with pytest.raises(ArgumentError, match="no such triangle"):
        Tensor.eye(3).eigh("X")
    with pytest.raises(ArgumentError, match="no such norm"):
        Tensor.eye(3).matrix_norm(3)
    with pytest.raises(ArgumentError, match="whole number"):
        Tensor.eye(3).matrix_power(0.5)  # type: ignore[arg-type]

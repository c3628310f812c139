"""Every name that users expect is there, or is left out with a reason; names that no other test mentions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.coverage import GROUPS, LEFT_OUT, has, left_out, owner_of
from tests.tensor.reference import evaluate
from whit import Tensor, dtypes

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"


@pytest.mark.parametrize("place, names", [(p, n) for t, p, n, _ in GROUPS if t in ("Tensor", "dtypes")])
def test_names_are_there_or_have_a_reason(place: str, names: list[str]) -> None:
    owner = owner_of(place)
    assert not [n for n in names if not has(owner, n) and not left_out(n)]


def test_the_page_names_all() -> None:
    text = PAGE.read_text()
    assert not [n for _, _, names, _ in GROUPS for n in names if f"| `{n}` |" not in text]
    assert all(reason for reason in LEFT_OUT.values())
    assert not [n for names in LEFT_OUT for n in names.split() if hasattr(Tensor, n)], "it is there by now"


def test_sums_and_products_of_operands() -> None:
    a, b, c = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_allclose(evaluate(Tensor(a).usum(Tensor(b), Tensor(c))), a + b + c, 1e-6)
    np.testing.assert_allclose(evaluate(Tensor(a).uprod(Tensor(b), Tensor(c))), a * b * c, 1e-6)
    mean, deviation = Tensor(a).std_mean()[::-1]
    np.testing.assert_allclose([mean.item(), deviation.item()], [a.mean(), a.std(ddof=1)], 1e-5)
    np.testing.assert_array_equal(evaluate(Tensor(a).clamp_min(0.1)), np.maximum(a, np.float32(0.1)))
    np.testing.assert_array_equal(evaluate(Tensor(a).clamp_max(0.1)), np.minimum(a, np.float32(0.1)))
    assert Tensor(a).contiguous_backward().tolist() == a.tolist()
    assert Tensor.invalids(2, 3, dtype="int8").shape == (2, 3)


def test_scatter_add_is_torchs() -> None:
    x, index, source = np.zeros((2, 3)), np.array([[0, 2, 2], [1, 1, 0]]), np.arange(6.0).reshape(2, 3)
    want = torch.from_numpy(x).scatter_add(1, torch.from_numpy(index), torch.from_numpy(source))
    got = Tensor(x).scatter_add(1, Tensor(index), Tensor(source))
    np.testing.assert_array_equal(evaluate(got), want.numpy())


def test_conv_transpose3d_is_torchs() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1, 2, 3, 3, 3)), rng.normal(size=(2, 2, 2, 2, 2))
    tx, tw = (torch.from_numpy(v).requires_grad_() for v in (x, w))
    want = torch.nn.functional.conv_transpose3d(tx, tw, stride=2)
    mine = Tensor(x, requires_grad=True), Tensor(w, requires_grad=True)
    got = mine[0].conv_transpose3d(mine[1], stride=2)
    np.testing.assert_allclose(evaluate(got), want.detach().numpy(), 1e-12)
    want.square().sum().backward()
    for slope, peer in zip(got.square().sum().gradient(*mine), (tx.grad, tw.grad)):
        assert peer is not None
        np.testing.assert_allclose(evaluate(slope), peer.numpy(), 1e-11)


def test_threefry_is_the_published_cipher() -> None:
    assert threefry(0, 0) == 0x99BA4EFE6B200159  # known answers of its authors' distribution
    assert threefry(2**64 - 1, 2**64 - 1) == 0xBB002BE71CB996FC
    assert threefry(0x85A308D3243F6A88, 0x0370734413198A2E) == 0x483DF7A0C4923A9C
    for counter, key in ((0, 0), (2**64 - 1, 2**64 - 1), (5 << 32 | 7, 3), (1, 1 << 63)):
        got = Tensor([counter], dtype="uint64").threefry(Tensor([key], dtype="uint64"))
        assert got.item() == threefry(counter, key)


def threefry(counter: int, key: int) -> int:
    """Threefry 2x32 with twenty rounds in Python's integers (Salmon et al. 2011, section 3.3); the low half
    of the counter and of the key comes first."""
    mask = 0xFFFFFFFF
    k = [key & mask, key >> 32]
    k.append(0x1BD11BDA ^ k[0] ^ k[1])
    x = [counter + k[0] & mask, (counter >> 32) + k[1] & mask]
    for i in range(20):
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x[0] = x[0] + x[1] & mask
        x[1] = (x[1] << turn | x[1] >> 32 - turn) & mask ^ x[0]
        if i % 4 == 3:
            n = i // 4 + 1
            x = [x[0] + k[n % 3] & mask, x[1] + k[(n + 1) % 3] + n & mask]
    return x[1] << 32 | x[0]


def test_aliases_of_dtypes() -> None:
    assert (dtypes.uchar, dtypes.ushort, dtypes.uint, dtypes.ulong) == dtypes.uints
    assert dtypes.char is dtypes.int8 and dtypes.weaks == (dtypes.weakint, dtypes.weakfloat)
    assert set(dtypes.int8s + dtypes.int16s + dtypes.int32s + dtypes.int64s) == set(dtypes.ints)
    assert dtypes.fp8_ocp == (dtypes.fp8e4m3, dtypes.fp8e5m2)


# ---- gradients through indices


@pytest.mark.parametrize(
    "read",
    [
        lambda x, t: x[1:, ::2],
        lambda x, t: x[..., None, 0],
        lambda x, t: x[t([0, 2, 0])],
        lambda x, t: x[t([0, 2]), 1:],
        lambda x, t: x[:, t([[0, 1], [3, 3]])],
        lambda x, t: x[t([0, 2]), t([1, 1])],
        lambda x, t: x[x > 0],
        lambda x, t: x[[2, 0], :, None],
    ],
)
def test_gradients_through_brackets(read: object) -> None:
    values = np.random.default_rng(1).normal(size=(3, 4))
    theirs = torch.from_numpy(values).requires_grad_()
    want = read(theirs, torch.tensor)  # type: ignore[operator]
    (want * torch.arange(1.0, want.numel() + 1, dtype=torch.float64).reshape(want.shape)).sum().backward()
    mine = Tensor(values, requires_grad=True)
    got = read(mine, Tensor)  # type: ignore[operator]
    np.testing.assert_array_equal(evaluate(got), want.detach().numpy())
    weights = Tensor.arange(1, got.numel() + 1, dtype="float64").reshape(*got.shape)
    assert theirs.grad is not None
    np.testing.assert_allclose(evaluate((got * weights).sum().gradient(mine)[0]), theirs.grad.numpy())


@pytest.mark.parametrize(
    "place",
    [
        lambda t: (slice(1, None), slice(None, None, 2)),
        lambda t: t([0, 2]),
        lambda t: (slice(None), t([3, 1])),
        lambda t: (t([0, 2]), t([1, 1])),
        lambda t: t([[True, False, True, False]] * 3),
    ],
)
def test_gradients_through_writes(place: object) -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(3, 4))
    tx = torch.from_numpy(values).requires_grad_()
    shape = tx[place(torch.tensor)].shape  # type: ignore[operator]
    new = rng.normal(size=tuple(shape))
    tv = torch.from_numpy(new).requires_grad_()
    ty = tx * 1
    ty[place(torch.tensor)] = tv * 2  # type: ignore[operator]
    (ty * ty).sum().backward()
    x, v = Tensor(values, requires_grad=True), Tensor(new, requires_grad=True)
    y = x * 1
    y[place(Tensor)] = v * 2  # type: ignore[operator]
    np.testing.assert_array_equal(evaluate(y), ty.detach().numpy())
    assert tx.grad is not None and tv.grad is not None
    for got, peer in zip((y * y).sum().gradient(x, v), (tx.grad, tv.grad)):
        np.testing.assert_allclose(evaluate(got), peer.numpy())


@pytest.mark.parametrize(
    "name", ["gather", "take_along_dim", "scatter", "scatter_add", "index_add", "index_copy"]
)
def test_gradients_of_gathers_and_scatters(name: str) -> None:
    rng = np.random.default_rng(3)
    values, source = rng.normal(size=(3, 4)), rng.normal(size=(3, 2))
    index = np.array([[0, 3], [1, 1], [2, 0]]) if name != "scatter" else np.array([[0, 3], [1, 2], [2, 0]])
    rows = np.array([1, 3])
    tx, ts = (torch.from_numpy(v).requires_grad_() for v in (values, source))
    x, s = Tensor(values, requires_grad=True), Tensor(source, requires_grad=True)
    if name in ("gather", "take_along_dim"):
        want = torch.gather(tx, 1, torch.from_numpy(index))
        got = x.gather(1, Tensor(index)) if name == "gather" else x.take_along_dim(Tensor(index), 1)
    else:
        along = index if "scatter" in name else rows
        want = getattr(tx, name)(1, torch.from_numpy(along), ts)
        got = getattr(x, name)(1, Tensor(along), s)
    np.testing.assert_allclose(evaluate(got), want.detach().numpy())
    (want * want).sum().backward()
    assert tx.grad is not None
    targets = (x,) if ts.grad is None else (x, s)
    for slope, peer in zip((got * got).sum().gradient(*targets), (tx.grad, ts.grad)):
        assert peer is not None
        np.testing.assert_allclose(evaluate(slope), peer.numpy())

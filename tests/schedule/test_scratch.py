"""Intermediates in scratch: attention and others against PyTorch, the number of kernels, and that nothing the
size of the scores lies in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from whit import Tensor, dtypes
from whit.codegen.opts import parse_opts
from whit.codegen.pipeline import generate
from whit.runtime.device import Device, Launch
from whit.schedule import schedule
from whit.uop import Ops, UOp
from whit.uop.spec import verify

DEVICES = ("CPU", "PYTHON")


def data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(got: Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(got.numpy(), wanted.detach().numpy(), rtol=tolerance, atol=tolerance)


def window(queries: int, keys: int, width: int) -> Tensor:
    """Position i sees i - width + 1 … i."""
    i, j = Tensor.arange(queries).reshape(queries, 1), Tensor.arange(keys)
    return (j <= i) & (i - j < width)


def torch_window(queries: int, keys: int, width: int) -> torch.Tensor:
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    return (j <= i) & (i - j < width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradients(device: str, causal: bool) -> None:
    shapes = [((1, 2, 24, 8),) * 3, ((2, 13, 8), (2, 21, 8), (2, 21, 5))]
    if device == "CPU":
        shapes += [((1, 2, 300, 16),) * 3, ((1, 1, 130, 40), (1, 1, 517, 40), (1, 1, 517, 24))]
    for shape in shapes:
        arrays = [data(*s, seed=n) for n, s in enumerate(shape)]
        q, k, v = [Tensor(a, device=device, requires_grad=True) for a in arrays]
        qt, kt, vt = [torch.from_numpy(a).requires_grad_() for a in arrays]
        got = q.scaled_dot_product_attention(k, v, is_causal=causal)
        wanted = F.scaled_dot_product_attention(qt, kt, vt, is_causal=causal)
        g = data(*wanted.shape, seed=9)
        (got * Tensor(g, device=device)).sum().backward()
        wanted.backward(torch.from_numpy(g))
        assert q.grad is not None and k.grad is not None and v.grad is not None
        Tensor.realize(got, q.grad, k.grad, v.grad)
        for mine, theirs in ((got, wanted), (q.grad, qt.grad), (k.grad, kt.grad), (v.grad, vt.grad)):
            assert theirs is not None
            close(mine, theirs)


def test_attention_in_c() -> None:
    arrays = [data(2, 64, 16, seed=n) for n in range(3)]
    got = Tensor(arrays[0], device="CPU:GCC").scaled_dot_product_attention(
        Tensor(arrays[1], device="CPU:GCC"), Tensor(arrays[2], device="CPU:GCC"), is_causal=True
    )
    close(got, F.scaled_dot_product_attention(*[torch.from_numpy(a) for a in arrays], is_causal=True))


@pytest.mark.parametrize("width", [1, 64, 1000])
def test_windows(width: int) -> None:
    arrays = [data(2, 200, 16, seed=n) for n in range(3)]
    q, k, v = [Tensor(a, requires_grad=True) for a in arrays]
    qt, kt, vt = [torch.from_numpy(a).requires_grad_() for a in arrays]
    got = q.scaled_dot_product_attention(k, v, window(200, 200, width))
    wanted = F.scaled_dot_product_attention(qt, kt, vt, torch_window(200, 200, width))
    g = data(2, 200, 16, seed=5)
    (got * Tensor(g)).sum().backward()
    wanted.backward(torch.from_numpy(g))
    close(got, wanted)
    for mine, theirs in ((q, qt), (k, kt), (v, vt)):
        assert mine.grad is not None and theirs.grad is not None
        close(mine.grad, theirs.grad)


def test_rows_that_see_nothing_are_zero() -> None:
    """The window of the queries beyond the keys is empty: zeros, as PyTorch's fused kernels give."""
    arrays = [data(2, n, 8, seed=n) for n in (40, 16, 16)]
    q, k, v = [Tensor(a) for a in (arrays[0], arrays[1], data(2, 16, 8, seed=3))]
    got = q.scaled_dot_product_attention(k, v, window(40, 16, 4)).numpy()
    seen = torch_window(40, 16, 4).numpy()
    scores = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64).swapaxes(1, 2) / math.sqrt(8)
    e = np.where(seen, np.exp(scores), 0)
    wanted = e @ data(2, 16, 8, seed=3) / np.maximum(e.sum(-1, keepdims=True), 1e-300)
    assert not wanted[:, 20:].any()
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_reach_the_rows_that_see_them(bad: float) -> None:
    arrays = [data(1, 48, 8, seed=n) for n in range(3)]
    arrays[1][0, 20, 3] = bad
    arrays[0] = np.abs(arrays[0]) + 0.1
    got = Tensor(arrays[0]).scaled_dot_product_attention(Tensor(arrays[1]), Tensor(arrays[2]), is_causal=True)
    scores = torch.from_numpy(arrays[0] @ arrays[1].swapaxes(1, 2) / math.sqrt(8)).float()
    scores = scores.masked_fill(~torch.ones(48, 48).tril().bool(), -math.inf)
    wanted = scores.softmax(-1) @ torch.from_numpy(arrays[2])
    np.testing.assert_array_equal(np.isnan(got.numpy()), np.isnan(wanted.numpy()))
    assert not np.isnan(got.numpy()[0, :20]).any()
    np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length, size", [(96, 16), (32, 32)])
def test_heads_of_one_projection(length: int, size: int) -> None:
    """As in a transformer: q, k and v are parts of one product; another one mixes the heads."""
    heads, width = 3, 3 * size
    x, w, o = data(2, length, width), data(width, 3 * width, seed=1) / 8, data(width, width, seed=2) / 8
    mine = [Tensor(a, requires_grad=True) for a in (x, w, o)]
    theirs = [torch.from_numpy(a).requires_grad_() for a in (x, w, o)]
    parts = (mine[0] @ mine[1]).reshape(2, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    got = parts[0].scaled_dot_product_attention(parts[1], parts[2], is_causal=True)
    got = got.transpose(1, 2).reshape(2, length, width) @ mine[2]
    parts_t = (theirs[0] @ theirs[1]).reshape(2, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    wanted = F.scaled_dot_product_attention(parts_t[0], parts_t[1], parts_t[2], is_causal=True)
    wanted = wanted.transpose(1, 2).reshape(2, length, width) @ theirs[2]
    (got * got).sum().backward()
    (wanted * wanted).sum().backward()
    close(got, wanted, 1e-4)
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-3, atol=1e-3)


def test_shared_heads() -> None:
    arrays = [data(2, 4, 96, 16), data(2, 2, 96, 16, seed=1), data(2, 2, 96, 16, seed=2)]
    q, k, v = [Tensor(a, requires_grad=True) for a in arrays]
    qt, kt, vt = [torch.from_numpy(a).requires_grad_() for a in arrays]
    got = q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True)
    wanted = F.scaled_dot_product_attention(qt, kt, vt, is_causal=True, enable_gqa=True)
    (got * got).sum().backward()
    (wanted * wanted).sum().backward()
    close(got, wanted)
    for mine, theirs in ((q, qt), (k, kt), (v, vt)):
        assert mine.grad is not None and theirs.grad is not None
        close(mine.grad, theirs.grad, 1e-4)


@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2), ("float64", 1e-10)])
def test_other_dtypes(dtype: str, tolerance: float) -> None:
    arrays = [data(2, 100, 32, seed=n) for n in range(3)]
    q, k, v = [Tensor(a).cast(dtype).realize() for a in arrays]
    theirs = [torch.from_numpy(a).to(getattr(torch, dtype)).double() for a in arrays]
    got = q.scaled_dot_product_attention(k, v, is_causal=True)
    assert got.dtype is getattr(dtypes, dtype)
    wanted = F.scaled_dot_product_attention(*theirs, is_causal=True)
    np.testing.assert_allclose(got.cast("float64").numpy(), wanted.numpy(), rtol=tolerance, atol=tolerance)


def test_softmax_written_by_hand() -> None:
    """No special operation: the same kernel comes out of masked_fill, softmax and two products."""
    q, k, v = [Tensor(data(2, 256, 32, seed=n)).realize() for n in range(3)]
    scores = (q @ k.transpose(-2, -1)) * 0.25
    mask = Tensor.arange(256) > Tensor.arange(256).reshape(256, 1)
    out = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
    plan, _, _ = schedule([out.uop])
    assert len(plan.calls) == 1
    qt, kt, vt = [torch.from_numpy(data(2, 256, 32, seed=n)) for n in range(3)]
    close(out, F.scaled_dot_product_attention(qt, kt, vt, is_causal=True, scale=0.25))


def plan_of(tensors: list[Tensor]) -> tuple[int, int]:
    """(kernels, elements of the largest memory) of a computation."""
    made, _, _ = schedule([t.uop for t in tensors])
    verify(made.linear, "schedule")
    return len(made.calls), max(slot.size for slot in made.slots)


@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("kind", ["causal", "full", "window"])
def test_no_matrix_of_scores_in_memory(length: int, kind: str) -> None:
    q, k, v, g = [Tensor.empty(2, 8, length, 64) for _ in range(4)]
    for t in (q, k, v):
        t.requires_grad = True
    mask = window(length, length, 256) if kind == "window" else None
    out = q.scaled_dot_product_attention(k, v, mask, is_causal=kind == "causal")
    assert plan_of([out]) == (1, 16 * length * 64)
    (out * g).sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    kernels, largest = plan_of([out, q.grad, k.grad, v.grad])
    assert kernels <= 4  # the result with the sums of its rows; the gradients of q; those of k and v
    assert largest == 16 * length * 64


def test_a_long_chain_before_a_layer_norm_is_computed_once() -> None:
    x = Tensor(data(64, 500)).realize()
    y = (x.exp() + 1).log().sin().exp()
    out = y.layernorm()
    plan, _, _ = schedule([out.uop])
    assert len(plan.calls) == 1 and plan.calls[0].ast is not None
    assert sum(u.op is Ops.SIN for u in plan.calls[0].ast.toposort()) == 1
    t = torch.from_numpy(data(64, 500))
    wanted = F.layer_norm(((t.exp() + 1).log().sin().exp()), (500,))
    close(out, wanted, 1e-4)


def attention_kernel(length: int) -> UOp:
    q, k, v = [Tensor.empty(2, length, 16) for _ in range(3)]
    plan, _, _ = schedule([q.scaled_dot_product_attention(k, v, is_causal=True).uop])
    assert plan.calls[0].ast is not None
    return plan.calls[0].ast


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 1 by 16, UPCAST axis 2 by 4",
        "UPCAST axis 1 by 16, UNROLL axis 7 by 4, UNROLL axis 5 by 8, STAGE axis 1 read 0",
        "PADTO axis 7 to 12, UNROLL axis 7 by 12, PADTO axis 5 to 7, SPLIT axis 5 by 7, UNROLL axis 3 by 4",
        "SWAP axis 3 with 4, SPLIT axis 7 by 10, SPLIT axis 6 by 2, THREAD axis 0 by 2",
    ],
)
def test_opts_on_scratch(opts: str) -> None:
    """Any split of the loops that fill scratch leaves each element in its place."""
    ast = attention_kernel(80)
    device = Device.get("CPU")
    made = generate(ast, device.target, parse_opts(opts))
    program = device.load(
        device.compile(device.render(made.linear, made.name), made.name),
        made.name,
        Launch(made.tasks, made.global_size, made.local_size),
    )
    arrays = [data(2, 80, 16, seed=n) for n in range(3)]
    out = np.full((2, 80, 16), np.nan, np.float32)
    handles = []
    for array in (out, *arrays):
        handle = device.allocate(array.nbytes)
        device.copyin(handle, memoryview(array.reshape(-1).view(np.uint8)))
        handles.append(handle)
    program(handles, [], True)
    device.copyout(memoryview(out.reshape(-1).view(np.uint8)), handles[0])
    wanted = F.scaled_dot_product_attention(*[torch.from_numpy(a) for a in arrays], is_causal=True)
    np.testing.assert_allclose(out, wanted.numpy(), rtol=2e-5, atol=2e-5)

"""WINDOW: what windows share is stored once; values stay, and elements are read once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.codegen.opts_kernels import (
    AVX512,
    buffers_for,
    conv,
    conv_input_gradient,
    conv_weight_gradient,
    matmul,
    outputs,
)
from tests.codegen.test_opts_on_cpu import run
from whit import Tensor
from whit.codegen.heuristics import choose
from whit.codegen.opts import AxisTable, Opt, OptError, OptKind, apply, parse_opts
from whit.codegen.stages import find_windows, reads_of
from whit.engine.trial import compile_candidate
from whit.runtime.device import Device
from whit.uop import AxisType, Ops, UOp

KERNELS = {"forward": conv, "weight": conv_weight_gradient, "input": conv_input_gradient}
SHAPE = 3, 8, 16, 9, 10, 3, 4  # images, channels in and out, height, width, of the window


def sizes_of(value: UOp) -> list[int]:
    found = find_windows(value)
    return sorted([group.whole.src[0].arg for group in found.groups]) if found is not None else []


def test_windows_are_found_and_kernels_are_none():
    assert [sizes_of(v) for v in reads_of(conv(*SHAPE))] == [[9, 10], []]
    assert [sizes_of(v) for v in reads_of(conv_weight_gradient(*SHAPE))] == [[9, 10], []]
    # the gradient of the input is read from a margin of window - 1 on either side
    assert [sizes_of(v) for v in reads_of(conv_input_gradient(*SHAPE))] == [[7 + 2 * 2, 7 + 2 * 3], []]
    assert [sizes_of(v) for v in reads_of(matmul(8, 8, 8))] == [[], []]


def test_each_element_is_stored_once():
    made = apply(conv(*SHAPE), parse_opts("UPCAST axis 1 by 16, WINDOW axis 0 read 0"), AVX512)
    (stage,) = [u for u in made.toposort() if u.op is Ops.STAGE]
    elements = np.prod([r.src[0].arg for r in stage.src[1:]])
    assert 8 * 9 * 10 <= elements <= 8 * 9 * 16  # windows by themselves: 12 times as many


@pytest.mark.parametrize(
    ("opts", "why"),
    [
        ("WINDOW axis 0 read 1", "walk through the read together"),
        ("PADTO axis 6 to 3, WINDOW axis 0 read 0", "a sum over a window is padded"),
        ("WINDOW axis 0 read 0, STAGE axis 0 read 0", "staged already"),
        ("WINDOW axis 6 read 0", "is a REDUCE"),
    ],
)
def test_illegal(opts, why):
    with pytest.raises(OptError, match=why):
        apply(conv(*SHAPE), parse_opts(opts), AVX512)


def drawn(ast: UOp, seed: int) -> list[Opt]:
    """Legal opts with a WINDOW at the end: splits, pads and tiles of all axes, also those of the windows."""
    r = random.Random(seed)
    target = Device.get("CPU").target._replace(threads=2)
    while True:
        table = AxisTable.of(ast, target)
        for _ in range(r.randint(0, 7)):
            axis = r.choice(list(table.axes.values()))
            kind = r.choice([OptKind.UPCAST, OptKind.UPCAST, OptKind.UNROLL, OptKind.SPLIT, OptKind.SWAP,
                             OptKind.THREAD, OptKind.ACCUMULATE, OptKind.PADTO])  # fmt: skip
            amount = r.choice([2, 3, 4, 5, 8, 16])
            if kind is OptKind.SWAP:
                amount = r.choice(list(table.axes))
            tile = np.prod([a.size for a in table.axes.values() if a.type.is_tile], initial=1) * amount
            if tile > 256 and kind in (OptKind.UPCAST, OptKind.UNROLL):
                continue
            try:
                if r.random() < 0.4 and kind in (OptKind.UPCAST, OptKind.SPLIT):
                    table.apply(Opt(OptKind.PADTO, axis.number, amount))
                table.apply(Opt(kind, axis.number, amount))
            except OptError:
                continue
        windows = next(n for n, v in enumerate(reads_of(ast)) if find_windows(v) is not None)
        levels = [a.number for a in table.of_type(AxisType.LOOP, AxisType.THREAD)]
        try:
            table.apply(Opt(OptKind.WINDOW, r.choice(levels or [0]), windows))
            if r.random() < 0.5:
                table.apply(Opt(OptKind.STAGE, r.choice(levels), 1 - windows))
        except OptError:
            if not any(opt.kind is OptKind.WINDOW for opt in table.opts):
                continue
        return table.opts


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("seed", range(8))
def test_values_stay_under_any_opts(kind, seed):
    ast = KERNELS[kind](*random.Random(seed).choice([SHAPE, (2, 3, 5, 7, 7, 3, 3), (5, 4, 4, 6, 8, 1, 5)]))
    buffers = buffers_for(ast)
    opts = drawn(ast, seed)
    want = outputs(ast, buffers)[0]
    got = run(ast, compile_candidate(ast, "CPU", opts), buffers)[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=str(opts))


CASES = [  # images, channels in and out, size, window, stride, padding
    (2, 32, 64, 14, 3, 1, 1), (2, 64, 64, 7, 3, 1, 1), (2, 32, 32, 13, 3, 2, 1), (4, 32, 32, 12, 5, 1, 0),
    (3, 16, 32, 10, 3, 1, 2), (1, 24, 40, 9, 3, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolutions_and_gradients_agree_with_torch(case):
    n, ci, co, size, k, stride, padding = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, ci, size, size), dtype=np.float32)
    w = rng.standard_normal((co, ci, k, k), dtype=np.float32)
    theirs = [torch.tensor(v, requires_grad=True) for v in (x, w)]
    y = torch.nn.functional.conv2d(theirs[0].relu(), theirs[1], stride=stride, padding=padding)
    g = rng.standard_normal(tuple(y.shape), dtype=np.float32)
    (y * torch.tensor(g)).sum().backward()
    mine = [Tensor(v, requires_grad=True) for v in (x, w)]
    out = mine[0].relu().conv2d(mine[1], stride=stride, padding=padding)
    np.testing.assert_allclose(out.numpy(), y.detach().numpy(), rtol=1e-4, atol=2e-3)
    (out * Tensor(g)).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-4, atol=5e-3)


def test_narrow_images_go_through_windows():
    """Rows of an image beside vectors of channels: no window is copied by itself."""
    for ast in (conv(8, 256, 256, 16, 16, 3, 3), conv_input_gradient(64, 32, 32, 24, 24, 5, 5)):
        assert OptKind.WINDOW in {opt.kind for opt in choose(ast, AVX512)}

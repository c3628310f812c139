"""Recurrent networks against PyTorch's, with its weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import whit
from whit import Context, Tensor, TinyJit, dtypes, nn
from whit.engine import compile as compiler
from whit.helpers import TRAINING, ArgumentError, NumericError, ShapeError
from whit.nn.optim import SGD
from whit.nn.state import get_parameters, get_state_dict, load_state_dict

DRAW = np.random.default_rng(0)
STACKS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("RNN", {"nonlinearity": "relu", "num_layers": 3, "bias": False}),
    ("RNN", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    ("GRU", {}),
    ("GRU", {"bias": False, "batch_first": True}),
    ("GRU", {"num_layers": 2, "bidirectional": True}),
    ("LSTM", {}),
    ("LSTM", {"bias": False, "num_layers": 2, "batch_first": True}),
    ("LSTM", {"num_layers": 2, "bidirectional": True}),
    ("LSTM", {"num_layers": 2, "bidirectional": True, "proj_size": 2}),
]
NAMES = [f"{name} {' '.join(kw)}" for name, kw in STACKS]


def pair(name: str, *sizes: int, dtype: torch.dtype = torch.float64, **kw: Any) -> tuple[Any, Any]:
    """One of whit's and PyTorch's, of equal weights."""
    ours, theirs = getattr(nn, name)(*sizes, **kw), getattr(torch.nn, name)(*sizes, **kw).to(dtype)
    weights = {key: Tensor(value.numpy().copy()) for key, value in theirs.state_dict().items()}
    assert list(get_state_dict(ours)) == list(weights)
    for key, value in weights.items():
        assert get_state_dict(ours)[key].shape == value.shape
        setattr(ours, key, value)
        value.requires_grad = True
    return ours, theirs


def flat(result: Any) -> list[Any]:
    return [result[0], *(result[1] if isinstance(result[1], tuple) else (result[1],))]


def weighted(values: list[Any], make: Any) -> Any:
    """A sum in which every element counts differently."""
    return sum(
        (v * make(np.linspace(-1.0, 2.0, math.prod(v.shape)).reshape(tuple(v.shape)))).sum() for v in values
    )


def compare(name: str, kw: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, given: bool) -> None:
    """Outputs, states and all gradients."""
    ours, theirs = pair(name, 3, 4, dtype=dtype, **kw)
    tolerance = 1e-10 if dtype is torch.float64 else 2e-5
    x = torch.tensor(DRAW.standard_normal(shape), dtype=dtype, requires_grad=True)
    leaves = [x]
    if given:
        batch = () if len(shape) == 2 else (shape[0 if kw.get("batch_first") else 1],)
        rows = kw.get("num_layers", 1) * (1 + kw.get("bidirectional", False))
        widths = [kw.get("proj_size") or 4, 4][: 1 + (name == "LSTM")]
        leaves += [
            torch.tensor(DRAW.standard_normal((rows, *batch, w)), dtype=dtype, requires_grad=True)
            for w in widths
        ]
    mine = [Tensor(leaf.detach().numpy(), requires_grad=True) for leaf in leaves]
    state, own = (tuple(leaves[1:]), tuple(mine[1:])) if name == "LSTM" else (leaves[-1], mine[-1])
    got = flat(ours(mine[0], own) if given else ours(mine[0]))
    want = flat(theirs(leaves[0], state) if given else theirs(leaves[0]))
    for g, w in zip(got, want, strict=True):
        assert g.shape == tuple(w.shape)
        np.testing.assert_allclose(g.numpy(), w.detach().numpy(), rtol=tolerance, atol=tolerance)
    weighted(got, lambda a: Tensor(a.astype(np.float32)).cast(mine[0].dtype)).backward()
    weighted(want, lambda a: torch.tensor(a.astype(np.float32)).to(dtype)).backward()
    pairs = list(zip(mine, leaves, strict=True))
    pairs += [(getattr(ours, key), value) for key, value in theirs.named_parameters()]
    for m, t in pairs:
        assert m.grad is not None and t.grad is not None
        np.testing.assert_allclose(m.grad.numpy(), t.grad.numpy(), rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("name", "kw"), STACKS, ids=NAMES)
def test_outputs_states_and_gradients(name: str, kw: dict[str, Any], given: bool) -> None:
    compare(name, kw, (5, 2, 3), torch.float64, given)


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("shape", [(1, 2, 3), (5, 1, 3), (1, 1, 3), (5, 3), (1, 3)])
def test_one_step_one_example_and_no_batch(name: str, shape: tuple[int, ...]) -> None:
    compare(name, {"bidirectional": True}, shape, torch.float64, True)
    compare(name, {}, shape, torch.float64, False)


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_float32(name: str) -> None:
    compare(name, {"num_layers": 2}, (7, 3, 3), torch.float32, True)


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_a_batch_of_nothing_and_no_steps(name: str) -> None:
    ours, theirs = pair(name, 3, 4)
    got, want = flat(ours(Tensor.zeros(5, 0, 3))), flat(theirs(torch.zeros(5, 0, 3, dtype=torch.float64)))
    assert [g.numpy().shape for g in got] == [tuple(w.shape) for w in want]
    state = Tensor.ones(1, 2, 4)
    output, *last = flat(ours(Tensor.zeros(0, 2, 3), (state, state) if name == "LSTM" else state))
    assert output.numpy().shape == (0, 2, 4)
    assert all(h.tolist() == state.tolist() for h in last)


@pytest.mark.parametrize("name", ["RNNCell", "GRUCell", "LSTMCell"])
@pytest.mark.parametrize("bias", [False, True])
def test_cells(name: str, bias: bool) -> None:
    ours, theirs = pair(name, 3, 4, bias=bias)
    for shape in [(2,), ()]:
        x, h = DRAW.standard_normal((*shape, 3)), DRAW.standard_normal((*shape, 4))
        own, state = Tensor(h), torch.tensor(h)
        is_lstm = name == "LSTMCell"
        for got, want in [
            (
                ours(Tensor(x), (own, own) if is_lstm else own),
                theirs(torch.tensor(x), (state, state) if is_lstm else state),
            ),
            (ours(Tensor(x)), theirs(torch.tensor(x))),
        ]:
            pairs = zip(got, want, strict=True) if is_lstm else [(got, want)]
            for g, w in pairs:
                assert g.shape == tuple(w.shape)
                np.testing.assert_allclose(g.numpy(), w.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_a_cell_with_relu() -> None:
    ours, theirs = pair("RNNCell", 3, 4, nonlinearity="relu")
    x = DRAW.standard_normal((2, 3))
    np.testing.assert_allclose(ours(Tensor(x)).numpy(), theirs(torch.tensor(x)).detach().numpy(), rtol=1e-10)


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_rows_that_get_longer_in_memory(name: str) -> None:
    ours, theirs = pair(name, 3, 64 if name == "LSTM" else 256)
    x = DRAW.standard_normal((4, 2, 3))
    mine, other = Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
    (ours(mine)[0] ** 3).sum().backward()
    (theirs(other)[0] ** 3).sum().backward()
    pairs = [(mine, other), *[(getattr(ours, key), value) for key, value in theirs.named_parameters()]]
    for m, t in pairs:
        assert m.grad is not None and t.grad is not None
        np.testing.assert_allclose(m.grad.numpy(), t.grad.numpy(), rtol=1e-8, atol=1e-10)


def test_weights_are_drawn_as_pytorch_draws_them_and_loaded_by_name() -> None:
    net = nn.LSTM(3, 100)
    values = net.weight_hh_l0.numpy()
    assert -0.1 <= values.min() < -0.09 and 0.09 < values.max() <= 0.1
    assert len(get_parameters(net)) == 4
    theirs = torch.nn.LSTM(3, 100)
    load_state_dict(net, {key: Tensor(value.numpy().copy()) for key, value in theirs.state_dict().items()})
    x = DRAW.standard_normal((4, 2, 3)).astype(np.float32)
    want = theirs(torch.tensor(x))[0].detach().numpy()
    np.testing.assert_allclose(net(Tensor(x))[0].numpy(), want, rtol=1e-5, atol=1e-6)


def test_dropout_between_layers_in_training_only() -> None:
    net = nn.GRU(3, 50, num_layers=2, dropout=0.5)
    x = Tensor(DRAW.standard_normal((4, 2, 3)).astype(np.float32))
    plain = net(x)[0].numpy()
    assert np.array_equal(net(x)[0].numpy(), plain)
    with Context(TRAINING=1):
        assert TRAINING.value
        one, other = net(x)[0].numpy(), net(x)[0].numpy()
    assert not np.allclose(one, plain) and not np.allclose(one, other)
    alone = nn.GRU(3, 50, dropout=0.5)
    with Context(TRAINING=1):
        assert np.array_equal(alone(x)[0].numpy(), alone(x)[0].numpy())


# ---- with the rest of the stack ----------------------------------------------------------------------------


def test_training_under_the_jit() -> None:
    ours, theirs = pair("LSTM", 3, 4)
    mine, other = SGD(get_parameters(ours), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        with Tensor.train():
            mine.zero_grad()
            loss = (ours(x)[0] ** 2).sum()
            loss.backward()
            mine.step()
            return loss.realize()

    for _ in range(5):
        x = DRAW.standard_normal((6, 2, 3))
        other.zero_grad()
        want = (theirs(torch.tensor(x))[0] ** 2).sum()
        want.backward()
        other.step()
        assert step(Tensor(x)).item() == pytest.approx(want.item(), rel=1e-6)  # the rate is a float32


def test_vmap_over_sequences() -> None:
    net = pair("GRU", 3, 4)[0]
    x = Tensor(DRAW.standard_normal((5, 2, 3)))
    got = whit.vmap(lambda one: net(one)[0], in_axes=1, out_axes=1)(x)
    np.testing.assert_allclose(got.numpy(), net(x)[0].numpy(), rtol=1e-10, atol=1e-12)


def test_a_nan_is_found() -> None:
    net = nn.LSTM(3, 4)
    with whit.detect_nan():
        net(Tensor.ones(5, 2, 3))[0].sum().backward()
    with pytest.raises(NumericError, match="NaN"), whit.detect_nan():
        net(Tensor([[[1.0, math.nan, 0.0]]]))[0].realize()


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_kernels_do_not_depend_on_the_length(name: str) -> None:
    def kernels(steps: int) -> int:
        net = nn.__dict__[name](3, 8)
        Tensor.realize(*get_parameters(net))
        x = Tensor(DRAW.standard_normal((steps, 2, 3)).astype(np.float32)).realize()
        compiler.clear()
        loss = (net(x)[0] ** 2).sum()
        Tensor.realize(loss, *loss.gradient(*get_parameters(net)))
        return len(compiler._kernels)

    assert kernels(1000) <= kernels(10) + 2, "sums over all steps may be split in two"


# ---- errors ------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    for make, why in [
        (lambda: nn.RNN(0, 3), "input_size=0"),
        (lambda: nn.GRU(3, 3, num_layers=0), "num_layers=0"),
        (lambda: nn.GRU(3, True), "hidden_size=True"),
        (lambda: nn.LSTM(3, 3, dropout=1.5), "dropout=1.5"),
        (lambda: nn.LSTM(3, 3, proj_size=3), "proj_size=3"),
        (lambda: nn.RNN(3, 3, nonlinearity="exp"), "nonlinearity='exp'"),
        (lambda: nn.RNNCell(3, 3, nonlinearity="exp"), "nonlinearity='exp'"),
        (lambda: nn.GRUCell(3, -1), "hidden_size=-1"),
        (lambda: nn.LSTM(3, 3)(Tensor.ones(2, 2, 3), Tensor.ones(1, 2, 3)), r"takes \(h, c\)"),
    ]:
        with pytest.raises(ArgumentError, match=why):
            make()


def test_shapes() -> None:
    net, cell = nn.LSTM(3, 4), nn.GRUCell(3, 4)
    state = Tensor.zeros(1, 2, 4)
    for run, why in [
        (lambda: net(Tensor.ones(5, 2, 4)), r"LSTM of \(5, 2, 4\)"),
        (lambda: net(Tensor.ones(3)), r"LSTM of \(3,\)"),
        (lambda: net(Tensor.ones(5, 3, 3), (state, state)), r"state 0 of \(1, 2, 4\)"),
        (lambda: net(Tensor.ones(5, 3), (state, state)), r"takes \(1, 4\)"),
        (lambda: cell(Tensor.ones(2, 4)), r"GRUCell of \(2, 4\)"),
        (lambda: cell(Tensor.ones(2, 3), Tensor.ones(3, 4)), r"state of \(3, 4\) for \(2, 3\)"),
    ]:
        with pytest.raises(ShapeError, match=why):
            run()


def test_numbers_are_of_the_weights_dtype() -> None:
    assert nn.LSTM(3, 4)(Tensor.ones(5, 2, 3))[0].dtype is dtypes.float32
    assert nn.GRU(3, 4)(Tensor.ones(5, 2, 3, dtype=dtypes.float64))[0].dtype is dtypes.float64

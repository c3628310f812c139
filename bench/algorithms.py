"""The work of the rows on algorithms: sorting, selection, running sums, decompositions, recurrent nets."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from bench.kernels import Work, draw, eager, replayed
from bench.peers import load


def ordered(size: int) -> Work:
    """Sorted values."""
    x = draw(size)
    contenders = {"whit": replayed(lambda v: v.sort()[0], x), "numpy": lambda: np.sort(x)}
    return Work(contenders, 0.0, size, x.nbytes, x.nbytes)


def greatest(size: int, count: int) -> Work:
    """The greatest values, in order."""
    torch, x = load("torch"), draw(size)
    contenders = {
        "whit": replayed(lambda v: v.topk(count)[0], x),
        "torch": eager(lambda v: torch.topk(v, count)[0], x),
    }
    return Work(contenders, 0.0, size, x.nbytes, 4 * count)


def running_sum(size: int) -> Work:
    """Running sums of whole numbers: exact in any order."""
    x = np.random.default_rng(0).integers(-4, 5, size).astype(np.float32)
    contenders = {"whit": replayed(lambda v: v.cumsum(), x), "numpy": lambda: np.cumsum(x)}
    return Work(contenders, 0.0, size, x.nbytes, x.nbytes)


def embedding_gradient(size: int, width: int, count: int) -> Work:
    """The gradient of a table of vectors of which some are read."""
    torch, table, upstream = load("torch"), draw(size, width), draw(count, width, seed=1)
    index = np.random.default_rng(2).integers(0, size, count)
    weight, places, g = torch.tensor(table, requires_grad=True), torch.tensor(index), torch.tensor(upstream)

    def ours(w: Any, i: Any, v: Any) -> Any:
        w = w.detach()
        w.requires_grad = True
        return (w[i] * v).sum().gradient(w)[0]

    def theirs() -> Any:
        return torch.autograd.grad((weight[places] * g).sum(), weight)[0]

    contenders = {"whit": replayed(ours, table, index, upstream), "torch": theirs}
    return Work(contenders, 1e-6, count * width, 2 * upstream.nbytes, table.nbytes)


def singular(size: int) -> Work:
    """The singular value decomposition; singular values are compared."""
    x = draw(size, size)

    def ours(v: Any) -> Any:
        u, s, vh = v.svd()
        return s, u, vh

    contenders = {"whit": replayed(ours, x), "numpy": lambda: np.linalg.svd(x)[1]}
    call: Any = contenders["whit"]
    contenders["whit"] = lambda: call()[0]
    return Work(contenders, 1e-5, 9 * size**3, x.nbytes, 2 * x.nbytes)


def lstm_pair(inputs: int, hidden: int) -> tuple[Any, Any]:
    """An LSTM of whit and one of torch with the same weights."""
    torch, nn = load("torch"), importlib.import_module("whit.nn")
    theirs, mine = torch.nn.LSTM(inputs, hidden), nn.LSTM(inputs, hidden)
    for name, value in theirs.state_dict().items():
        setattr(mine, name, load("whit").Tensor(value.numpy().copy()).realize())
    return mine, theirs


def lstm_gradients(net: Any, x: Any) -> tuple[Any, ...]:
    """The output of an LSTM of whit, and the gradients of its weights for the sum of its squares."""
    weights = [net.weight_ih_l0, net.weight_hh_l0, net.bias_ih_l0, net.bias_hh_l0]
    output = net(x)[0]
    return output, *(output * output).sum().gradient(*weights)


def recurrent(steps: int, batch: int, inputs: int, hidden: int) -> Work:
    """An LSTM forward, and the gradients of its weights; output and gradients are compared."""
    torch, x = load("torch"), draw(steps, batch, inputs)
    mine, theirs = lstm_pair(inputs, hidden)
    data = torch.from_numpy(x)

    def other() -> Any:
        output = theirs(data)[0]
        return output, *torch.autograd.grad((output * output).sum(), list(theirs.parameters()))

    ours = replayed(lambda v: lstm_gradients(mine, v), x)

    def check() -> float:
        """The greatest difference, in units of the greatest magnitude of each."""
        pairs = [(a.numpy(), b.detach().numpy()) for a, b in zip(ours(), other(), strict=True)]
        return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)

    # of the input: its share and its weights' gradient; of h: its share, its gradient and its weights'
    flops = 2 * steps * batch * 4 * hidden * (2 * inputs + 3 * hidden)
    weights = 4 * 4 * hidden * (inputs + hidden + 2)
    contenders = {"whit": lambda: ours()[0], "torch": lambda: other()[0]}
    return Work(
        contenders, 1e-5, flops, weights + x.nbytes, weights + 4 * steps * batch * hidden, check=check
    )

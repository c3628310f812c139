"""Recurrent networks: cells (one step) and stacks of layers over whole sequences. Names, shapes and first
values of parameters, and the order of gates, are PyTorch's.

A layer multiplies all steps of its input at once, and then runs `whit.scan`: the step is traced and compiled
once, whatever the length of the sequence is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from whit.helpers import ArgumentError, ShapeError
from whit.nn.layers import _is_tensor, uniform
from whit.tensor import Tensor
from whit.tensor.guard import guard
from whit.transforms import scan
from whit.uop.uop import show_shape

States = tuple[Tensor, ...]  # of one layer and direction: (h,), of an LSTM (h, c)


class RNNCell:
    """One step of an Elman network: tanh(x W_ih' + b_ih + h W_hh' + b_hh), or relu of it.

    Shapes: x (n, input_size) or (input_size,), h (n, hidden_size) or (hidden_size,), zeros if None -> new h

    >>> RNNCell(3, 5)(Tensor.ones(2, 3)).shape
    (2, 5)
    """

    gates: ClassVar[int] = 1

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh"
    ) -> None:
        self.nonlinearity = _known_nonlinearity("RNNCell", nonlinearity)
        _make_cell(self, input_size, hidden_size, bias)

    def __call__(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        gates, h, weight, bias = _cell_inputs(self, x, hx)
        return elman(gates, h, weight, bias, self.nonlinearity).reshape(*x.shape[:-1], -1)


class GRUCell:
    """One step of a gated recurrent unit (Cho et al. 2014) with PyTorch's order of gates: r, z, n.

    Shapes: x (n, input_size) or (input_size,), h (n, hidden_size) or (hidden_size,), zeros if None -> new h

    >>> GRUCell(3, 5)(Tensor.ones(2, 3)).shape
    (2, 5)
    """

    gates: ClassVar[int] = 3

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        _make_cell(self, input_size, hidden_size, bias)

    def __call__(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        gates, h, weight, bias = _cell_inputs(self, x, hx)
        return gru(gates, h, weight, bias).reshape(*x.shape[:-1], -1)


def _make_cell(cell: Any, input_size: int, hidden_size: int, bias: bool) -> None:
    """The parameters of a cell."""
    _check_sizes(type(cell).__name__, input_size=input_size, hidden_size=hidden_size)
    bound, rows = 1 / math.sqrt(hidden_size), cell.gates * hidden_size
    cell.input_size, cell.hidden_size = input_size, hidden_size
    cell.weight_ih = uniform(rows, input_size, bound=bound)
    cell.weight_hh = uniform(rows, hidden_size, bound=bound)
    cell.bias_ih = uniform(rows, bound=bound) if bias else None
    cell.bias_hh = uniform(rows, bound=bound) if bias else None


def _cell_inputs(cell: Any, x: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gates' share of x, h with a row for each example, and what it is multiplied with."""
    name, size = type(cell).__name__, cell.hidden_size
    for value in (x,) if hx is None else (x, hx):
        _is_tensor(name, value)
    if x.ndim not in (1, 2) or x.shape[-1] != cell.input_size:
        raise ShapeError(
            f"{name} of {show_shape(x.shape)}",
            because=f"it takes (n, {cell.input_size}) or ({cell.input_size},)",
            fix="reshape the input, or choose another input_size",
        )
    if hx is not None and (hx.ndim != x.ndim or hx.shape != (*x.shape[:-1], size)):
        raise ShapeError(
            f"{name} with a state of {show_shape(hx.shape)} for {show_shape(x.shape)}",
            because=f"it takes {show_shape((*x.shape[:-1], size))}",
            fix="give one row of hidden_size for each example",
        )
    gates = x.reshape(-1, cell.input_size).linear(cell.weight_ih.transpose(0, 1), cell.bias_ih)
    if hx is None:
        hx = Tensor.zeros(gates.shape[0], size, dtype=gates.dtype, device=x.device)
    return gates, hx.reshape(-1, size), cell.weight_hh.transpose(0, 1), cell.bias_hh


# ---- one step ----------------------------------------------------------------------------------------------


def elman(
    gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, nonlinearity: str = "tanh"
) -> Tensor:
    """The next h. gates: the share of the input; weight (hidden_size, hidden_size): what h is multiplied
    by."""
    total = gates + h.linear(weight, bias)
    return total.tanh() if nonlinearity == "tanh" else total.relu()


def gru(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The next h: the gate n sees h after r has been applied to its product."""
    shape = (h.shape[0], 3, h.shape[1])
    given, own = gates.reshape(shape), h.linear(weight, bias).reshape(shape)
    r = (given[:, 0] + own[:, 0]).sigmoid()
    z = (given[:, 1] + own[:, 1]).sigmoid()
    n = (given[:, 2] + r * own[:, 2]).tanh()
    return n + z * (h - n)


def lstm(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The next (h, c), h without a projection."""
    total = (gates + h.linear(weight, bias)).reshape(c.shape[0], 4, c.shape[1])
    i, f, g, o = total[:, 0].sigmoid(), total[:, 1].sigmoid(), total[:, 2].tanh(), total[:, 3].sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c


# ---- layers over sequences ---------------------------------------------------------------------------------


class _Recurrent:
    """What RNN, GRU and LSTM share. Subclasses say how many gates they have and what a step does."""

    gates: ClassVar[int]
    states: ClassVar[int] = 1
    proj_size = 0

    def _make(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
    ) -> None:
        name = type(self).__name__
        _check_sizes(name, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ArgumentError(
                f"{name}(dropout={dropout!r})", because="it is a probability", fix="choose 0 … 1"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional = bidirectional
        bound, rows, out = 1 / math.sqrt(hidden_size), self.gates * hidden_size, self.proj_size or hidden_size
        for layer in range(num_layers):
            width = input_size if layer == 0 else out * (1 + bidirectional)
            for end in self._ends(layer):
                made: dict[str, tuple[int, ...]] = {"weight_ih": (rows, width), "weight_hh": (rows, out)}
                if bias:
                    made |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                if self.proj_size:
                    made["weight_hr"] = (out, hidden_size)
                for parameter, shape in made.items():
                    setattr(self, parameter + end, uniform(*shape, bound=bound))

    def _ends(self, layer: int) -> list[str]:
        """How the names of a layer's parameters end, for each direction."""
        return [f"_l{layer}", f"_l{layer}_reverse"] if self.bidirectional else [f"_l{layer}"]

    def _step(self, gates: Tensor, states: States, end: str) -> States:
        """The states after one step. The weights are those of the layer and direction."""
        raise NotImplementedError  # every subclass has one

    def _input_bias(self, end: str) -> Tensor | None:
        """What is added to the share of the input, of all steps at once."""
        return getattr(self, "bias_ih" + end) + getattr(self, "bias_hh" + end) if self.bias else None

    def _run(self, x: Tensor, hx: Sequence[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """(the output of the last layer, the last states of all layers), in the form of the input."""
        name = type(self).__name__
        for value in (x, *(hx or ())):
            _is_tensor(name, value)
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            shape = f"({'batch, steps' if self.batch_first else 'steps, batch'}, {self.input_size})"
            raise ShapeError(
                f"{name} of {show_shape(x.shape)}",
                because=f"it takes {shape}, or (steps, {self.input_size})",
                fix="reshape the input, or choose another input_size",
            )
        single = x.ndim == 2
        seq = x.unsqueeze(1) if single else x.transpose(0, 1) if self.batch_first else x  # (T, B, input)
        first = self._first_states(name, hx, single, seq)
        last: list[States] = []
        for layer in range(self.num_layers):
            ends, outputs = self._ends(layer), []
            for direction, end in enumerate(ends):
                given = (
                    None
                    if first is None
                    else tuple([state[len(ends) * layer + direction] for state in first])
                )
                output, states = self._one(seq, given, end, direction == 1)
                outputs.append(output)
                last.append(states)
            seq = Tensor.cat(*outputs, dim=-1)
            if self.dropout and layer < self.num_layers - 1:
                seq = seq.dropout(self.dropout)
        found = [Tensor.stack(*[states[n] for states in last]) for n in range(self.states)]
        if single:
            return seq.squeeze(1), [state.squeeze(1) for state in found]
        return seq.transpose(0, 1) if self.batch_first else seq, found

    def _first_states(
        self, name: str, hx: Sequence[Tensor] | None, single: bool, seq: Tensor
    ) -> list[Tensor] | None:
        """The given states with an axis for the batch, checked."""
        if hx is None:
            return None
        rows, found = self.num_layers * (1 + self.bidirectional), []
        for n, state in enumerate(hx):
            width = self.hidden_size if n or not self.proj_size else self.proj_size
            wanted = (rows, width) if single else (rows, seq.shape[1], width)
            if state.shape != wanted:
                raise ShapeError(
                    f"{name} with state {n} of {show_shape(state.shape)}",
                    because=f"for this input it takes {show_shape(wanted)}",
                    fix="give one row for each layer, direction and example",
                )
            found.append(state.unsqueeze(1) if single else state)
        return found

    def _one(self, seq: Tensor, first: States | None, end: str, reverse: bool) -> tuple[Tensor, States]:
        """One layer in one direction: its output (T, B, out) and its last states."""
        weight, bias = getattr(self, "weight_ih" + end), self._input_bias(end)
        steps, batch = seq.shape[:2]
        gates = seq.reshape(steps * batch, seq.shape[2]).linear(weight.transpose(0, 1), bias)
        if first is None:
            widths = [self.proj_size or self.hidden_size, self.hidden_size][: self.states]
            first = tuple([Tensor.zeros(batch, w, dtype=gates.dtype, device=seq.device) for w in widths])
        else:
            first = tuple([state.cast(gates.dtype) for state in first])

        def step(states: States, row: Tensor) -> tuple[States, Tensor]:
            after = self._step(row, states, end)
            return after, after[0]

        last, output = scan(step, first, gates.reshape(steps, batch, gates.shape[-1]), reverse=reverse)
        return output, last


class RNN(_Recurrent):
    """Layers of Elman networks over a sequence (see `RNNCell`); each reads what the one below gives.

    Shapes:  x (T, B, input_size), with batch_first (B, T, input_size), or (T, input_size); h_0
             (num_layers * directions, B, hidden_size), zeros if None -> (output, h_n): the last layer's h of
             every step, both directions beside each other, and the last h of every layer and direction
    dropout: between layers, in training. Of no steps the output is empty, and h_n is h_0.
    Errors:  ShapeError for inputs and states of other shapes, ArgumentError for arguments

    >>> output, h = RNN(3, 5, num_layers=2, bidirectional=True)(Tensor.ones(7, 4, 3))
    >>> output.shape, h.shape
    ((7, 4, 10), (4, 4, 5))
    """

    gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        self.nonlinearity = _known_nonlinearity("RNN", nonlinearity)
        self._make(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)

    def __call__(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, (h,) = self._run(x, None if hx is None else (hx,))
        return output, h

    def _step(self, gates: Tensor, states: States, end: str) -> States:
        weight = getattr(self, "weight_hh" + end).transpose(0, 1)
        return (elman(gates, states[0], weight, None, self.nonlinearity),)


class GRU(_Recurrent):
    """Layers of gated recurrent units over a sequence (see `GRUCell`). Shapes, dropout and errors: those of
    `RNN`.

    >>> output, h = GRU(3, 5, batch_first=True)(Tensor.ones(4, 7, 3))
    >>> output.shape, h.shape
    ((4, 7, 5), (1, 4, 5))
    """

    gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        self._make(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)

    def __call__(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, (h,) = self._run(x, None if hx is None else (hx,))
        return output, h

    def _input_bias(self, end: str) -> Tensor | None:
        return getattr(self, "bias_ih" + end) if self.bias else None  # that of h stands behind the gate r

    def _step(self, gates: Tensor, states: States, end: str) -> States:
        weight = getattr(self, "weight_hh" + end).transpose(0, 1)
        return (gru(gates, states[0], weight, getattr(self, "bias_hh" + end) if self.bias else None),)


class LSTM(_Recurrent):
    """Layers of long short-term memories over a sequence (see `LSTMCell`); states are (h, c), c of
    (num_layers * directions, B, hidden_size). With proj_size, h is projected to that many numbers (Sak et al.
    2014). Shapes, dropout and errors: those of `RNN`.

    >>> output, (h, c) = LSTM(3, 5, proj_size=2)(Tensor.ones(7, 4, 3))
    >>> output.shape, h.shape, c.shape
    ((7, 4, 2), (1, 4, 2), (1, 4, 5))
    """

    gates, states = 4, 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        if isinstance(proj_size, bool) or not isinstance(proj_size, int) or not 0 <= proj_size < hidden_size:
            raise ArgumentError(
                f"LSTM(proj_size={proj_size!r}, hidden_size={hidden_size!r})",
                because="a projection makes h smaller",
                fix="choose 1 … hidden_size - 1, or 0 for none",
            )
        self.proj_size = proj_size
        self._make(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)

    def __call__(
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if hx is not None and not (
            isinstance(hx, (tuple, list)) and len(hx) == 2 and all(isinstance(t, Tensor) for t in hx)
        ):
            raise ArgumentError(
                f"LSTM with state {repr(hx)[:60]}",
                because="it takes (h, c)",
                fix="pass two tensors, or nothing",
            )
        output, (h, c) = self._run(x, hx)
        return output, (h, c)

    def _step(self, gates: Tensor, states: States, end: str) -> States:
        h, c = lstm(gates, states[0], states[1], getattr(self, "weight_hh" + end).transpose(0, 1), None)
        if self.proj_size:
            h = h.linear(getattr(self, "weight_hr" + end).transpose(0, 1))
        return h, c


# ---- arguments ---------------------------------------------------------------------------------------------


def _check_sizes(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise ArgumentError(
                f"{layer}({name}={size!r})",
                because="it must be a positive whole number",
                fix=f"choose {name} >= 1",
            )


def _known_nonlinearity(layer: str, name: str) -> str:
    if name not in ("tanh", "relu"):
        raise ArgumentError(
            f"{layer}(nonlinearity={name!r})", because="there are two", fix='choose "tanh" or "relu"'
        )
    return name


for _class in (RNNCell, GRUCell, RNN, GRU, LSTM):
    guard(_class, ["__init__"])

"""Optimisers. State lives in tensors that are assigned in place, so that captured (JIT) steps replay.

Arithmetic and state of narrow parameters (float16, bfloat16) are float32. `step` computes all parameters,
all state and whatever else waits to be assigned (running statistics) in one go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from whit.helpers import ArgumentError, prod
from whit.nn.layers import filled
from whit.tensor import Tensor, hooks
from whit.tensor.guard import guard
from whit.uop import DType, Ops, dtypes
from whit.uop.uop import show_shape


def _state_dtype(param: Tensor) -> DType:
    return dtypes.float32 if param.dtype.itemsize < 4 else param.dtype


class Optimizer:
    """The part that all share. A subclass says in `_update` how one parameter moves.

    params: tensors; each counts once; those with requires_grad=False are left alone, the others are set to
    True. lr: the learning rate; `optimizer.lr` is a tensor of shape (1,), to be changed with
    `lr.assign([new])`. Errors: ArgumentError for no parameters, for what is no tensor, and for a negative
    learning rate.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        name, given = type(self).__name__, list(params)
        for param in given:
            if not isinstance(param, Tensor):
                raise ArgumentError(
                    f"{name} of a {type(param).__name__}",
                    because="parameters are tensors",
                    fix="pass nn.state.get_parameters(model)",
                )
        distinct = list({id(param): param for param in given}.values())
        self.params = [p for p in distinct if p.requires_grad is not False and p.dtype.is_float]
        if not self.params:
            raise ArgumentError(
                f"{name} of {len(given)} tensors",
                because="none of them can be trained",
                fix="pass float tensors whose requires_grad is not False",
            )
        for key, value in {"lr": lr, **self._settings()}.items():
            if not 0 <= value < math.inf:
                raise ArgumentError(
                    f"{name}({key}={value})", because="it must be a number from 0", fix="choose another"
                )
        for param in self.params:
            param.requires_grad = True
        self.device = self.params[0].device
        self.lr = self._state([lr])

    def _settings(self) -> dict[str, float]:
        """Numbers that must not be negative."""
        return {}

    def _state(self, values: list[float]) -> Tensor:
        """A small float32 tensor in memory."""
        result = Tensor(values, dtype=dtypes.float32, device=self.device)
        result.requires_grad = False
        return result

    def _zeros(self) -> list[Tensor]:
        """Zeros like each parameter."""
        return [filled(p.shape, 0, _state_dtype(p), p.device) for p in self.params]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        """Move every parameter that has a gradient.

        Errors: ArgumentError if none has one. Nothing has changed then.
        """
        hooks.realize(self.schedule_step())

    def schedule_step(self) -> list[Tensor]:
        """Like `step`, but lazily: the tensors to realize."""
        moving = [i for i, param in enumerate(self.params) if param.grad is not None]
        if not moving:
            raise ArgumentError(
                f"{type(self).__name__}.step()",
                because="no parameter has a gradient",
                fix="call backward() on a loss that depends on them first",
            )
        changed, rate = self._advance(), self.lr.reshape(())
        for i in moving:
            param = self.params[i]
            grad = param.grad
            assert grad is not None
            dtype = _state_dtype(param)
            new, state = self._update(
                i, param.detach().cast(dtype), grad.detach().cast(dtype), rate.cast(dtype)
            )
            param.assign(new.cast(param.dtype))
            changed += [param, *state]
        known = {id(tensor) for tensor in changed}
        return changed + [t for t in Tensor.live if t.uop.op is Ops.AFTER and id(t) not in known]

    def _advance(self) -> list[Tensor]:
        """Change what counts steps; the tensors that changed."""
        return []

    def _update(self, i: int, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The new value of parameter i, and its state tensors, already assigned. lr has shape ()."""
        raise NotImplementedError


class OptimizerGroup(Optimizer):
    """Several optimisers that step together, each on its own parameters.

    >>> a, b = Tensor([1.0]), Tensor([1.0])
    >>> group = OptimizerGroup(SGD([a], lr=0.1), AdamW([b], lr=0.01))
    >>> len(group.params)
    2
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ArgumentError("OptimizerGroup()", because="it has no optimisers", fix="pass at least one")
        self.optimizers = optimizers
        self.params = [param for optimizer in optimizers for param in optimizer.params]
        self.device, self.lr = optimizers[0].device, optimizers[0].lr

    def schedule_step(self) -> list[Tensor]:
        changed = [tensor for optimizer in self.optimizers for tensor in optimizer.schedule_step()]
        return list({id(tensor): tensor for tensor in changed}.values())


class SGD(Optimizer):
    """Gradient descent with momentum, Nesterov momentum and weight decay (added to the gradient), as
    PyTorch's.

    >>> weight = Tensor([1.0], requires_grad=True)
    >>> optimizer = SGD([weight], lr=0.5)
    >>> _ = (weight * 3).sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()
    [-0.5]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.001,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        if nesterov and not momentum:
            raise ArgumentError(
                "SGD(nesterov=True, momentum=0)",
                because="Nesterov's step looks along the momentum",
                fix="give a momentum, for example 0.9",
            )
        super().__init__(params, lr)
        self.velocity = self._zeros() if momentum else []

    def _settings(self) -> dict[str, float]:
        return {"momentum": self.momentum, "weight_decay": self.weight_decay}

    def _update(self, i: int, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        if self.weight_decay:
            grad = grad + param * self.weight_decay
        if not self.momentum:
            return param - grad * lr, []
        velocity = self.velocity[i].assign(self.velocity[i] * self.momentum + grad)
        direction = grad + velocity * self.momentum if self.nesterov else velocity
        return param - direction * lr, [velocity]


class _Moments(Optimizer):
    """Adam's running means of the gradient and of its square, corrected for their start at zero (Kingma and
    Ba 2015)."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, b1: float, b2: float, eps: float, weight_decay: float
    ) -> None:
        self.b1, self.b2, self.eps, self.weight_decay = b1, b2, eps, weight_decay
        for name, value in (("b1", b1), ("b2", b2)):
            if not 0 <= value < 1:
                raise ArgumentError(
                    f"{type(self).__name__}({name}={value})",
                    because="it must be from 0 to below 1",
                    fix="choose another, for example 0.9",
                )
        super().__init__(params, lr)
        self.m, self.v = self._zeros(), self._zeros()
        # 1 - b**t of both, advanced by c <- c*b + (1 - b): exact where 1 - b**t in float32 would cancel
        self.corrections, self.decays = self._state([0.0, 0.0]), self._state([self.b1, self.b2])
        self.gains = self._state([1 - self.b1, 1 - self.b2])

    def _settings(self) -> dict[str, float]:
        return {"eps": self.eps, "weight_decay": self.weight_decay}

    def _advance(self) -> list[Tensor]:
        return [self.corrections.assign(self.corrections * self.decays + self.gains)]

    def _direction(self, i: int, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        m = self.m[i].assign(self.m[i] * self.b1 + grad * (1 - self.b1))
        v = self.v[i].assign(self.v[i] * self.b2 + grad.square() * (1 - self.b2))
        corrections = self.corrections.cast(grad.dtype)
        return (m / corrections[0]) / ((v / corrections[1]).sqrt() + self.eps), [m, v]


class Adam(_Moments):
    """Adam (Kingma and Ba 2015). `weight_decay` is added to the gradient.

    >>> Adam([Tensor([1.0])], lr=0.01).lr.tolist()
    [0.009999999776482582]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.001,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, b1, b2, eps, weight_decay)

    def _update(self, i: int, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        if self.weight_decay:
            grad = grad + param * self.weight_decay
        direction, state = self._direction(i, grad)
        return param - direction * lr, state


class AdamW(_Moments):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.001,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, b1, b2, eps, weight_decay)

    def _update(self, i: int, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        direction, state = self._direction(i, grad)
        return param - (direction + param * self.weight_decay) * lr, state


def _norm(x: Tensor) -> Tensor:
    return x.square().sum().sqrt()


def _trust(above: Tensor, below: Tensor) -> Tensor:
    """The ratio of two norms; 1 where either is 0."""
    usable = (above > 0) & (below > 0)
    return usable.where(above / usable.where(below, 1.0), 1.0)


class LAMB(_Moments):
    """Adam whose step on each layer is scaled by norm(weights) / norm(step) (You et al. 2020, algorithm
    2)."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.001,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, b1, b2, eps, weight_decay)

    def _update(self, i: int, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        direction, state = self._direction(i, grad)
        direction = direction + param * self.weight_decay
        return param - direction * (_trust(_norm(param), _norm(direction)) * lr), state


class LARS(Optimizer):
    """Momentum whose rate on each layer is scaled by `tcoef` * norm(weights) / (norm(gradient) +
    weight_decay * norm(weights)) (You, Gitman and Ginsburg 2017, algorithm 1)."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.001,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        tcoef: float = 0.001,
    ) -> None:
        self.momentum, self.weight_decay, self.tcoef = momentum, weight_decay, tcoef
        super().__init__(params, lr)
        self.velocity = self._zeros()

    def _settings(self) -> dict[str, float]:
        return {"momentum": self.momentum, "weight_decay": self.weight_decay, "tcoef": self.tcoef}

    def _update(self, i: int, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights, slope = _norm(param), _norm(grad)
        scale = _trust(weights * self.tcoef, slope + weights * self.weight_decay)
        scale = ((weights > 0) & (slope > 0)).where(scale, 1.0)
        step = (grad + param * self.weight_decay) * (scale * lr)
        velocity = self.velocity[i].assign(self.velocity[i] * self.momentum + step)
        return param - velocity, [velocity]


class Muon(Optimizer):
    """Momentum whose matrix is made orthogonal by Newton-Schulz iteration before each step (Jordan et al.
    2024, kellerjordan.github.io/posts/muon), with decoupled weight decay.

    For weights of two or more axes; the axes after the first count as one. Rows beyond columns scale the
    step by sqrt(rows/columns). Biases and norms belong to another optimiser (see OptimizerGroup).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
        nesterov: bool = True,
        eps: float = 1e-7,
    ) -> None:
        self.momentum, self.weight_decay, self.nesterov, self.eps = momentum, weight_decay, nesterov, eps
        self.ns_steps, self.ns_coefficients = ns_steps, tuple(ns_coefficients)
        super().__init__(params, lr)
        for param in self.params:
            if param.ndim < 2:
                raise ArgumentError(
                    f"Muon of a parameter of shape {show_shape(param.shape)}",
                    because="only matrices can be made orthogonal",
                    fix="give it to AdamW and put both into an OptimizerGroup",
                )
        self.velocity = self._zeros()

    def _settings(self) -> dict[str, float]:
        return {"momentum": self.momentum, "weight_decay": self.weight_decay, "eps": self.eps}

    def _update(self, i: int, param: Tensor, grad: Tensor, lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        velocity = self.velocity[i].assign(self.velocity[i] * self.momentum + grad * (1 - self.momentum))
        direction = grad * (1 - self.momentum) + velocity * self.momentum if self.nesterov else velocity
        rows, columns = param.shape[0], prod(param.shape[1:])
        step = self._orthogonal(direction.reshape(rows, columns)).reshape(*param.shape)
        scale = math.sqrt(max(1.0, rows / columns))
        return param * (1 - lr * self.weight_decay) - step * (lr * scale), [velocity]

    def _orthogonal(self, x: Tensor) -> Tensor:
        """The nearest orthogonal matrix, roughly: X <- aX + (bA + cA²)X with A = XXᵀ, on the shorter side."""
        a, b, c = self.ns_coefficients
        tall = x.shape[0] > x.shape[1]
        x = x.transpose(0, 1) if tall else x
        x = x / _norm(x).maximum(self.eps)
        for _ in range(self.ns_steps):
            square = x @ x.transpose(0, 1)
            x = x * a + (square * b + (square @ square) * c) @ x
        return x.transpose(0, 1) if tall else x


for _class in (Optimizer, OptimizerGroup, SGD, Adam, AdamW, LAMB, LARS, Muon):
    if "__init__" in vars(_class):
        guard(_class, ["__init__"])

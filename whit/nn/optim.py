"""Optimisers. State lives in tensors that are assigned in place, so that captured (JIT) steps replay.

Arithmetic and state of narrow parameters (float16, bfloat16) are float32. `step` computes all parameters,
all state and whatever else waits to be assigned (running statistics) in one go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from whit.helpers import ArgumentError, prod
from whit.nn.layers import filled
from whit.tensor import Tensor, hooks
from whit.tensor.guard import guard
from whit.uop import DType, Ops, dtypes
from whit.uop.uop import show_shape


def _small(values: list[float], device: str) -> Tensor:
    """A small float32 tensor in memory."""
    result = Tensor(values, dtype=dtypes.float32, device=device)
    result.requires_grad = False
    return result


def _state_dtype(param: Tensor) -> DType:
    return dtypes.float32 if param.dtype.itemsize < 4 else param.dtype


Group = dict[str, Any]


def _setting(group: Group, name: str, like: Tensor) -> float | Tensor:
    """A setting that a scheduler may have made a tensor of."""
    value: float | Tensor = group[name]
    return value.to(like.device).reshape(()).cast(like.dtype) if isinstance(value, Tensor) else value


class Optimizer:
    """The part that all share. A subclass says in `_update` how one parameter moves.

    params: tensors, or dicts with "params" and settings of their own for these, such as {"params": [w], "lr":
    0.1}; each tensor counts once; those with requires_grad=False are left alone, the others are set to True.
    lr: the learning rate. `param_groups` holds a dict for each group with its settings; its "lr" is a tensor
    of shape (1,), to be changed with `lr.assign([new])`, as captured (JIT) steps read it. `optimizer.lr` is
    that of the first group. Errors: ArgumentError for no parameters, for what is no tensor, for settings that
    are unknown or outside of their limits, and for a parameter in two groups.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[Group], lr: float, **settings: float) -> None:
        self.defaults: dict[str, float] = {"lr": lr, **settings}
        self.param_groups: list[Group] = []
        given = list(params)
        groups = [g for g in given if isinstance(g, dict)]
        if given and len(groups) == len(given):
            for group in groups:
                self.add_param_group(group)
        else:
            self.add_param_group({"params": given})

    @property
    def params(self) -> list[Tensor]:
        """All parameters, group after group."""
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def lr(self) -> Tensor:
        """The learning rate of the first group."""
        rate: Tensor = self.param_groups[0]["lr"]
        return rate

    @property
    def device(self) -> str:
        """Where the first parameter is."""
        first: Tensor = self.param_groups[0]["params"][0]
        return first.device

    def add_param_group(self, group: Group) -> None:
        """Take in more parameters: {"params": tensors, and settings that differ from the defaults}.

        Errors: as of the class; nothing has changed then.

        >>> head, body = Tensor([1.0]), Tensor([1.0])
        >>> optimizer = SGD([head], lr=0.1)
        >>> optimizer.add_param_group({"params": [body], "lr": 0.01})
        >>> [round(g["lr"].item(), 3) for g in optimizer.param_groups]
        [0.1, 0.01]
        """
        name = type(self).__name__
        unknown = sorted(set(group) - set(self.defaults) - {"params"})
        if unknown or "params" not in group:
            raise ArgumentError(
                f"{name} with a group of {', '.join(sorted(group)) or 'nothing'}",
                because=f"it has no setting {unknown[0]!r}" if unknown else 'a group needs "params"',
                fix=f"use params and {', '.join(self.defaults)}",
            )
        params = self._trainable(group["params"])
        if not {id(p) for p in self.params}.isdisjoint({id(p) for p in params}):
            raise ArgumentError(
                f"{name} with a parameter in two groups",
                because="it would move twice in each step",
                fix="leave it out of one of them",
            )
        settings = {**self.defaults, **{key: value for key, value in group.items() if key != "params"}}
        self._check(settings)
        for param in params:
            param.requires_grad = True
        settings["lr"] = _small([settings["lr"]], params[0].device)
        self.param_groups.append({"params": params, **settings})
        self._begin(self.param_groups[-1])

    def _trainable(self, given: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """The distinct parameters that can be trained."""
        name, params = type(self).__name__, [given] if isinstance(given, Tensor) else list(given)
        for param in params:
            if not isinstance(param, Tensor):
                raise ArgumentError(
                    f"{name} of a {type(param).__name__}",
                    because="parameters are tensors",
                    fix="pass nn.state.get_parameters(model)",
                )
        distinct = list({id(param): param for param in params}.values())
        found = [p for p in distinct if p.requires_grad is not False and p.dtype.is_float]
        if not found:
            raise ArgumentError(
                f"{name} of {len(params)} tensors",
                because="none of them can be trained",
                fix="pass float tensors whose requires_grad is not False",
            )
        return found

    def _check(self, settings: Group) -> None:
        """Refuse settings outside of their limits."""
        for key, value in settings.items():
            if key in ("b1", "b2"):
                fine, limits = 0 <= value < 1, "it must be from 0 to below 1"
            else:
                fine, limits = 0 <= value < math.inf, "it must be a number from 0"
            if not fine:
                raise ArgumentError(
                    f"{type(self).__name__}({key}={value})", because=limits, fix="choose another"
                )

    def _begin(self, group: Group) -> None:
        """Make the state of a new group's parameters."""

    def _zeros(self, group: Group) -> list[Tensor]:
        """Zeros like each parameter."""
        return [filled(p.shape, 0, _state_dtype(p), p.device) for p in group["params"]]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        """Move every parameter that has a gradient.

        Errors: ArgumentError if none has one. Nothing has changed then.
        """
        hooks.realize(self.schedule_step())

    def schedule_step(self, skip: Tensor | None = None) -> list[Tensor]:
        """Like `step`, but lazily: the tensors to realize. Where the bool `skip` holds, nothing changes."""
        if all(param.grad is None for param in self.params):
            raise ArgumentError(
                f"{type(self).__name__}.step()",
                because="no parameter has a gradient",
                fix="call backward() on a loss that depends on them first",
            )
        self._skip = skip
        changed: list[Tensor] = []
        number = 0
        for group in self.param_groups:
            changed += self._advance(group)
            for param in group["params"]:
                if param.grad is not None:
                    changed += self._move(number, param, group)
                number += 1
        self._skip = None
        known = {id(tensor) for tensor in changed}
        return changed + [t for t in Tensor.live if t.uop.op is Ops.AFTER and id(t) not in known]

    def _move(self, i: int, param: Tensor, group: Group) -> list[Tensor]:
        """Assign a parameter's new value; the tensors that changed."""
        dtype, grad = _state_dtype(param), param.grad
        assert grad is not None
        rate = group["lr"].to(param.device).reshape(()).cast(dtype)
        new, state = self._update(i, param.detach().cast(dtype), grad.detach().cast(dtype), rate, group)
        return [self._assign(param, new.cast(param.dtype)), *state]

    def _assign(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Give a tensor its new value, unless the step is skipped."""
        if self._skip is not None:
            value = self._skip.to(tensor.device).where(tensor.detach(), value)
        return tensor.assign(value)

    _skip: Tensor | None = None

    def _advance(self, group: Group) -> list[Tensor]:
        """Change what counts steps; the tensors that changed."""
        return []

    def _update(
        self, i: int, param: Tensor, grad: Tensor, lr: Tensor, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
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
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def add_param_group(self, group: Group) -> None:
        """Refused: a parameter belongs to one of the optimisers."""
        raise ArgumentError(
            "OptimizerGroup.add_param_group",
            because="it does not say which of the optimisers moves the parameters",
            fix="add it to one of group.optimizers before they are grouped",
        )

    def schedule_step(self, skip: Tensor | None = None) -> list[Tensor]:
        changed = [tensor for optimizer in self.optimizers for tensor in optimizer.schedule_step(skip)]
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
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 0.001,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.velocity: list[Tensor | None] = []
        super().__init__(params, lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    def _check(self, settings: Group) -> None:
        super()._check(settings)
        if settings["nesterov"] and not settings["momentum"]:
            raise ArgumentError(
                "SGD(nesterov=True, momentum=0)",
                because="Nesterov's step looks along the momentum",
                fix="give a momentum, for example 0.9",
            )

    def _begin(self, group: Group) -> None:
        self.velocity += self._zeros(group) if group["momentum"] else [None] * len(group["params"])

    def _update(
        self, i: int, param: Tensor, grad: Tensor, lr: Tensor, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        if group["weight_decay"]:
            grad = grad + param * group["weight_decay"]
        before = self.velocity[i]
        if before is None:
            return param - grad * lr, []
        momentum = _setting(group, "momentum", param)
        velocity = self._assign(before, before * momentum + grad)
        direction = grad + velocity * momentum if group["nesterov"] else velocity
        return param - direction * lr, [velocity]


class _Moments(Optimizer):
    """Adam's running means of the gradient and of its square, corrected for their start at zero (Kingma and
    Ba 2015)."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float,
        b1: float,
        b2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        self.m: list[Tensor] = []
        self.v: list[Tensor] = []
        super().__init__(params, lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)

    def _begin(self, group: Group) -> None:
        self.m += self._zeros(group)
        self.v += self._zeros(group)
        device, b1, b2 = group["params"][0].device, group["b1"], group["b2"]
        # 1 - b**t of both, advanced by c <- c*b + (1 - b): exact where 1 - b**t in float32 would cancel
        group["corrections"] = _small([0.0, 0.0], device)
        group["decays"], group["gains"] = _small([b1, b2], device), _small([1 - b1, 1 - b2], device)

    def _advance(self, group: Group) -> list[Tensor]:
        corrections = group["corrections"]
        return [self._assign(corrections, corrections * group["decays"] + group["gains"])]

    def _direction(self, i: int, grad: Tensor, group: Group) -> tuple[Tensor, list[Tensor]]:
        b1, b2 = group["b1"], group["b2"]
        m = self._assign(self.m[i], self.m[i] * b1 + grad * (1 - b1))
        v = self._assign(self.v[i], self.v[i] * b2 + grad.square() * (1 - b2))
        corrections = group["corrections"].to(grad.device).cast(grad.dtype)
        return (m / corrections[0]) / ((v / corrections[1]).sqrt() + group["eps"]), [m, v]


class Adam(_Moments):
    """Adam (Kingma and Ba 2015). `weight_decay` is added to the gradient.

    >>> Adam([Tensor([1.0])], lr=0.01).lr.tolist()
    [0.009999999776482582]
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 0.001,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, b1, b2, eps, weight_decay)

    def _update(
        self, i: int, param: Tensor, grad: Tensor, lr: Tensor, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        if group["weight_decay"]:
            grad = grad + param * group["weight_decay"]
        direction, state = self._direction(i, grad, group)
        return param - direction * lr, state


class AdamW(_Moments):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 0.001,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, b1, b2, eps, weight_decay)

    def _update(
        self, i: int, param: Tensor, grad: Tensor, lr: Tensor, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        direction, state = self._direction(i, grad, group)
        return param - (direction + param * group["weight_decay"]) * lr, state


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
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 0.001,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, b1, b2, eps, weight_decay)

    def _update(
        self, i: int, param: Tensor, grad: Tensor, lr: Tensor, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        direction, state = self._direction(i, grad, group)
        direction = direction + param * group["weight_decay"]
        return param - direction * (_trust(_norm(param), _norm(direction)) * lr), state


class LARS(Optimizer):
    """Momentum whose rate on each layer is scaled by `tcoef` * norm(weights) / (norm(gradient) +
    weight_decay * norm(weights)) (You, Gitman and Ginsburg 2017, algorithm 1)."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 0.001,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        tcoef: float = 0.001,
    ) -> None:
        self.velocity: list[Tensor] = []
        super().__init__(params, lr, momentum=momentum, weight_decay=weight_decay, tcoef=tcoef)

    def _begin(self, group: Group) -> None:
        self.velocity += self._zeros(group)

    def _update(
        self, i: int, param: Tensor, grad: Tensor, lr: Tensor, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        weights, slope = _norm(param), _norm(grad)
        scale = _trust(weights * group["tcoef"], slope + weights * group["weight_decay"])
        scale = ((weights > 0) & (slope > 0)).where(scale, 1.0)
        step = (grad + param * group["weight_decay"]) * (scale * lr)
        momentum = _setting(group, "momentum", param)
        velocity = self._assign(self.velocity[i], self.velocity[i] * momentum + step)
        return param - velocity, [velocity]


class Muon(Optimizer):
    """Momentum whose matrix is made orthogonal by Newton-Schulz iteration before each step (Jordan et al.
    2024, kellerjordan.github.io/posts/muon), with decoupled weight decay.

    For weights of two or more axes; the axes after the first count as one. Rows beyond columns scale the
    step by sqrt(rows/columns). Biases and norms belong to another optimiser (see OptimizerGroup).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
        nesterov: bool = True,
        eps: float = 1e-7,
    ) -> None:
        self.ns_steps, self.ns_coefficients = ns_steps, tuple(ns_coefficients)
        self.velocity: list[Tensor] = []
        super().__init__(params, lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, eps=eps)

    def _trainable(self, given: Iterable[Tensor] | Tensor) -> list[Tensor]:
        params = super()._trainable(given)
        for param in params:
            if param.ndim < 2:
                raise ArgumentError(
                    f"Muon of a parameter of shape {show_shape(param.shape)}",
                    because="only matrices can be made orthogonal",
                    fix="give it to AdamW and put both into an OptimizerGroup",
                )
        return params

    def _begin(self, group: Group) -> None:
        self.velocity += self._zeros(group)

    def _update(
        self, i: int, param: Tensor, grad: Tensor, lr: Tensor, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        momentum = _setting(group, "momentum", param)
        velocity = self._assign(self.velocity[i], self.velocity[i] * momentum + grad * (1 - momentum))
        direction = grad * (1 - momentum) + velocity * momentum if group["nesterov"] else velocity
        rows, columns = param.shape[0], prod(param.shape[1:])
        step = self._orthogonal(direction.reshape(rows, columns), group["eps"]).reshape(*param.shape)
        scale = math.sqrt(max(1.0, rows / columns))
        return param * (1 - lr * group["weight_decay"]) - step * (lr * scale), [velocity]

    def _orthogonal(self, x: Tensor, eps: float) -> Tensor:
        """The nearest orthogonal matrix, roughly: X <- aX + (bA + cA²)X with A = XXᵀ, on the shorter side."""
        a, b, c = self.ns_coefficients
        tall = x.shape[0] > x.shape[1]
        x = x.transpose(0, 1) if tall else x
        x = x / _norm(x).maximum(eps)
        for _ in range(self.ns_steps):
            square = x @ x.transpose(0, 1)
            x = x * a + (square * b + (square @ square) * c) @ x
        return x.transpose(0, 1) if tall else x


for _class in (Optimizer, OptimizerGroup, SGD, Adam, AdamW, LAMB, LARS, Muon):
    if "__init__" in vars(_class):
        guard(_class, ["__init__"])

"""Learning rates that change with time, as PyTorch's schedulers have them.

A scheduler gives each parameter group a *share*: the rate of a group is the one it began with, times the
shares of all its schedulers. So schedulers compose in any number, and each knows its share at any time by
itself. Rates lie in the groups' "lr" tensors, which captured (JIT) steps read; `step()` is called beside a
captured function, not inside.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from whit.helpers import ArgumentError
from whit.nn.optim import Group, Optimizer
from whit.tensor import Tensor
from whit.tensor.guard import guard, show_argument

_numbers = itertools.count()


class LRScheduler:
    """The part that all share. A subclass says in `_share` which share of its first rate a group has.

    `last_epoch` is the time, 0 at first; `step()` moves it on by 1 and sets the rates. Errors: ArgumentError
    for what is no optimiser, and for settings outside of their limits.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"{type(self).__name__} of {show_argument(optimizer)}",
                because="it is no optimiser",
                fix="pass the optimiser whose rate it is to set",
            )
        self.optimizer, self.last_epoch, self._number = optimizer, 0, next(_numbers)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"].item())
            group.setdefault("shares", {})
        self._set()

    @property
    def base_lrs(self) -> list[float]:
        """The rates that the groups began with."""
        return [group["initial_lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The rate of each group now."""
        return [_rate(group) for group in self.optimizer.param_groups]

    def step(self) -> None:
        """Move on by one, and set the rates."""
        self._at(self.last_epoch + 1)

    def _at(self, time: int) -> None:
        self.last_epoch = time
        self._set()

    def _set(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            group["shares"][self._number] = self._share(index, group["initial_lr"])
            _write(group)

    def _leave(self) -> None:
        """Have no share any more."""
        for group in self.optimizer.param_groups:
            group["shares"].pop(self._number, None)

    def _share(self, index: int, base: float) -> float:
        """The share of group `index`, whose first rate is `base`, at `last_epoch`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on: plain Python values."""
        return {
            "last_epoch": self.last_epoch,
            "base_lrs": self.base_lrs,
            **{name: getattr(self, name) for name in self._kept},
        }

    _kept: tuple[str, ...] = ()  # attributes that change with time

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` of such a scheduler gave.

        Errors: ArgumentError for a state of another kind of scheduler, or of other groups. Nothing has
        changed then.
        """
        wanted = {"last_epoch", "base_lrs", *self._kept}
        if set(state) != wanted or len(state["base_lrs"]) != len(self.optimizer.param_groups):
            raise ArgumentError(
                f"{type(self).__name__}.load_state_dict with {', '.join(map(str, sorted(state)))}",
                because=f"its own state is {', '.join(sorted(wanted))}, a base rate for each group",
                fix="load the state of a scheduler of the same kind and optimiser",
            )
        for group, base in zip(self.optimizer.param_groups, state["base_lrs"], strict=True):
            group["initial_lr"] = base
        for name in self._kept:
            setattr(self, name, state[name])
        self._at(state["last_epoch"])


def _rate(group: Group) -> float:
    share: float = math.prod(group["shares"].values())
    base: float = group["initial_lr"]
    return base * share


def _write(group: Group) -> None:
    rate: Tensor = group["lr"]
    rate.assign(Tensor([_rate(group)], dtype=rate.dtype, device=rate.device)).realize()


def _check(what: str, name: str, value: Any, fine: bool, limits: str) -> None:
    if not fine:
        raise ArgumentError(f"{what}({name}={show_argument(value)})", because=limits, fix="choose another")


def _at_least(what: str, least: int, **values: Any) -> None:
    for name, value in values.items():
        fine = isinstance(value, int) and value >= least
        _check(what, name, value, fine, f"it must be a whole number from {least}")


# ---- shares by formulas ------------------------------------------------------------------------------------


class LambdaLR(LRScheduler):
    """The share is what a function of the time gives: one for all groups, or a list of one for each.

    >>> from whit.nn.optim import SGD
    >>> scheduler = LambdaLR(SGD([Tensor([1.0])], lr=1.0), lambda time: 0.5**time)
    >>> scheduler.step()
    >>> scheduler.get_last_lr()
    [0.5]
    """

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]]
    ) -> None:
        count = len(optimizer.param_groups) if isinstance(optimizer, Optimizer) else 1
        self.functions = [lr_lambda] * count if callable(lr_lambda) else list(lr_lambda)
        fine = len(self.functions) == count and all(callable(f) for f in self.functions)
        limits = f"it must be a function, or one for each of {count} groups"
        _check(type(self).__name__, "lr_lambda", lr_lambda, fine, limits)
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        return float(self.functions[index](self.last_epoch))


class MultiplicativeLR(LambdaLR):
    """The share is the product of what a function gives at the times 1, 2, …, now."""

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]]
    ) -> None:
        self._known: dict[int, tuple[int, float]] = {}  # by group: a time, and the product up to it
        super().__init__(optimizer, lr_lambda)

    def _share(self, index: int, base: float) -> float:
        time, product = self._known.get(index, (0, 1.0))
        if time > self.last_epoch:
            time, product = 0, 1.0
        for at in range(time + 1, self.last_epoch + 1):
            product *= float(self.functions[index](at))
        self._known[index] = self.last_epoch, product
        return product


class StepLR(LRScheduler):
    """`gamma` times as much every `step_size` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        _at_least("StepLR", 1, step_size=step_size)
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        return float(self.gamma ** (self.last_epoch // self.step_size))


class MultiStepLR(LRScheduler):
    """`gamma` times as much at each of the times `milestones`."""

    def __init__(self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        return float(self.gamma ** bisect_right(self.milestones, self.last_epoch))


class ConstantLR(LRScheduler):
    """The share is `factor` for `total_iters` steps, 1 from then on."""

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5) -> None:
        _check("ConstantLR", "factor", factor, 0 <= factor <= 1, "it must be from 0 to 1")
        _at_least("ConstantLR", 0, total_iters=total_iters)
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        return self.factor if self.last_epoch < self.total_iters else 1.0


class LinearLR(LRScheduler):
    """The share goes from `start_factor` to `end_factor` in `total_iters` equal steps: a warm-up.

    >>> from whit.nn.optim import SGD
    >>> scheduler = LinearLR(SGD([Tensor([1.0])], lr=1.0), start_factor=0.5, total_iters=2)
    >>> scheduler.step()
    >>> scheduler.get_last_lr()
    [0.75]
    """

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        _check(
            "LinearLR", "start_factor", start_factor, 0 < start_factor <= 1, "it must be above 0 and up to 1"
        )
        _check("LinearLR", "end_factor", end_factor, 0 <= end_factor <= 1, "it must be from 0 to 1")
        _at_least("LinearLR", 1, total_iters=total_iters)
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        done = min(self.last_epoch, self.total_iters) / self.total_iters
        return self.start_factor + (self.end_factor - self.start_factor) * done


class ExponentialLR(LRScheduler):
    """`gamma` times as much in each step."""

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        return float(self.gamma**self.last_epoch)


class PolynomialLR(LRScheduler):
    """The share falls from 1 to 0 in `total_iters` steps, as (1 - time / total_iters) ** power."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0) -> None:
        _at_least("PolynomialLR", 1, total_iters=total_iters)
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        return float((1 - min(self.last_epoch, self.total_iters) / self.total_iters) ** self.power)


class CosineAnnealingLR(LRScheduler):
    """From the first rate to `eta_min` along half a cosine of `T_max` steps, and back along the other half
    (Loshchilov and Hutter 2017, without restarts).

    >>> from whit.nn.optim import SGD
    >>> scheduler = CosineAnnealingLR(SGD([Tensor([1.0])], lr=1.0), T_max=2)
    >>> scheduler.step()
    >>> [round(rate, 6) for rate in scheduler.get_last_lr()]
    [0.5]
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        _at_least("CosineAnnealingLR", 1, T_max=T_max)
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer)

    def _share(self, index: int, base: float) -> float:
        return _cosine(base, self.eta_min, self.last_epoch / self.T_max)


def _cosine(base: float, least: float, done: float) -> float:
    """The share along half a cosine, of which `done` is over."""
    return (least + (base - least) * (1 + math.cos(math.pi * done)) / 2) / base if base else 1.0


class CosineAnnealingWarmRestarts(LRScheduler):
    """From the first rate to `eta_min` along half a cosine, again and again: the first time in `T_0` steps,
    each time in `T_mult` times as many as before (Loshchilov and Hutter 2017). `step(time)` sets any time,
    fractions too."""

    def __init__(self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> None:
        _at_least("CosineAnnealingWarmRestarts", 1, T_0=T_0, T_mult=T_mult)
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        self.time = 0.0
        super().__init__(optimizer)

    _kept = ("time",)

    def step(self, epoch: float | None = None) -> None:
        """Move on by one, or to a time from 0, and set the rates."""
        time = self.time + 1 if epoch is None else epoch
        _check("CosineAnnealingWarmRestarts.step", "epoch", epoch, time >= 0, "time starts at 0")
        self.time = time
        self._at(math.floor(time))

    def _share(self, index: int, base: float) -> float:
        start, length = 0, self.T_0
        if self.T_mult == 1:
            start = int(self.time // length) * length
        while self.T_mult > 1 and self.time >= start + length:
            start, length = start + length, length * self.T_mult
        return _cosine(base, self.eta_min, (self.time - start) / length)


class OneCycleLR(LRScheduler):
    """Up from max_lr / div_factor to max_lr, then down to that start / final_div_factor, all in `total_steps`
    (Smith and Topin 2018); with `three_phase` down to the start first, then below. The rates that groups
    began with do not count.

    max_lr: one, or one for each group. total_steps: or epochs * steps_per_epoch. pct_start: the part of the
    steps that goes up. anneal_strategy: "cos" or "linear". cycle_momentum: whether "momentum" goes from
    max_momentum to base_momentum meanwhile and back; None: where the optimiser has a momentum. Errors:
    ArgumentError as of `LRScheduler`, and from `step` beyond the last.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool | None = None,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
    ) -> None:
        if total_steps is None and epochs is not None and steps_per_epoch is not None:
            total_steps = epochs * steps_per_epoch
        _at_least("OneCycleLR", 1, total_steps=total_steps)
        assert total_steps is not None
        _check("OneCycleLR", "pct_start", pct_start, 0 <= pct_start <= 1, "it must be from 0 to 1")
        strategies = {"cos": _cosine_between, "linear": _line_between}
        known = anneal_strategy in strategies
        _check("OneCycleLR", "anneal_strategy", anneal_strategy, known, 'it must be "cos" or "linear"')
        groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
        peaks = (
            [float(max_lr)] * len(groups) if isinstance(max_lr, (int, float)) else [float(r) for r in max_lr]
        )
        _check("OneCycleLR", "max_lr", max_lr, len(peaks) == len(groups), f"there are {len(groups)} groups")
        self.total_steps, self._between = total_steps, strategies[anneal_strategy]
        self._phases = _phases(total_steps, pct_start, three_phase)
        self._factors = [1.0, div_factor, *([1.0] if three_phase else []), 1 / final_div_factor]
        self._momenta = [max_momentum, base_momentum, *([max_momentum] if three_phase else []), max_momentum]
        self._cycled = self._with_momentum(groups, cycle_momentum)
        for group, peak in zip(groups, peaks, strict=True):
            group["initial_lr"] = peak / div_factor
        super().__init__(optimizer)

    def _with_momentum(self, groups: Sequence[Group], wanted: bool | None) -> list[Group]:
        """The groups whose momentum changes: it becomes a tensor, which captured steps read."""
        found = [group for group in groups if group.get("momentum")]
        if wanted and len(found) < len(groups):
            raise ArgumentError(
                "OneCycleLR(cycle_momentum=True)",
                because="a group has no momentum to change",
                fix="use SGD with a momentum, or cycle_momentum=False",
            )
        found = [] if wanted is False else found
        for group in found:
            value = float(group["momentum"])
            group["momentum"] = Tensor([value], dtype=group["lr"].dtype, device=group["lr"].device)
        return found

    def step(self) -> None:
        """Move on by one, and set the rates."""
        if self.last_epoch + 1 >= self.total_steps:
            raise ArgumentError(
                f"step {self.last_epoch + 1} of OneCycleLR",
                because=f"the cycle has {self.total_steps} steps, from 0",
                fix="make it longer, or do not call step() after it",
            )
        super().step()

    def _set(self) -> None:
        super()._set()
        for group in self._cycled:
            value, tensor = self._value(self._momenta), group["momentum"]
            tensor.assign(Tensor([value], dtype=tensor.dtype, device=tensor.device)).realize()

    def _share(self, index: int, base: float) -> float:
        return self._value(self._factors)

    def _value(self, levels: Sequence[float]) -> float:
        """The value now between those at the ends of the phases."""
        start = 0.0
        for number, end in enumerate(self._phases):
            if self.last_epoch <= end or number == len(self._phases) - 1:
                done = (self.last_epoch - start) / (end - start) if end > start else 1.0
                return self._between(levels[number], levels[number + 1], done)
            start = end
        raise AssertionError("there is a last phase")


def _phases(steps: int, rising: float, three: bool) -> list[float]:
    """The times at which phases end."""
    peak = rising * steps - 1
    return [peak, 2 * rising * steps - 2, steps - 1.0] if three else [peak, steps - 1.0]


def _cosine_between(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


def _line_between(start: float, end: float, done: float) -> float:
    return start + (end - start) * done


# ---- by results, and of others -----------------------------------------------------------------------------


class ReduceLROnPlateau(LRScheduler):
    """`factor` times as much, down to `min_lr`, once a measured value has not become better for more than
    `patience` steps.

    mode: "min" if less is better, or "max". threshold: what counts as better, as a part of the best value
    (threshold_mode "rel") or as a difference ("abs"). cooldown: steps after a change in which none is
    counted. min_lr: one, or one for each group. eps: smaller changes are not made.

    >>> from whit.nn.optim import SGD
    >>> scheduler = ReduceLROnPlateau(SGD([Tensor([1.0])], lr=1.0), patience=0)
    >>> for loss in (3.0, 3.0):
    ...     scheduler.step(loss)
    >>> scheduler.get_last_lr()
    [0.1]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        what = "ReduceLROnPlateau"
        _check(what, "factor", factor, 0 <= factor < 1, "it must be from 0 to below 1")
        _check(what, "mode", mode, mode in ("min", "max"), 'it must be "min" or "max"')
        fine = threshold_mode in ("rel", "abs")
        _check(what, "threshold_mode", threshold_mode, fine, 'it must be "rel" or "abs"')
        groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
        self.min_lrs = [min_lr] * len(groups) if isinstance(min_lr, (int, float)) else list(min_lr)
        fine = len(self.min_lrs) == len(groups)
        _check(what, "min_lr", min_lr, fine, f"it must be a number, or one for each of {len(groups)} groups")
        self.mode, self.factor, self.patience, self.threshold = mode, factor, patience, threshold
        self.threshold_mode, self.cooldown, self.eps = threshold_mode, cooldown, eps
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = 0
        self.present = [1.0] * len(groups)
        super().__init__(optimizer)

    _kept = ("best", "num_bad_epochs", "cooldown_counter", "present")

    def step(self, metrics: float | Tensor | None = None) -> None:
        """Take note of a measured value, and lower the rates if it is time."""
        if metrics is None:
            raise ArgumentError(
                "ReduceLROnPlateau.step()",
                because="it follows a measured value",
                fix="pass it: scheduler.step(loss)",
            )
        value = float(metrics)
        if self._is_better(value):
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            self._lower()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._at(self.last_epoch + 1)

    def _is_better(self, value: float) -> bool:
        step = -self.threshold if self.mode == "min" else self.threshold
        limit = self.best * (1 + step) if self.threshold_mode == "rel" else self.best + step
        return value < limit if self.mode == "min" else value > limit

    def _lower(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            now = _rate(group)
            new = max(now * self.factor, self.min_lrs[index])
            if now - new > self.eps:
                self.present[index] *= new / now

    def _share(self, index: int, base: float) -> float:
        return self.present[index]


class _Several(LRScheduler):
    """A scheduler of schedulers, all of one optimiser."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[LRScheduler]) -> None:
        self.schedulers = list(schedulers)
        fine = all(isinstance(s, LRScheduler) and s.optimizer is optimizer for s in self.schedulers)
        limits = "it must be a list of schedulers of one optimiser"
        _check(type(self).__name__, "schedulers", schedulers, bool(self.schedulers) and fine, limits)
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "schedulers": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(state)
        states = own.pop("schedulers", [])
        limits = f"it needs the states of {len(self.schedulers)} schedulers"
        _check(
            f"{type(self).__name__}.load_state_dict",
            "state",
            state,
            len(states) == len(self.schedulers),
            limits,
        )
        for scheduler, part in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(part)
        super().load_state_dict(own)


class SequentialLR(_Several):
    """One scheduler after another: the next one begins, at its time 0, when `milestones` is reached.

    >>> from whit.nn.optim import SGD
    >>> optimizer = SGD([Tensor([1.0])], lr=1.0)
    >>> warm, fall = LinearLR(optimizer, 0.5, total_iters=2), ExponentialLR(optimizer, 0.5)
    >>> scheduler = SequentialLR(optimizer, [warm, fall], milestones=[2])
    >>> for _ in range(3):
    ...     scheduler.step()
    >>> scheduler.get_last_lr()
    [0.5]
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int]
    ) -> None:
        self.milestones = list(milestones)
        limits = "there must be one between any two schedulers, in order"
        fine = len(self.milestones) == len(schedulers) - 1 and self.milestones == sorted(self.milestones)
        _check("SequentialLR", "milestones", milestones, fine, limits)
        super().__init__(optimizer, schedulers)

    def _set(self) -> None:
        active = bisect_right(self.milestones, self.last_epoch)
        for scheduler in self.schedulers:
            scheduler._leave()
        start = self.milestones[active - 1] if active else 0
        self.schedulers[active]._at(self.last_epoch - start)


class ChainedScheduler(_Several):
    """Several schedulers at once: their shares are multiplied."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        given = list(schedulers)
        fine = bool(given) and isinstance(given[0], LRScheduler)
        _check("ChainedScheduler", "schedulers", schedulers, fine, "it must be a list of schedulers")
        super().__init__(given[0].optimizer, given)

    def step(self) -> None:
        """Let each of them move on by one."""
        self.last_epoch += 1
        for scheduler in self.schedulers:
            scheduler.step()

    def _set(self) -> None:
        """Each of them has set its own share."""


for _class in (*LRScheduler.__subclasses__(), *_Several.__subclasses__(), LRScheduler, MultiplicativeLR):
    guard(_class, [name for name in ("__init__", "step", "load_state_dict") if name in vars(_class)])

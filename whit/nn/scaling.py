"""Loss scaling: gradients of float16 networks are kept from vanishing by computing those of a multiple of the
loss (Micikevicius et al. 2018)."""

from __future__ import annotations

from typing import Any

from whit.helpers import ArgumentError
from whit.nn.clip import nonfinite
from whit.nn.optim import Optimizer
from whit.tensor import Tensor, hooks
from whit.tensor.guard import guard, show_argument
from whit.uop import dtypes


class GradScaler:
    """Multiplies losses by a scale that is as large as gradients allow: a step whose gradients are not finite
    is skipped, and the scale falls to `backoff_factor` of itself; after `growth_interval` steps in which all
    were finite it grows by `growth_factor`.

    All of it is lazy, and lies in tensors: captured (JIT) steps skip and adapt as plain ones. Errors:
    ArgumentError for factors outside of their limits, and for calls out of order.

    >>> from whit.nn.optim import SGD
    >>> weight = Tensor([1.0]).half()
    >>> optimizer, scaler = SGD([weight], lr=0.5), GradScaler(init_scale=1024.0)
    >>> _ = scaler.scale((weight * 2.0**-20).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.get_scale()
    1024.0
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        device: str | None = None,
    ) -> None:
        for name, value, fine, limits in (
            ("init_scale", init_scale, init_scale > 0, "it must be above 0"),
            ("growth_factor", growth_factor, growth_factor > 1, "it must be above 1"),
            ("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "it must be between 0 and 1"),
            ("growth_interval", growth_interval, growth_interval >= 1, "it must be from 1"),
        ):
            if not fine:
                raise ArgumentError(f"GradScaler({name}={value})", because=limits, fix="choose another")
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.enabled = growth_interval, enabled
        self.factor = Tensor([float(init_scale)], dtype=dtypes.float32, device=device)
        self.growth_tracker = Tensor([0], dtype=dtypes.int32, device=device)
        self._found: dict[int, Tensor] = {}  # by optimiser: whether a gradient is not finite
        self._stepped: set[int] = set()

    def is_enabled(self) -> bool:
        """Whether it does anything: if not, losses, gradients and steps are what they are without."""
        return self.enabled

    def get_scale(self) -> float:
        """The scale now."""
        return float(self.factor.item()) if self.enabled else 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """A loss, or what has gradients else, times the scale: in float32 if it is narrower."""
        if not isinstance(loss, Tensor) or not loss.dtype.is_float:
            raise ArgumentError(
                f"GradScaler.scale of {show_argument(loss)}",
                because="it takes a float tensor",
                fix="pass the loss",
            )
        if not self.enabled:
            return loss
        wide = loss.cast(dtypes.float32) if loss.dtype.itemsize < 4 else loss
        return wide * self.factor.detach().to(loss.device).reshape(()).cast(wide.dtype)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimiser's parameters by the scale, to clip them, for example. `step`
        does it if it has not been done. Narrow gradients become float32."""
        self._is_optimizer("unscale_", optimizer)
        if not self.enabled:
            return
        if id(optimizer) in self._found:
            raise ArgumentError(
                "GradScaler.unscale_",
                because="the gradients of this optimiser are unscaled already",
                fix="call it once between two updates",
            )
        grads = list({id(p.grad): p for p in optimizer.params if p.grad is not None}.values())
        inverse = self.factor.detach().reshape(()).reciprocal()
        self._found[id(optimizer)] = nonfinite([p.grad for p in grads if p.grad is not None])
        new: dict[int, Tensor] = {}
        for param in grads:
            grad = param.grad
            assert grad is not None
            wide = grad.detach().cast(dtypes.float32 if grad.dtype.itemsize < 4 else grad.dtype)
            new[id(grad)] = wide * inverse.to(grad.device).cast(wide.dtype)
        for param in optimizer.params:
            if param.grad is not None:
                param.grad = new.get(id(param.grad), param.grad)

    def step(self, optimizer: Optimizer) -> None:
        """A step of the optimiser, unless a gradient is inf or NaN: parameters and state stay then."""
        self._is_optimizer("step", optimizer)
        if not self.enabled:
            return optimizer.step()
        if id(optimizer) in self._stepped:
            raise ArgumentError(
                "GradScaler.step",
                because="this optimiser has made its step since the last update",
                fix="call update() once all optimisers have stepped",
            )
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        hooks.realize([*optimizer.schedule_step(self._found[id(optimizer)])])
        return None

    def update(self) -> None:
        """Adapt the scale by what the gradients were since the last update.

        Errors: ArgumentError if no optimiser has been unscaled or stepped.
        """
        if not self.enabled:
            return
        if not self._found:
            raise ArgumentError(
                "GradScaler.update()", because="no gradients were looked at", fix="call step(optimizer) first"
            )
        bad = Tensor(False, device=self.factor.device)
        for found in self._found.values():
            bad = bad | found.to(self.factor.device)
        count = self.growth_tracker + 1
        full = count.eq(self.growth_interval)
        good = full.where(self.factor * self.growth_factor, self.factor)
        self._found.clear()
        self._stepped.clear()
        hooks.realize([
            self.factor.assign(bad.where(self.factor * self.backoff_factor, good)),
            self.growth_tracker.assign((bad | full).where(0, count)),
        ])  # fmt: skip

    def _is_optimizer(self, what: str, optimizer: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"GradScaler.{what} of {show_argument(optimizer)}",
                because="it is no optimiser",
                fix="pass the optimiser",
            )


guard(GradScaler, ["__init__"])

"""Running averages of weights, which are often better than the weights themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from whit.helpers import ArgumentError
from whit.nn.clip import float_tensors
from whit.nn.layers import filled
from whit.tensor import Tensor, hooks
from whit.tensor.guard import guard
from whit.uop import dtypes


class EMA:
    """Exponential moving averages: average <- decay * average + (1 - decay) * parameter, after each step; the
    first update takes the parameters as they are.

    parameters: tensors. decay: from 0 to below 1. Averages of narrow floats are float32. Errors:
    ArgumentError for no parameters, what is no float tensor, and a decay outside.

    >>> weight = Tensor([1.0])
    >>> ema = EMA([weight], decay=0.75)
    >>> ema.update()
    >>> _ = weight.assign(Tensor([5.0])).realize()
    >>> ema.update()
    >>> with ema.applied():
    ...     weight.tolist()
    [2.0]
    >>> weight.tolist()
    [5.0]
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float = 0.999) -> None:
        given = float_tensors("EMA", parameters)
        if not given or not 0 <= decay < 1:
            raise ArgumentError(
                f"EMA of {len(given)} tensors with decay {decay}",
                because="a decay is from 0 to below 1" if given else "there is nothing to average",
                fix="use a decay such as 0.999" if given else "pass nn.state.get_parameters(model)",
            )
        self.decay = decay
        self.params = list({id(p): p for p in given}.values())
        wide = [dtypes.float32 if p.dtype.itemsize < 4 else p.dtype for p in self.params]
        self.averages = [filled(p.shape, 0, d, p.device) for p, d in zip(self.params, wide, strict=True)]
        self.updates = Tensor([0], dtype=dtypes.int32, device=self.params[0].device)

    def update(self) -> None:
        """Take in the parameters as they are now."""
        hooks.realize(self.schedule_update())

    def schedule_update(self) -> list[Tensor]:
        """Like `update`, but lazily: the tensors to realize."""
        changed = []
        is_first = self.updates.detach().reshape(()).eq(0)
        for param, average in zip(self.params, self.averages, strict=True):
            now, first = param.detach().cast(average.dtype), is_first.to(param.device)
            mixed = average * self.decay + now * (1 - self.decay)
            changed.append(average.assign(first.where(now, mixed)))
        return [*changed, self.updates.assign(self.updates + 1)]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside of the block the parameters have their averages as values; behind it, their own again."""
        own = [param.detach().clone() for param in self.params]
        hooks.realize(own)
        self._set(self.averages)
        try:
            yield
        finally:
            self._set(own)

    def _set(self, values: list[Tensor]) -> None:
        pairs = zip(self.params, values, strict=True)
        hooks.realize([param.assign(value.detach().cast(param.dtype)) for param, value in pairs])


guard(EMA, ["__init__"])

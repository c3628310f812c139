"""Random numbers: counter-based (threefry), so a value depends on seed, call and position only, never on the
order of realisation.

Every call takes the present key and the next counters at once and puts them into a tiny BUFFER (key, first
counter). The kernels read them from there, so that they do not depend on the values, and a captured function
can be replayed with new numbers: `key_buffers` tells which buffers hold keys, `next_key` gives what to write
into them.
"""

from __future__ import annotations

import math
import struct
import weakref
from _thread import allocate_lock  # `import threading` costs as much as the rest of this module
from typing import Any, Self, TypeAlias

from whit.helpers import SEED, ArgumentError, DTypeError, ShapeError, prod
from whit.tensor import storage
from whit.tensor.base import iota
from whit.tensor.creation import CreationMixin, checked_shape
from whit.tensor.movement import sizes
from whit.uop import DType, Ops, UOp, dtypes
from whit.uop.dtype import FLOAT_INFO, to_dtype

DTypeLike: TypeAlias = "DType | str | None"

key_buffers: weakref.WeakKeyDictionary[UOp, tuple[int, int]] = (
    weakref.WeakKeyDictionary()
)  # -> (key, counters used)


class _State:
    """The seed and how many counters of it are used up."""

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.key: int | None = None
        self.counter = 0

    def seed(self, seed: int) -> None:
        with self.lock:
            self.key, self.counter = seed & 0xFFFFFFFFFFFFFFFF, 0

    def take(self, count: int) -> tuple[int, int]:
        with self.lock:
            if self.key is None:
                self.key = SEED.value & 0xFFFFFFFFFFFFFFFF
            first, self.counter = self.counter, (self.counter + count) & 0xFFFFFFFFFFFFFFFF
            return self.key, first


_state = _State()


def next_key(count: int) -> tuple[int, int]:
    """(key, first counter) of `count` fresh counters."""
    return _state.take(count)


def key_bytes(key: int, first: int) -> bytes:
    """What a key buffer holds."""
    return struct.pack("QQ", key, first)


def threefry_words(count: int, device: str) -> UOp:
    """`count` random uint64 words as a graph over a new key buffer."""
    key, first = next_key(count)
    buffer = UOp.new_buffer(2, dtypes.uint64, device)
    storage.put(buffer, memoryview(key_bytes(key, first)))
    key_buffers[buffer] = (key, count)
    counters = iota(count, dtypes.int32 if count < 1 << 31 else dtypes.int64).cast(dtypes.uint64)
    secret = buffer.shrink(((0, 1),)).reshape(())
    return counters.alu(Ops.ADD, first_counter(buffer).reshape(())).alu(Ops.THREEFRY, secret)


def first_counter(buffer: UOp) -> UOp:
    """Where a key buffer says which counter a draw begins with."""
    return buffer.shrink(((1, 2),))


class RandomMixin(CreationMixin):
    """Methods of the random family."""

    @classmethod
    def manual_seed(cls, seed: int = 0) -> None:
        """Start the sequence of random numbers anew.

        >>> Tensor.manual_seed(7)
        >>> first = Tensor.rand(3).tolist()
        >>> Tensor.manual_seed(7)
        >>> first == Tensor.rand(3).tolist()
        True
        """
        _state.seed(seed)

    @classmethod
    def _words(cls, shape: tuple[Any, ...], device: str | None) -> Self:
        """Random uint64 of a known shape."""
        for size in shape:
            if isinstance(size, UOp):
                raise ShapeError(
                    "random numbers of a symbolic shape",
                    because="the counters must be known",
                    fix="draw the Variable's upper bound, then shrink",
                )
        return cls._wrap(threefry_words(prod(shape), storage.device_name(device)).reshape(shape))

    @classmethod
    def random_bits(cls, *shape: Any, device: str | None = None) -> Self:
        """Uniform uint32 words."""
        return cls._words(checked_shape(shape, "random_bits"), device).cast(dtypes.uint32)

    @classmethod
    def rand(
        cls,
        *shape: Any,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Uniform in [0, 1): every multiple of 2**-24 alike (2**-53 in float64, 2**-11 in float16, 2**-8 in
        bfloat16)."""
        want = to_dtype(dtype or dtypes.default_float)
        if not want.is_float:
            raise DTypeError(
                f"rand(dtype={want})",
                because="it gives numbers between 0 and 1",
                fix="use randint for integers",
            )
        result = cls._words(checked_shape(shape, "rand"), device)._unit(want)
        if requires_grad is not None:
            result.requires_grad = requires_grad
        return result

    def _unit(self, want: DType) -> Self:
        """uint64 words as floats in [0, 1)."""
        digits = FLOAT_INFO[want].mantissa + 1
        if want is dtypes.float64:
            return (self >> 11).cast(dtypes.int64).cast(want) * 2.0**-53
        whole = (self.cast(dtypes.uint32) >> (32 - digits)).cast(dtypes.int32)
        return (whole.cast(dtypes.float32) * 2.0**-digits).cast(want)

    @classmethod
    def randn(
        cls,
        *shape: Any,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Standard normal numbers (Box and Muller): two uniforms out of one 64-bit word each."""
        want = to_dtype(dtype or dtypes.default_float)
        if not want.is_float:
            raise DTypeError(
                f"randn(dtype={want})", because="normal numbers are no integers", fix="use a float dtype"
            )
        result = cls._words(checked_shape(shape, "randn"), device)._gauss().cast(want)
        if requires_grad is not None:
            result.requires_grad = requires_grad
        return result

    def _gauss(self) -> Self:
        low = (self.cast(dtypes.uint32) >> 8).cast(dtypes.int32).cast(dtypes.float32)
        high = (self >> 40).cast(dtypes.int32).cast(dtypes.float32)
        radius = (
            ((low + 1) * 2.0**-24).log()._scaled(-2.0).sqrt()
        )  # low + 1 is at least 1: the logarithm is finite
        return radius * (high * (2 * math.pi * 2.0**-24)).sin()

    def _scaled(self, factor: float) -> Self:
        return self * factor

    @classmethod
    def randint(
        cls, *shape: Any, low: int = 0, high: int = 10, dtype: DTypeLike = None, device: str | None = None
    ) -> Self:
        """Uniform integers low <= x < high."""
        want = to_dtype(dtype or dtypes.default_int)
        if not (isinstance(low, int) and isinstance(high, int)) or low >= high:
            raise ArgumentError(
                f"randint(low={low}, high={high})",
                because="it takes integers with low < high",
                fix="choose a range that holds a number",
            )
        if not want.is_int or not (want.min <= low and high - 1 <= want.max):
            raise DTypeError(
                f"randint(low={low}, high={high}, dtype={want})",
                because="the dtype does not hold these numbers",
                fix="choose a wider integer dtype",
            )
        words, span = cls._words(checked_shape(shape, "randint"), device), high - low
        if span <= 1 << 32:  # the high half of a 32 by 32 bit product
            scaled = ((words & 0xFFFFFFFF) * span) >> 32
        else:
            scaled = words if span == 1 << 64 else words % span
        wide = dtypes.int64 if want is not dtypes.uint64 else want
        return (scaled.cast(wide) + cls._wrap(UOp.const(low, wide))).cast(want)

    def rand_like(
        self, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool | None = None
    ) -> Self:
        """Uniform numbers in this shape, dtype and device."""
        return self.rand(
            *self.shape, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad
        )

    def randn_like(
        self, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool | None = None
    ) -> Self:
        """Normal numbers in this shape, dtype and device."""
        return self.randn(
            *self.shape, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad
        )

    @classmethod
    def uniform(
        cls,
        *shape: Any,
        low: float = 0.0,
        high: float = 1.0,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Uniform in [low, high)."""
        want = to_dtype(dtype or dtypes.default_float)
        draw = cls.rand(*shape, dtype=want if want.is_float else dtypes.default_float, device=device)
        return cls._flagged((draw * (high - low) + low).cast(want), requires_grad)

    @classmethod
    def normal(
        cls,
        *shape: Any,
        mean: float = 0.0,
        std: float = 1.0,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Normal with this mean and standard deviation."""
        return cls._flagged(cls.randn(*shape, dtype=dtype, device=device) * std + mean, requires_grad)

    @classmethod
    def _flagged(cls, result: Self, requires_grad: bool | None) -> Self:
        if requires_grad is not None:
            result.requires_grad = requires_grad
        return result

    @classmethod
    def scaled_uniform(
        cls,
        *shape: Any,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Uniform in ±1/sqrt(number of elements)."""
        bound = 1 / math.sqrt(max(1, prod(checked_shape(shape, "scaled_uniform"))))
        return cls.uniform(
            *shape, low=-bound, high=bound, dtype=dtype, device=device, requires_grad=requires_grad
        )

    @classmethod
    def glorot_uniform(
        cls,
        *shape: Any,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Uniform in ±sqrt(6 / (fan in + fan out)), for weights (out, in, …) (Glorot and Bengio 2010, eq.
        16)."""
        known = _weight_shape(shape, "glorot_uniform")
        bound = math.sqrt(6 / max(1, known[0] + prod(known[1:])))
        return cls.uniform(
            *known, low=-bound, high=bound, dtype=dtype, device=device, requires_grad=requires_grad
        )

    @classmethod
    def kaiming_uniform(
        cls,
        *shape: Any,
        a: float = 0.01,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Uniform in ±sqrt(6 / ((1 + a**2) fan in)) for weights (out, in, …) (He et al. 2015); a: slope below
        zero."""
        known = _weight_shape(shape, "kaiming_uniform")
        bound = math.sqrt(6 / ((1 + a * a) * max(1, prod(known[1:]))))
        return cls.uniform(
            *known, low=-bound, high=bound, dtype=dtype, device=device, requires_grad=requires_grad
        )

    @classmethod
    def kaiming_normal(
        cls,
        *shape: Any,
        a: float = 0.01,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Normal with standard deviation sqrt(2 / ((1 + a**2) fan in)) for weights (out, in, …)."""
        known = _weight_shape(shape, "kaiming_normal")
        std = math.sqrt(2 / ((1 + a * a) * max(1, prod(known[1:]))))
        return cls.normal(*known, std=std, dtype=dtype, device=device, requires_grad=requires_grad)

    @classmethod
    def randperm(cls, n: int, dtype: DTypeLike = None, device: str | None = None) -> Self:
        """0 … n-1 in random order."""
        order = cls.random_bits(*checked_shape((n,), "randperm"), device=device).argsort()
        return order.cast(to_dtype(dtype or dtypes.default_int))

    def multinomial(self, num_samples: int = 1, replacement: bool = False) -> Self:
        """Indices drawn with the probabilities (or weights) of each row, int32 of shape (…, num_samples).
        Without replacement the indices of a row differ."""
        if not 1 <= self.ndim <= 2 or num_samples < 1 or self.shape[-1] == 0:
            raise ArgumentError(
                f"multinomial of {num_samples} from shape {self.shape}",
                because="it takes a vector or rows of weights and at least one sample",
                fix="reshape the weights",
            )
        if not replacement and num_samples > self.shape[-1]:
            raise ArgumentError(
                f"multinomial of {num_samples} from {self.shape[-1]} weights",
                because="without replacement there are not enough",
                fix="pass replacement=True",
            )
        weights = self._float().cast(dtypes.float32)
        lead = self.shape[:-1]
        if replacement or num_samples == 1:
            running = weights.cumsum(-1)
            draw = self.rand(*lead, num_samples, device=self.device) * running._part(
                self.ndim - 1, self.shape[-1] - 1, self.shape[-1]
            )
            # the first index whose running sum exceeds the draw
            return (running.unsqueeze(-2) <= draw.unsqueeze(-1)).sum(-1).minimum(self.shape[-1] - 1)
        # exponential clocks: the order of the least arrivals is a draw without replacement
        clock = -(1 - self.rand(*self.shape, device=self.device)).log() / weights
        return clock.argsort(-1)._part(self.ndim - 1, 0, num_samples)


def _weight_shape(shape: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    known = checked_shape(sizes(shape), what)
    if not known:
        raise ShapeError(f"{what}()", because="a weight has at least one axis", fix="pass (out, in, …)")
    return known

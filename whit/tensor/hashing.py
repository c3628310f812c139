"""Hashes of bytes: Keccak's permutation and sponge (FIPS 202), and a tree of them for long data."""

from __future__ import annotations

import functools
from typing import Any, Self

from whit.helpers import ArgumentError, DTypeError, ShapeError, prod
from whit.tensor.statistics import StatisticsMixin
from whit.uop import Ops, UOp, dtypes
from whit.uop.uop import show_shape

# name -> (bytes that a block takes in, the byte that ends a message, bytes of the result)
_KINDS = {
    "sha3_224": (144, 0x06, 28),
    "sha3_256": (136, 0x06, 32),
    "sha3_384": (104, 0x06, 48),
    "sha3_512": (72, 0x06, 64),
    "shake_128": (168, 0x1F, 16),
    "shake_256": (136, 0x1F, 32),
}
_LEAF = 4096  # bytes of one leaf of `hash`'s tree


class HashMixin(StatisticsMixin):
    """Methods of the family of hashes."""

    def threefry(self, seed: Any) -> Self:
        """Random bits of a counter (this tensor, uint64) under a key (`seed`, uint64): Threefry 2x32 with
        twenty rounds, as JAX's. Shapes broadcast.

        >>> Tensor([0], dtype="uint64").threefry(Tensor([0], dtype="uint64")).dtype
        dtypes.uint64
        """
        counter, key = self.uop, self._of(seed).uop
        for node in (counter, key):
            if not node.dtype.is_int:
                raise DTypeError(
                    f"threefry of a {node.dtype} tensor", because="it takes integers", fix="cast to uint64"
                )
        return self._apply(
            Ops.THREEFRY, "threefry", counter.cast(dtypes.uint64), key.cast(dtypes.uint64)
        )

    def keccak(self, cfg: str = "sha3_256") -> Self:
        """The hash of the bytes along the last axis. cfg: sha3_224, sha3_256, sha3_384, sha3_512, shake_128
        (16 bytes) or shake_256 (32 bytes).

        Shapes: (…, n) -> (…, bytes of the hash). Dtype: uint8, also of the result. Errors: DTypeError for
        other dtypes, ArgumentError for another name, ShapeError for a scalar.

        >>> bytes(Tensor(b"abc").keccak().data()).hex()[:16]
        '3a985da74fe225b2'
        """
        if cfg not in _KINDS:
            raise ArgumentError(
                f"keccak({cfg!r})", because="there is no such hash", fix="use one of " + ", ".join(_KINDS)
            )
        if self.dtype is not dtypes.uint8:
            raise DTypeError(
                f"keccak of a {self.dtype} tensor", because="bytes are hashed", fix='use bitcast("uint8")'
            )
        if not self.ndim:
            raise ShapeError(
                f"keccak of shape {show_shape(self.shape)}",
                because="the bytes lie along the last axis",
                fix="reshape it to (1,)",
            )
        rate, end, length = _KINDS[cfg]
        *lead, n = self.shape
        rows, blocks = prod(lead), n // rate + 1
        # the message, its end byte, zeros, and the highest bit of the last byte
        x = self.reshape(rows, n).pad(((0, 0), (0, blocks * rate - n)))
        place = self._wrap(UOp(Ops.IOTA, dtypes.int32, (), blocks * rate))
        ending = place.eq(n).where(end, 0) | place.eq(blocks * rate - 1).where(0x80, 0)
        x = (x | ending.cast(dtypes.uint8)).contiguous()
        words = x.bitcast(dtypes.uint64).reshape(rows, blocks, rate // 8).contiguous()
        state = words._wrap(UOp.const(0, dtypes.uint64)).reshape(1, 1).expand(rows, 25)
        for block in range(blocks):
            taken = words[:, block].pad(((0, 0), (0, 25 - rate // 8)))
            state = (state ^ taken)._permutation()
        result: Self = state.contiguous().bitcast(dtypes.uint8)[:, :length]
        return result.reshape(*lead, length)

    def _permutation(self) -> Self:
        """Keccak-f[1600] of rows of 25 words; word x + 5 y is lane (x, y). Each round is a few kernels, the
        same for all rounds."""
        turns, sources, constants = _tables(self.device)
        state = self
        for k in range(24):
            lanes = state.reshape(-1, 5, 5)  # (row, y, x)
            column = lanes[:, 0] ^ lanes[:, 1] ^ lanes[:, 2] ^ lanes[:, 3] ^ lanes[:, 4]
            left, right = column.roll(1, 1), column.roll(-1, 1)
            mixed = lanes ^ (left ^ ((right << 1) | (right >> 63))).reshape(-1, 1, 5)
            flat = mixed.reshape(-1, 25)
            turned = ((flat << turns) | (flat >> ((64 - turns) & 63))).contiguous()
            moved = turned._wrap(UOp(Ops.TAKE, dtypes.uint64, (turned.uop, sources.uop), 1))
            b = moved.reshape(-1, 5, 5)
            state = (b ^ (~b.roll(-1, 2) & b.roll(-2, 2))).reshape(-1, 25)
            state = (state ^ constants[k]).contiguous().realize()
        return state

    def hash(self) -> Self:
        """Sixteen bytes that tell data apart: shake_128 of leaves of 4,096 bytes (the last one padded with
        zeros), of what these give together, and so on; the last level also takes the number of bytes.

        Shapes: any -> (16,). Any dtype with whole bytes. Equal on all devices.

        >>> Tensor(b"Hello World!").hash().shape
        (16,)
        """
        x = self.contiguous().reshape(-1)
        x = x.cast(dtypes.uint8) if x.dtype.is_bool else x.bitcast(dtypes.uint8)
        count = int(prod(x.shape))
        while x.shape[0] > _LEAF:
            n = x.shape[0]
            x = x.pad(((0, -n % _LEAF),)).reshape(-1, _LEAF).keccak("shake_128").reshape(-1)
        size = self._of(count.to_bytes(8, "little"))
        length = size.to(self.device)  # type: ignore[attr-defined]  # Tensor's
        return x.cat(length).keccak("shake_128")


@functools.lru_cache(maxsize=8)
def _tables(device: str) -> tuple[Any, Any, Any]:
    """The rotations by lane, where each lane of the result comes from, and the constants of the rounds, in
    memory of a device (FIPS 202, 3.2)."""
    from whit.tensor.tensor import Tensor

    turns, sources = [0] * 25, [0] * 25
    x, y = 1, 0
    for t in range(24):
        turns[x + 5 * y] = (t + 1) * (t + 2) // 2 % 64
        x, y = y, (2 * x + 3 * y) % 5
    for x in range(5):
        for y in range(5):
            sources[y + 5 * ((2 * x + 3 * y) % 5)] = x + 5 * y
    constants: list[list[int]] = []
    register = 1
    for _ in range(24):
        constant = 0
        for j in range(7):
            if register & 1:
                constant |= 1 << (2**j - 1)
            register = register << 1 ^ (0x171 if register & 0x80 else 0)
        constants.append([constant] + [0] * 24)  # lane (0, 0) alone takes it
    return (
        Tensor(turns, device, dtypes.uint64).realize(),
        Tensor(sources, device, dtypes.int32).realize(),
        Tensor(constants, device, dtypes.uint64).realize(),
    )

"""`import whit.array_api.einops_backend` lets the functions of einops itself take tensors.

`einops.array_api` takes them without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from einops._backends import AbstractBackend  # where einops looks for frameworks

from whit.array_api.manipulation import tile
from whit.tensor import Tensor


class WhitBackend(AbstractBackend):
    """What einops asks of a framework."""

    framework_name = "whit"

    def is_appropriate_type(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor)

    def from_numpy(self, x: Any) -> Tensor:
        return Tensor(x)

    def to_numpy(self, x: Tensor) -> Any:
        return x.numpy()

    def arange(self, start: int, stop: int) -> Tensor:
        return Tensor.arange(start, stop)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape(tuple(shape))

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.permute(tuple(axes))

    def reduce(self, x: Tensor, operation: str, reduced_axes: Sequence[int]) -> Tensor:
        result: Tensor = getattr(x, operation)(tuple(reduced_axes))
        return result

    def stack_on_zeroth_dimension(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0].stack(*tensors[1:])

    def add_axis(self, x: Tensor, new_position: int) -> Tensor:
        return x.unsqueeze(new_position)

    def tile(self, x: Tensor, repeats: Sequence[int]) -> Tensor:
        return tile(x, tuple(repeats))

    def concat(self, tensors: list[Tensor], axis: int) -> Tensor:
        return tensors[0].cat(*tensors[1:], dim=axis)

    def is_float_type(self, x: Tensor) -> bool:
        return x.dtype.is_float

    def einsum(self, pattern: str, *x: Tensor) -> Tensor:
        return Tensor.einsum(pattern, *x)

"""Memory of tensors as other libraries see it."""

from __future__ import annotations

from typing import Any

from whit.engine.realize import before_read, buffer_of, realize, refuse_stand_in, turn, value_of
from whit.helpers import prod
from whit.runtime.device import Buffer, Device
from whit.schedule.movement import contiguous_view, memory_of
from whit.tensor import Tensor


class Shared:
    """Bytes of a Buffer, for whoever speaks NumPy's array interface; they live as long as this does."""

    def __init__(self, address: int, nbytes: int, owner: Buffer) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def share(tensor: Tensor) -> Any:
    """The elements of a tensor where they lie, row-major: something that NumPy makes an array of bytes of,
    which sees later writes and may write. None if the device's memory cannot be seen from here.

    The tensor is computed if it is not yet."""
    with turn.lock:
        for see in before_read:
            see(tensor)
        refuse_stand_in(tensor.uop)
        if tensor.uop.device is None:  # a constant gets memory
            tensor.uop = tensor.uop.copy_to(tensor.device)
        if not Device.get(tensor.device).host_visible:
            return None
        realize([tensor])
        view = contiguous_view(tensor.uop)
        assert view is not None, "a realized tensor is a view of memory"
        base, offset = view
        itemsize = tensor.dtype.itemsize
        nbytes = value_of(prod(tensor.shape)) * itemsize
        whole = buffer_of(memory_of(base)).view(value_of(offset) * itemsize, nbytes)
        return Shared(whole.handle, nbytes, whole)

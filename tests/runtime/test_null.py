"""NULL takes any program and does nothing."""
from __future__ import annotations

import numpy as np

from tests.runtime.linear_kernels import buffer, program
from tests.runtime.test_python import copy
from whit.runtime.device import Device


def test_nothing_is_allocated_and_nothing_runs() -> None:
    device = Device.get("NULL")
    handle = device.allocate(1 << 50)
    assert device.offset(handle, 1 << 40) == handle + (1 << 40)
    data = np.full(4, 7, np.float32)
    memory = buffer("NULL", data)
    run = program("NULL", copy(lambda k, i: i).linear())
    assert run([memory.handle, memory.handle], [], wait=True) == 0.0
    assert run([memory.handle, memory.handle], []) is None
    assert bytes(memory.copyout()) == bytes(16)
    assert device.target.vector_bytes and device.target.threads > 1

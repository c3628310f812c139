"""NULL takes any program and does nothing."""
from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.linear_kernels import buffer, program
from tests.runtime.test_python import copy
from whit.codegen.target import Target
from whit.helpers import DeviceError
from whit.runtime.device import Device
from whit.runtime.null import NullDevice


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


def test_the_code_of_another_device_is_compiled_but_not_run() -> None:
    device = Device.get("NULL:CPU")
    linear = copy(lambda k, i: i).linear()
    assert device.target is Device.get("CPU").target
    assert device.render(linear, "copy") == Device.get("CPU").render(linear, "copy")
    assert len(device.compile(device.render(linear, "copy"), "copy")) > 100
    assert program("NULL:CPU", linear)([0, 0], [], wait=True) == 0.0


def test_the_target_can_be_given() -> None:
    assert NullDevice("NULL", Target("huge", "null", vector_bytes=256)).target.vector_bytes == 256


def test_unknown_models_are_refused() -> None:
    with pytest.raises(DeviceError, match="no such device"):
        Device.get("NULL:NOTHING")

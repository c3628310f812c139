"""DISK: files as buffers, and what happens when they are missing, short, or may not be written."""
from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.linear_kernels import buffer, program
from tests.runtime.test_python import copy
from whit.helpers import DeviceError
from whit.runtime.device import Buffer, Device
from whit.runtime.disk import DiskDevice


def open_disk(path: Path) -> DiskDevice:
    return DiskDevice(f"DISK:{path}")


def test_round_trip_and_views(tmp_path: Path) -> None:
    name = f"DISK:{tmp_path / 'data.bin'}"
    data = np.arange(100, dtype=np.float32)
    memory = buffer(name, data)
    Device.get(name).synchronize()
    assert (tmp_path / "data.bin").read_bytes() == data.tobytes()
    window = memory.view(40, 20)
    assert np.frombuffer(window.copyout(), np.float32).tolist() == [10, 11, 12, 13, 14]
    window.copyin(memoryview(np.full(5, -1, np.float32)).cast("B"))
    assert np.frombuffer(memory.copyout(), np.float32)[8:17].tolist() == [8, 9, -1, -1, -1, -1, -1, 15, 16]
    Device.opened.pop(name)


def test_an_existing_file_is_mapped_and_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    path.write_bytes(b"abcdefgh")
    device = open_disk(path)
    assert device.size == 8
    handle = device.open_existing(8)
    out = bytearray(3)
    device.copyout(memoryview(out), device.offset(handle, 2))
    assert bytes(out) == b"cde"
    longer = device.allocate(16)
    device.copyin(device.offset(longer, 8), memoryview(b"ijklmnop"))
    device.synchronize()
    assert path.read_bytes() == b"abcdefghijklmnop"


def test_files_that_may_not_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fixed.bin"
    path.write_bytes(b"12345678")
    deny_writing(monkeypatch, errno.EACCES)
    device = open_disk(path)
    assert not device.is_writable and bytes(device.allocate(8)) == b"12345678"
    with pytest.raises(DeviceError, match=r"cannot be written.*To fix: change its permissions"):
        device.copyin(device.allocate(8), memoryview(b"xxxxxxxx"))
    with pytest.raises(DeviceError, match=r"the file has 8.*truncated"):
        device.allocate(9)
    assert path.read_bytes() == b"12345678"


def deny_writing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Tests may run as root, whom permissions do not stop."""
    real = os.open

    def opened(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *rest)
    monkeypatch.setattr(os, "open", opened)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"open .*gone.bin: there is no such file.*To fix: "):
        open_disk(tmp_path / "gone.bin").open_existing(1)
    assert not (tmp_path / "gone.bin").exists()
    with pytest.raises(DeviceError, match=r"No such file or directory.*create its folder"):
        open_disk(tmp_path / "no" / "folder.bin").allocate(4)
    with pytest.raises(DeviceError, match=r"Is a directory.*name a file"):
        open_disk(tmp_path)
    with pytest.raises(DeviceError, match="it names no file"):
        DiskDevice("DISK:")


def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(10))
    with pytest.raises(DeviceError, match=r"20 bytes of it: the file has only 10.*truncated"):
        open_disk(path).open_existing(20)


def test_a_file_that_is_cut_while_mapped_does_not_kill_the_process(tmp_path: Path) -> None:
    code = f"""
import os
from whit.runtime.disk import DiskDevice
from whit.helpers import DeviceError
path = {str(tmp_path / 'cut.bin')!r}
open(path, "wb").write(bytes(100_000))
device = DiskDevice("DISK:" + path)
handle = device.allocate(100_000)
os.truncate(path, 10)
try:
    device.copyout(memoryview(bytearray(100_000)), handle)
except DeviceError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "the file has 10 bytes" in result.stdout, result


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeviceError, match=r"No space left.*free space"):
        open_disk(tmp_path / "big.bin").allocate(1000)


def test_kernels_do_not_run_on_files(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"kernel kernel on DISK:.*computes nothing.*To fix: copy first"):
        program(f"DISK:{tmp_path / 'x.bin'}", copy(lambda k, i: i).linear())


def test_buffers_on_the_same_file_see_each_other(tmp_path: Path) -> None:
    name = f"DISK:{tmp_path / 'shared.bin'}"
    one, two = Buffer(name, 4), Buffer(name, 4)
    one.copyin(memoryview(b"wxyz"))
    assert bytes(two.copyout()) == b"wxyz"
    Device.opened.pop(name)

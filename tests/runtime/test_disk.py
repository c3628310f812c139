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
from whit import Tensor, dtypes
from whit.helpers import DeviceError
from whit.runtime.device import Buffer, Device
from whit.runtime.disk import DiskDevice


def open_disk(path: Path) -> DiskDevice:
    return DiskDevice(f"DISK:{path}")


def test_round_trip_and_views(tmp_path: Path) -> None:
    name = f"DISK:{tmp_path / 'data.bin'}"
    data = np.arange(100, dtype=np.float32)
    memory = buffer(name, data)
    assert (tmp_path / "data.bin").read_bytes() == data.tobytes()
    window = memory.view(40, 20)
    assert np.frombuffer(window.copyout(), np.float32).tolist() == [10, 11, 12, 13, 14]
    window.copyin(memoryview(np.full(5, -1, np.float32)).cast("B"))
    assert np.frombuffer(memory.copyout(), np.float32)[8:17].tolist() == [8, 9, -1, -1, -1, -1, -1, 15, 16]
    Device.opened.pop(name)


def test_an_existing_file_is_read_where_asked_and_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    path.write_bytes(b"abcdefgh")
    device = open_disk(path)
    out = bytearray(3)
    device.copyout(memoryview(out), device.offset(device.allocate(3), 2))
    assert bytes(out) == b"cde" and bytes(device.view(6, 2)) == b"gh"
    device.copyin(8, memoryview(b"ijklmnop"))
    assert path.read_bytes() == b"abcdefghijklmnop" and bytes(device.view(4, 8)) == b"efghijkl"


def test_views_are_not_copies_and_may_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "view.bin"
    path.write_bytes(bytes(1 << 20))
    device = open_disk(path)
    view = device.view(100, 1000)
    device.copyin(150, memoryview(b"xyz"))
    assert bytes(view[50:53]) == b"xyz" and view.readonly


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"old!")
    device = open_disk(path)
    before = device.view(0, 4)
    (tmp_path / "new.bin").write_bytes(b"new!")
    os.replace(tmp_path / "new.bin", path)
    assert bytes(device.view(0, 4)) == b"new!" and bytes(before) == b"old!"


def test_files_that_may_not_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fixed.bin"
    path.write_bytes(b"12345678")
    deny_writing(monkeypatch, errno.EACCES)
    device = open_disk(path)
    assert bytes(device.view(0, 8)) == b"12345678"
    with pytest.raises(DeviceError,
                       match=r"write 8 bytes at 0: Permission denied.*To fix: change its permissions"):
        device.copyin(0, memoryview(b"xxxxxxxx"))
    assert path.read_bytes() == b"12345678"


def deny_writing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Tests may run as root, whom permissions do not stop."""
    def opened(path: Any, flags: int, *rest: Any) -> int:
        assert flags & os.O_WRONLY
        raise OSError(code, os.strerror(code), path)
    monkeypatch.setattr(os, "open", opened)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"gone.bin: read 1 bytes at 0: No such file.*To fix: create it"):
        open_disk(tmp_path / "gone.bin").view(0, 1)
    assert not (tmp_path / "gone.bin").exists()
    with pytest.raises(DeviceError, match=r"No such file or directory.*To fix: create it or its folder"):
        open_disk(tmp_path / "no" / "folder.bin").copyin(0, memoryview(b"1234"))
    with pytest.raises(DeviceError, match=r"Is a directory.*name a file"):
        open_disk(tmp_path).copyin(0, memoryview(b"1234"))
    with pytest.raises(DeviceError, match="it names no file"):
        DiskDevice("DISK:")


def test_truncated_files_are_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(10))
    memory = Buffer(f"DISK:{path}", 20)
    with pytest.raises(DeviceError, match=r"read 20 bytes at 0: the file has only 10 bytes.*truncated"):
        memory.copyout()
    assert path.read_bytes() == bytes(10)
    empty = tmp_path / "empty.bin"
    empty.write_bytes(b"")
    assert bytes(open_disk(empty).view(0, 0)) == b""


def test_a_file_that_is_cut_while_mapped_does_not_kill_the_process(tmp_path: Path) -> None:
    code = f"""
import os
from whit.runtime.disk import DiskDevice
from whit import Tensor, dtypes
from whit.helpers import DeviceError
path = {str(tmp_path / 'cut.bin')!r}
open(path, "wb").write(bytes(100_000))
device = DiskDevice("DISK:" + path)
out = bytearray(100_000)
device.copyout(memoryview(out), 0)
os.truncate(path, 10)
try:
    device.copyout(memoryview(out), 0)
except DeviceError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "the file has only 10 bytes" in result.stdout, result


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DeviceError, match=r"No space left.*free space"):
        open_disk(tmp_path / "big.bin").copyin(0, memoryview(bytes(1000)))


def test_writes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pwrite may write less than asked (Linux: at most 2 GiB at once)."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: real(descriptor, data[:7], at))
    open_disk(tmp_path / "x.bin").copyin(3, memoryview(bytes(range(50))))
    assert (tmp_path / "x.bin").read_bytes() == bytes(3) + bytes(range(50))


def test_tensors_on_disk(tmp_path: Path) -> None:
    name = f"DISK:{tmp_path / 'tensor.bin'}"
    np.arange(12, dtype=np.float32).tofile(tmp_path / "tensor.bin")
    stored = Tensor.empty(3, 4, dtype=dtypes.float32, device=name)
    assert stored[1].to("CPU").tolist() == [4, 5, 6, 7]
    assert (stored.to("CPU") + 1).sum().item() == 78
    with pytest.raises(DeviceError, match=r"ADD on DISK:.*computes nothing.*To fix: copy first"):
        (stored + 1).tolist()
    (Tensor.arange(5).float() * 2).to(f"DISK:{tmp_path / 'out.bin'}").realize()
    assert np.fromfile(tmp_path / "out.bin", np.float32).tolist() == [0, 2, 4, 6, 8]


def test_kernels_do_not_run_on_files(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"kernel kernel on DISK:.*computes nothing.*To fix: copy first"):
        program(f"DISK:{tmp_path / 'x.bin'}", copy(lambda k, i: i).linear())


def test_buffers_on_the_same_file_see_each_other(tmp_path: Path) -> None:
    name = f"DISK:{tmp_path / 'shared.bin'}"
    one, two = Buffer(name, 4), Buffer(name, 4)
    one.copyin(memoryview(b"wxyz"))
    assert bytes(two.copyout()) == b"wxyz"
    Device.opened.pop(name)

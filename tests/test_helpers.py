"""Settings, errors, the disk cache, atomic writes, and that every example in a docstring runs."""
from __future__ import annotations

import doctest
import importlib
import os
import pickle
import pkgutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import whit.codegen
import whit.uop
from whit import helpers
from whit.helpers import (
    Context,
    ContextVar,
    IRError,
    SettingError,
    ShapeError,
    WhitError,
    argsort,
    cache_get,
    cache_put,
    ceildiv,
    chunked,
    cpu_quota,
    cpu_threads,
    dedup,
    human_bytes,
    is_power_of_two,
    prod,
    round_up,
    strides_of,
    write_atomic,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(helpers.CACHE_DIR, "value", str(tmp_path / "cache"))
    monkeypatch.setattr(helpers, "_cache_broken", False)
    monkeypatch.setattr(helpers.CACHE, "value", 1)
    return tmp_path / "cache"


# ---- settings ----------------------------------------------------------------------------------------------


def test_a_context_changes_and_restores() -> None:
    before = helpers.DEBUG.value
    with Context(DEBUG=3, BEAM=2):
        assert helpers.DEBUG.value == 3 and helpers.BEAM.value == 2
        with Context(DEBUG=0):
            assert not helpers.DEBUG
        assert helpers.DEBUG.value == 3
    assert helpers.DEBUG.value == before
    with pytest.raises(RuntimeError), Context(DEBUG=5):
        raise RuntimeError
    assert helpers.DEBUG.value == before


def test_a_context_decorates_and_nests_in_itself() -> None:
    block = Context(NOOPT=1)
    with block, block:
        assert helpers.NOOPT.value == 1
    assert helpers.NOOPT.value == 0

    @Context(NOOPT=1)
    def inside() -> int:
        return helpers.NOOPT.value
    assert inside() == 1 and helpers.NOOPT.value == 0


@pytest.mark.parametrize("settings, says", [
    ({"DEBUGG": 1}, "no such setting"), ({"DEBUG": "high"}, "takes a whole number"),
                                            ({"DEV": 3}, "takes text")])
def test_wrong_settings_are_refused(settings: dict[str, int | str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Context(**settings)


def test_the_environment_sets_defaults() -> None:
    code = "from whit.helpers import DEBUG, DEV; print(DEBUG.value, DEV.value)"
    run = [sys.executable, "-c", code]
    env = {**os.environ, "DEBUG": "2", "DEV": "NULL"}
    assert subprocess.run(run, env=env, capture_output=True, text=True).stdout == "2 NULL\n"
    failed = subprocess.run(run, env={**env, "DEBUG": "loud"}, capture_output=True, text=True)
    assert "DEBUG='loud': this setting takes a whole number" in failed.stderr


def test_every_setting_has_a_help_line() -> None:
    assert all(var.help and var.name == name for name, var in ContextVar.registry.items())


# ---- errors ------------------------------------------------------------------------------------------------


def test_errors_have_three_parts_and_cross_processes() -> None:
    error = ShapeError("reshape (2, 3) to (4,)", because="6 elements into 4", fix="use (6,)")
    assert str(error) == "reshape (2, 3) to (4,): 6 elements into 4. To fix: use (6,)"
    assert isinstance(error, ValueError) and isinstance(error, WhitError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ShapeError and str(again) == str(error) and again.fix == "use (6,)"
    assert str(IRError("x")) == "x"


# ---- disk cache --------------------------------------------------------------------------------------------


def test_the_cache_keeps_bytes(own_cache: Path) -> None:
    assert cache_get("t", "k") is None
    for body in (b"", b"x", os.urandom(100_000)):
        cache_put("t", "k", body)
        assert cache_get("t", "k") == body
    with Context(CACHE=0):
        assert cache_get("t", "k") is None
        cache_put("t", "other", b"x")
    assert cache_get("t", "other") is None
    assert [p.name for p in (own_cache / "t").iterdir()] == ["k"]  # nothing temporary stays


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[1:], lambda b: b"", lambda b: b[:5],
                                    lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b + b"x"])
def test_a_damaged_entry_counts_as_absent(own_cache: Path, damage: object) -> None:
    cache_put("t", "k", b"some bytes")
    file = own_cache / "t" / "k"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    assert cache_get("t", "k") is None


def test_a_folder_that_cannot_be_written_warns_once(own_cache: Path) -> None:
    own_cache.write_text("a file stands where the folder should be")
    with pytest.warns(UserWarning, match="cannot write"):
        cache_put("t", "k", b"x")
    cache_put("t", "k", b"x")  # no second warning: it would be an error here
    assert cache_get("t", "k") is None


def test_two_writers_leave_one_whole_entry(own_cache: Path) -> None:
    bodies = [bytes([n]) * 50_000 for n in range(4)]

    def work(body: bytes) -> None:
        for _ in range(20):
            cache_put("t", "k", body)
            assert cache_get("t", "k") in bodies
    threads = [threading.Thread(target=work, args=(body,)) for body in bodies]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert cache_get("t", "k") in bodies


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    write_atomic(file, b"old")

    def fails(*_: object) -> None:
        raise OSError("disk full")
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir() if p.is_file()] == ["f"]


# ---- small helpers -----------------------------------------------------------------------------------------


def test_small_helpers() -> None:
    assert prod([]) == 1 and prod([2, 3, 4]) == 24
    assert dedup([3, 1, 3, 2, 1]) == [3, 1, 2]
    assert [ceildiv(a, b) for a, b in ((0, 3), (1, 3), (3, 3), (4, 3), (-4, 3))] == [0, 1, 1, 2, -1]
    assert round_up(5, 4) == 8 and round_up(8, 4) == 8
    assert argsort((2, 0, 1)) == (1, 2, 0)
    assert strides_of(()) == () and strides_of((2, 3, 4)) == (12, 4, 1)
    assert human_bytes(0) == "0.00 B" and human_bytes(3 << 30) == "3.00 GB" \
        and human_bytes(5000 << 30) == "5000.00 GB"
    assert [n for n in range(-2, 70) if is_power_of_two(n)] == [1, 2, 4, 8, 16, 32, 64]
    assert not is_power_of_two((1 << 60) + 1) and is_power_of_two(1 << 90)
    assert list(chunked([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]


def test_import_is_light() -> None:
    heavy = ["numpy", "llvmlite", "ml_dtypes", "hashlib", "tempfile", "shutil", "json"]
    code = f"import sys, whit; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# ---- examples in docstrings --------------------------------------------------------------------------------

MODULES = ["whit.helpers", "whit.repro", *[
    m.name for package in (whit.uop, whit.codegen) for m in pkgutil.iter_modules(package.__path__,
                                                                                 package.__name__ + ".")]]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    # examples may use the IR's names without importing them
    names = {n: getattr(whit.uop, n) for n in whit.uop.__all__}
    result = doctest.testmod(importlib.import_module(name), extraglobs=names,
                             optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.failed == 0


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 1 << 20),
        ({"cpu.max": "max 100000\n"}, 1 << 20),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "nonsense"}, 1 << 20),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1 << 20),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, 1 << 20),
    ],
)
def test_cpu_time_of_a_container(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(str(tmp_path)) == cpus


def test_number_of_threads() -> None:
    with Context(NUM_CPU_THREADS=7):
        assert cpu_threads() == 7
    with Context(NUM_CPU_THREADS=0):
        assert 1 <= cpu_threads() <= len(os.sched_getaffinity(0))
    with Context(NUM_CPU_THREADS=-1), pytest.raises(SettingError, match="no negative number of threads"):
        cpu_threads()

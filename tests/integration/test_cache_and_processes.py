"""The disk cache and the process around it: broken folders, full disks, damaged entries, races, forks,
compilers that are missing or fail, and a quiet end. Most run in a process and a cache folder of their own."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from whit import helpers
from whit.helpers import WhitError, cache_get, cache_put

ROOT = Path(__file__).parents[2]
SUM = "from whit import Tensor\nprint((Tensor([1.0, 2.0, 3.5]) * 2).sum().item())\n"


def start(code: str, cache: Path | str, **environment: str) -> subprocess.Popen[str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("DEV", "CACHE", "DEBUG", "XDG_CACHE_HOME")}
    settings = {**keep, "PYTHONPATH": str(ROOT), "WHIT_CACHE": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def python(code: str, cache: Path | str, **environment: str) -> tuple[str, str]:
    return finish(start(code, cache, **environment))


def entries(cache: Path) -> list[Path]:
    return sorted(p for p in cache.rglob("*") if p.is_file())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache folder for this process."""
    monkeypatch.setattr(helpers.CACHE_DIR, "value", str(tmp_path))
    monkeypatch.setattr(helpers.CACHE, "value", 1)
    monkeypatch.setattr(helpers, "_cache_broken", False)
    return tmp_path


# ---- folders that cannot be written ------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "/proc/whit"])
def test_a_cache_folder_that_cannot_be_made_warns_once_and_work_goes_on(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out, err = python(
        SUM + "print((Tensor([2.0]) + 1).tolist())", tmp_path / where if where == "file" else where
    )
    assert out.split() == ["13.0", "[3.0]"]
    assert err.count("disk cache: cannot write") == 1 and "WHIT_CACHE" in err and "Traceback" not in err


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_read_only_or_full_disk_warns_once(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="disk cache: cannot write"):
        cache_put("kernels", "a", b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache_put("kernels", "b", b"x")
    monkeypatch.undo()
    assert not entries(folder)


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_put("kernels", "a", b"old")
    real = os.fdopen

    class Full:
        def __init__(self, handle: int) -> None:
            self.file = real(handle, "wb")

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def writelines(self, parts: Iterable[bytes]) -> None:
            self.file.write(next(iter(parts))[:3])
            self.file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", lambda handle, mode: Full(handle))
    with pytest.warns(UserWarning, match="No space left"):
        cache_put("kernels", "a", b"new and longer")
    monkeypatch.undo()
    helpers.CACHE_DIR.value = str(folder)
    try:
        assert cache_get("kernels", "a") == b"old"
        assert [p.name for p in entries(folder)] == ["a"]
    finally:
        helpers.CACHE_DIR.value = ""


def test_kernels_of_a_process_on_a_full_disk(tmp_path: Path) -> None:
    code = """
        import errno, os
        real = os.replace
        def replace(*a): raise OSError(errno.ENOSPC, "No space left on device")
        os.replace = replace
    """
    out, err = python(textwrap.dedent(code) + SUM, tmp_path)
    assert out.strip() == "13.0" and err.count("No space left") == 1 and "Traceback" not in err
    assert not entries(tmp_path)


# ---- damaged entries ---------------------------------------------------------------------------------------


def test_damaged_entries_are_compiled_anew(tmp_path: Path) -> None:
    python(SUM, tmp_path)
    made = [p for p in entries(tmp_path) if p.parent.name == "kernels"]
    assert made
    for damage in (
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b[:40] + bytes([b[40] ^ 1]) + b[41:],
        lambda b: b"\0" * len(b),
        lambda b: b + b"x",
        lambda b: b[:16],
    ):
        for path in made:
            path.write_bytes(damage(path.read_bytes()))
        out, err = python(SUM, tmp_path)
        assert out.strip() == "13.0" and not err
    whole = {p: p.read_bytes() for p in made}
    python(SUM, tmp_path)
    assert {p: p.read_bytes() for p in made} == whole  # repaired, and used from then on


def test_an_entry_that_is_a_folder_is_no_entry(tmp_path: Path) -> None:
    python(SUM, tmp_path)
    made = [p for p in entries(tmp_path) if p.parent.name == "kernels"]
    for path in made:
        path.unlink()
        path.mkdir()
    out, err = python(SUM, tmp_path)
    assert out.strip() == "13.0" and "Traceback" not in err


def test_an_entry_of_another_machine_is_never_used(folder: Path) -> None:
    """The key holds the CPU's features, so that an entry for others has another name."""
    from whit.engine.compile import cache_key
    from whit.runtime.device import Device
    from whit.uop import UOp

    device = Device.get("CPU")
    ast = UOp.sink()
    key = cache_key(ast, device)

    class Other:
        name = device.name
        target = device.target._replace(key=device.target.key + "+avx1024")

    assert cache_key(ast, Other()) != key  # type: ignore[arg-type]  # it has what the key needs
    assert cache_key(ast, device) == key
    from whit.runtime import native

    assert native.host_key() in device.target.key


def test_the_key_holds_the_settings_and_the_device() -> None:
    from whit import Context
    from whit.engine.compile import cache_key
    from whit.runtime.device import Device
    from whit.uop import UOp

    ast, device = UOp.sink(), Device.get("CPU")
    keys = {cache_key(ast, device), cache_key(ast, Device.get("PYTHON"))}
    for settings in ({"NOOPT": 1}, {"BEAM": 2}, {"BEAM": 3}):
        with Context(**settings):
            keys.add(cache_key(ast, device))
    assert len(keys) == 5


# ---- several processes -------------------------------------------------------------------------------------

MANY = """
    from whit import Tensor
    import numpy as np
    for n in range(1, 9):
        x = Tensor(np.arange(n * 3.0, dtype=np.float32).reshape(n, 3))
        got = (x.exp() @ x.T).sum(1).numpy()
        want = (np.exp(x.numpy()) @ x.numpy().T).sum(1)
        np.testing.assert_allclose(got, want, rtol=1e-4)
    print("fine")
"""


def test_processes_that_compile_the_same_kernels_at_once(tmp_path: Path) -> None:
    running = [start(MANY, tmp_path) for _ in range(3)]
    for process in running:
        out, err = finish(process)
        assert out.strip() == "fine" and not err
    names = [p.name for p in entries(tmp_path)]
    assert names and not any(n.startswith(".tmp") for n in names)
    out, err = python(
        "import whit.engine.compile as c\n"
        "def refuse(*a, **k): raise SystemExit('compiled')\nc._compile = refuse\n" + textwrap.dedent(MANY),
        tmp_path,
    )
    assert out.strip() == "fine"


def test_a_process_killed_while_it_writes_leaves_no_half_entry(tmp_path: Path) -> None:
    code = """
        import os, time
        real = os.replace
        def replace(*a):
            print("writing", flush=True)
            time.sleep(60)
        os.replace = replace
    """
    process = start(textwrap.dedent(code) + SUM, tmp_path)
    assert process.stdout is not None and process.stdout.readline().strip() == "writing"
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()
    assert all(p.name.startswith(".tmp") for p in entries(tmp_path))
    out, err = python(SUM, tmp_path)
    assert out.strip() == "13.0" and not err


def test_a_child_after_a_fork_computes_and_so_does_the_parent(tmp_path: Path) -> None:
    """The pool's threads do not exist in the child; it must neither wait for them nor break the parent's."""
    code = """
        import os, sys
        from whit import Tensor, TinyJit
        big = Tensor.arange(1 << 20).cast("float32").realize()
        def work(n): return ((big + n) * 2).sum().item()
        def want(n): return 2 * ((1 << 20) * ((1 << 20) - 1) / 2 + n * (1 << 20))
        step = TinyJit(lambda x: (x * 2 + 1).realize())
        for _ in range(3): step(big)
        def fine(n): return abs(work(n) / want(n) - 1) < 1e-4 and step(big).numpy()[5] == 11
        assert fine(0)
        for n in range(3):
            child = os.fork()
            if child == 0:
                ok = fine(n) and abs((big * big).max().item() / ((1 << 20) - 1) ** 2 - 1) < 1e-4
                os._exit(0 if ok else 1)
            assert fine(n + 1)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
        child = os.fork()
        if child == 0:
            assert fine(7)
            sys.exit(3)  # the ordinary way out
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert fine(8)
        print("fine")
    """
    out, err = python(code, tmp_path, NUM_CPU_THREADS="2")
    assert out.strip() == "fine" and "Traceback" not in err


def test_multiprocessing_workers_compute(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing
        from whit import Tensor
        def work(n): return (Tensor.arange(100000) % n).sum().item()
        if __name__ == "__main__":
            want = [sum(i % n for i in range(100000)) for n in (3, 5, 7)]
            assert work(3) == want[0]
            for kind in ("fork", "spawn"):
                with multiprocessing.get_context(kind).Pool(2) as pool:
                    assert pool.map(work, (3, 5, 7)) == want
            print("fine")
    """)
    )
    out, _ = python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", tmp_path / "cache")
    assert out.strip() == "fine"


# ---- threads of one process --------------------------------------------------------------------------------


def test_threads_compute_at_once(tmp_path: Path) -> None:
    code = """
        import threading
        import numpy as np
        from whit import Tensor
        wrong = []
        def work(seed):
            try:
                data = np.random.default_rng(seed).standard_normal((seed + 2, 33)).astype(np.float32)
                for _ in range(10):
                    got = (Tensor(data).exp().sum(1) + seed).numpy()
                    np.testing.assert_allclose(got, np.exp(data).sum(1) + seed, rtol=1e-4)
            except BaseException as error:
                wrong.append(repr(error))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        print(wrong or "fine")
    """
    out, _ = python(code, tmp_path)
    assert out.strip() == "fine"


# ---- compilers ---------------------------------------------------------------------------------------------


def error_of(code: str, cache: Path, **environment: str) -> list[str]:
    """The kind and the parts of the error that `attempt()` ends in; tensors must still work afterwards."""
    body = f"""
from whit import Tensor, Context
from whit.helpers import WhitError
x = (Tensor([1.0, 2.0]) + 1).realize()
{textwrap.dedent(code)}
try:
    attempt()
    print("no error")
except WhitError as error:
    print(type(error).__name__), print(error.asked), print(error.because.splitlines()[0]), print(error.fix)
assert x.tolist() == [2.0, 3.0] and (x * 2).tolist() == [4.0, 6.0]
"""
    out, err = python(body, cache, **environment)
    assert "Traceback" not in err
    return out.strip().splitlines()


@pytest.mark.parametrize("kind", ["CLANG", "GCC"])
def test_a_missing_compiler(kind: str, tmp_path: Path) -> None:
    code = f"""
        def attempt(): Tensor([3.0], device="CPU:{kind}").exp().tolist()
    """
    name, asked, because, fix = error_of(code, tmp_path, PATH="")
    assert name == "DeviceError" and f"CPU:{kind}" in asked and "PATH" in because and "CPU" in fix


@pytest.mark.parametrize(
    "script", ["echo 'the compiler is ill' >&2; exit 1", "exec /nonexistent", "kill -9 $$"]
)
def test_a_failing_compiler(script: str, tmp_path: Path) -> None:
    tool = tmp_path / "gcc"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    code = """
        y = Tensor([3.0, 4.0], device="CPU:GCC")
        def attempt(): y.exp().tolist()
    """
    name, asked, because, fix = error_of(code, tmp_path / "cache", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert name == "CompileError" and str(tool) in asked and because and "DEV=CPU" in fix
    if "echo" in script:
        assert "the compiler is ill" in because


def test_a_compiler_that_makes_rubbish(tmp_path: Path) -> None:
    """Success without an object file, and an object that is none."""
    tool = tmp_path / "gcc"
    for script in ("exit 0", 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        code = """
            y = Tensor([3.0, 4.0], device="CPU:GCC")
            def attempt(): y.exp().tolist()
        """
        name, asked, because, fix = error_of(code, tmp_path / "cache", PATH=f"{tmp_path}:/usr/bin:/bin")
        assert name in ("CompileError", "DeviceError", "FileFormatError") and asked and because and fix


def test_a_compile_error_leaves_the_tensor_usable(tmp_path: Path) -> None:
    """What failed once can be computed when the compiler is well again."""
    tool = tmp_path / "gcc"
    tool.write_text('#!/bin/sh\n[ -e "$0.ill" ] && exit 1\nPATH=/usr/bin:/bin exec gcc "$@"\n')
    tool.chmod(0o755)
    code = f"""
        from whit import Tensor
        from whit.helpers import CompileError
        import os
        open({str(tool)!r} + ".ill", "w").close()
        x = Tensor([1.0, 2.0], device="CPU:GCC")
        y = x * 3
        for _ in range(2):
            try: y.tolist()
            except CompileError: print("ill")
        os.unlink({str(tool)!r} + ".ill")
        print(y.tolist(), x.tolist())
    """
    out, _ = python(code, tmp_path / "cache", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert out.splitlines() == ["ill", "ill", "[3.0, 6.0] [1.0, 2.0]"]


# ---- the end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "last",
    [
        "",
        "import sys; sys.exit(5)",
        "x = None",
        "del Tensor",
        "import threading; threading.Thread(target=lambda: y.sum().item()).start()",
        "import whit; whit.Device.get('CPU').synchronize()",
    ],
)
def test_the_interpreter_ends_cleanly(last: str, tmp_path: Path) -> None:
    """With worker threads alive, tensors alive, pending graphs and a captured jit."""
    code = f"""
        from whit import Tensor, TinyJit
        x = Tensor.arange(1 << 20).cast("float32").realize()
        y = x + 1
        step = TinyJit(lambda t: (t * 2).realize())
        for _ in range(3): z = step(x)
        assert z.sum().item() > 0
        class Cycle: pass
        c = Cycle(); c.me = c; c.t = (x * 3).realize()
        {last}
    """
    began = time.monotonic()
    _, err = finish(start(code, tmp_path, NUM_CPU_THREADS="2"), 5 if "exit" in last else 0)
    assert not err
    assert time.monotonic() - began < 30


def test_a_keyboard_interrupt_ends_like_one(tmp_path: Path) -> None:
    import signal

    code = """
        from whit import Tensor
        x = Tensor.arange(1 << 20).cast("float32").realize()
        print("ready", flush=True)
        while True: (x * 2 + 1).sum().item()
    """
    process = start(code, tmp_path)
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT or "KeyboardInterrupt" in err, err


def test_errors_survive_pickling() -> None:
    import pickle

    error = WhitError("a", because="b", fix="c")
    again = pickle.loads(pickle.dumps(error))
    assert (again.asked, again.because, again.fix) == ("a", "b", "c")

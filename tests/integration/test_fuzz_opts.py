"""Random opts on kernels of real programs, on every device, against NumPy (see opts_fuzz.py). Illegal opts
change nothing. `--slow` runs for some minutes; a failure prints the kernel, few opts, and a command."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.codegen.opts_kernels import kept_softmax
from tests.devices import CLANG
from tests.integration import opts_fuzz
from tests.integration.opts_fuzz import PROGRAMS, Subject, check, kernel, random_opts
from whit.codegen.opts import AxisTable, Opt, OptError, OptKind, parse_opts
from whit.engine.trial import Compiled, compile_candidate
from whit.repro import main
from whit.runtime import native
from whit.runtime.device import Device
from whit.runtime.elf import MACHINE
from whit.uop import AxisType, Ops, ParamArg, ReduceArg, UOp, dtypes
from whit.uop.text import parse

ELF_X86 = MACHINE == "x86_64" and "avx2" in native.host()[1]
FOUND = sorted((Path(__file__).parent / "found_opts").glob("*.txt"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_once_was_wrong_is_right_or_refused(path: Path) -> None:
    """Each file says why it is there, and has opts and a kernel as the fuzzer prints them."""
    why, opts, text = path.read_text().split("\n", 2)
    assert why.startswith("# ") and opts.startswith("# opts: ")
    subject = Subject(parse(text), 0)
    for device in ("CPU", "PYTHON"):
        error = opts_fuzz.failure(subject, device, parse_opts(opts.removeprefix("# opts: ")))
        assert error is None, error


def test_padding_inside_of_the_axis_that_fills_scratch_is_refused() -> None:
    """The readers of scratch count its elements by the unpadded sizes."""
    ast = kept_softmax(5, 37)
    fill = next(u for u in ast.toposort() if u.op is Ops.STAGE).src[1].arg.uid
    subject = Subject(ast, 0)
    for text in (
        "",
        "UNROLL axis {0} by 2",
        "SPLIT axis {0} by 2",
        "SPLIT axis {0} by 2, PADTO axis {0} to 4",
    ):
        opts = [Opt(OptKind.PADTO, fill, 2), *parse_opts(text.format(fill))]
        subject.run("CPU", opts)
        table = AxisTable.of(opts_fuzz.prepare(ast), Device.get("CPU").target)
        for opt in opts:
            table.apply(opt)
        inner = max(table.axes)
        if "SPLIT" in text:
            with pytest.raises(OptError, match="order is fixed"):
                table.apply(Opt(OptKind.PADTO, inner, 4))


@pytest.mark.parametrize("start", range(0, 100, 20))
def test_random_opts(start: int) -> None:
    for seed in range(start, start + 20):
        check(seed, ["CPU"])


def test_random_opts_on_the_reference() -> None:
    for seed in range(300, 312):
        check(seed, ["PYTHON"])


@pytest.mark.parametrize("device", [CLANG])
def test_random_opts_through_c(device: str) -> None:
    for seed in range(200, 208):
        check(seed, [device])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 13_000, 100))
def test_many_random_opts(start: int) -> None:
    for seed in range(start, start + 100):
        check(seed, ["CPU"], times=2)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["PYTHON", CLANG])
@pytest.mark.parametrize("start", range(20_000, 20_400, 50))
def test_many_random_opts_on_other_devices(start: int, device: str) -> None:
    for seed in range(start, start + 50):
        check(seed, [device])


NARROW = """
import sys
import llvmlite.binding as binding
from whit.runtime import native
cpu, start = sys.argv[1], int(sys.argv[2])
class Features(dict):
    def flatten(self): return ",".join(("+" if on else "-") + name for name, on in sorted(self.items()))
wide = ("avx512", "amx", "avx10", "evex")
if cpu == "x86-64": wide += ("avx", "fma", "f16c", "sse4", "ssse3", "vaes")
features = Features({k: on and not k.startswith(wide) for k, on in binding.get_host_cpu_features().items()})
model, flags = native.host()
binding.get_host_cpu_features, binding.get_host_cpu_name = lambda: features, lambda: cpu
native.host = lambda: (model + cpu, frozenset(f for f in flags if not f.startswith(wide)))
native.host_key.cache_clear()
from tests.integration.opts_fuzz import check
from whit.runtime.device import Device
assert Device.get("CPU").target.vector_bytes == (16 if cpu == "x86-64" else 32)
for seed in range(start, start + 100): check(seed, ["CPU"])
print("fine")
"""


@pytest.mark.slow
@pytest.mark.skipif(not ELF_X86, reason="another kind of CPU")
@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("start", [30_000, 30_100])
def test_random_opts_on_cpus_with_less(cpu: str, start: int, tmp_path: Path) -> None:
    """This CPU as one with SSE2 only, and as one with AVX2."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WHIT_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", NARROW, cpu, str(start)], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "fine\n", done.stdout + done.stderr


def test_the_sample_meets_every_kind_of_opt_dtype_and_kernel() -> None:
    kinds: set[OptKind] = set()
    names: set[str] = set()
    ops = set()
    symbolic = staged = 0
    for seed in range(120):
        ast = kernel(seed)
        nodes = ast.toposort()
        names |= {u.dtype.name for u in nodes if u.op is Ops.PARAM}
        ops |= {u.op for u in nodes}
        symbolic += any(u.op is Ops.VAR for u in nodes)
        for device in ("CPU", "PYTHON"):
            target = Device.get(device).target
            opts = random_opts(opts_fuzz.prepare(ast, target), target, random.Random(seed))
            kinds |= {opt.kind for opt in opts}
            staged += any(opt.kind is OptKind.STAGE for opt in opts)
    assert kinds == set(OptKind)
    assert {"float32", "float16", "bfloat16", "float64", "int32", "int8", "uint8", "int64"} <= names
    assert {Ops.EXP2, Ops.REDUCE, Ops.WHERE, Ops.FLOORMOD, Ops.SQRT} <= ops
    assert symbolic >= 5 and staged >= 10 and len(PROGRAMS) >= 15


@pytest.mark.parametrize("kind", list(OptKind))
@pytest.mark.parametrize("axis, amount", [(99, 2), (-1, 2), (0, -3), (0, 10**12), (1, 7), (2, 0), (0, 0)])
def test_illegal_opts_are_refused_in_three_parts_and_change_nothing(
    kind: OptKind, axis: int, amount: int
) -> None:
    """Of two tables one has met the opt: what is legal afterwards must be the same."""
    ready = opts_fuzz.prepare(opts_fuzz.RAW["matmul"]())
    for device in ("CPU", "PYTHON"):
        target = Device.get(device).target
        table = AxisTable.of(ready, target)
        if opts_fuzz.attempt(table, Opt(kind, axis, amount)):
            continue
        table.apply(Opt(OptKind.UPCAST, 1, 4))
        other = AxisTable.of(ready, target)
        other.apply(Opt(OptKind.UPCAST, 1, 4))
        assert table.build() is other.build()


# ---- the fuzzer itself -------------------------------------------------------------------------------------


def test_numpy_says_what_tensors_compute() -> None:
    """The evaluator against arithmetic by hand: a masked, flipped, half-precision sum of a symbolic size."""
    n = UOp.variable("n", 1, 5)
    p, x = [UOp(Ops.PARAM, dtypes.float16, (), ParamArg(slot, 6)) for slot in (0, 1)]
    i, k = UOp.range(n, AxisType.LOOP, 0), UOp.range(6, AxisType.REDUCE, 1)
    read = UOp(Ops.INDEX, dtypes.float16, (x, k * -1 + 5, k.lt(4)))
    total = UOp(Ops.REDUCE, dtypes.float16, (read * 2.0, k), ReduceArg(Ops.ADD))
    ast = UOp.sink(UOp(Ops.STORE, dtypes.void, (p, i, total)).end(i))
    data = {0: np.full(6, 9, np.float16), 1: np.array([1, 2, 3, 4, 5, 0.1], np.float16)}
    got = opts_fuzz.evaluate(ast, data, {"n": 3})[0]
    exact = sum(np.float16(v) * np.float16(2) for v in data[1][2:].astype(np.float64))
    assert got.tolist() == [np.float16(exact)] * 3 + [9] * 3


def test_a_failure_is_shrunk_and_its_command_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a compiler that ignores the last output when some axis is upcast by more than 2."""

    def broken(ast: UOp, device: str, opts: tuple[Opt, ...]) -> Compiled:
        made = compile_candidate(ast, device, opts)
        if not any(o.kind is OptKind.UPCAST and o.amount > 2 for o in opts):
            return made
        other = compile_candidate(UOp.sink(*map(shorter, ast.src)), device, ())
        return made._replace(binary=other.binary, name=other.name, tasks=1)

    def shorter(end: UOp) -> UOp:
        last = end.src[1]
        return end.substitute({last: last.replace(src=(UOp.index(last.src[0].arg - 1),))})

    monkeypatch.setattr(opts_fuzz, "compile_candidate", broken)
    subject = Subject(opts_fuzz.RAW["matmul"](), 0)
    texts = ["UNROLL axis 2 by 5", "UPCAST axis 1 by 8", "UPCAST axis 0 by 2", "THREAD axis 0 by 3"]
    opts = tuple(map(Opt.parse, texts))
    assert opts_fuzz.failure(subject, "CPU", opts) is not None
    text = opts_fuzz.report(subject, "CPU", opts, "seed 0")
    assert '--opts "UPCAST axis 1 by 4"' in text or '--opts "UPCAST axis 1 by 8"' in text
    file = tmp_path / "kernel.txt"
    file.write_text(text.split("<<END\n")[1].split("END")[0])
    command = text.splitlines()[1]
    assert command.startswith("python -m whit.repro --device CPU --opts ")
    assert (
        main([str(file), "--device", "CPU", "--opts", command.split('"')[1]]) == 0
    )  # the compiler is well again
    assert "agrees" in capsys.readouterr().out


def test_a_kernel_that_reads_or_writes_outside_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(opts_fuzz.RAW["elementwise"](), 0)
    longer = opts_fuzz.RAW["elementwise"]()
    first = next(u for u in longer.toposort() if u.op is Ops.RANGE and u.arg.uid == 0)
    longer = longer.substitute({first: first.replace(src=(UOp.index(first.src[0].arg + 1),))})

    def broken(ast: UOp, device: str, opts: tuple[Opt, ...]) -> Compiled:
        return compile_candidate(longer, device, ())

    monkeypatch.setattr(opts_fuzz, "compile_candidate", broken)
    error = opts_fuzz.failure(subject, "CPU", ())
    assert error is not None and "outside of buffer 0" in str(error)


def test_illegal_opts_count_as_no_failure() -> None:
    subject = Subject(opts_fuzz.RAW["matmul"](), 0)
    with pytest.raises(OptError):
        subject.run("CPU", [Opt(OptKind.UPCAST, 9, 2)])
    assert opts_fuzz.failure(subject, "CPU", (Opt(OptKind.UPCAST, 9, 2),)) is None

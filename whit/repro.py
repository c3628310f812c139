"""`python -m whit.repro FILE` runs a graph from its text form and compares it with the reference interpreter.

A bug report is such a file: a kernel (`sink` of stores), a program in execution order (`linear {`), a
schedule, or a graph of tensors. Buffers are filled with repeatable random values; variables take their
greatest value.

    python -m whit.repro kernel.txt                      # on the default device, compared with PYTHON
    python -m whit.repro kernel.txt --device CPU:CLANG n=3
    python -m whit.repro kernel.txt --opts "UPCAST axis 0 by 4"   # these opts, compared with none
    DEBUG=6 python -m whit.repro kernel.txt              # with everything that DEBUG shows on the way
    python -m whit.repro kernel.txt --stats              # with what each step of the compiler cost
"""
from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whit.codegen import generate
from whit.codegen.opts import Opt, parse_opts
from whit.engine import buffer_of, compiled
from whit.engine.realize import execute
from whit.engine.validate import as_array, compare, written
from whit.helpers import DEV, ArgumentError, Context, WhitError
from whit.runtime.device import Buffer, Device, Launch, Program
from whit.schedule import schedule
from whit.uop import AxisType, DType, Ops, UOp
from whit.uop.rewrite import statistics
from whit.uop.spec import verify
from whit.uop.text import parse
from whit.uop.uop import variables_of

REFERENCE = "PYTHON"


@dataclass(frozen=True)
class Output:
    """Memory that was written: its name, its type and its bytes."""

    name: str
    dtype: DType
    data: bytearray


def contents(dtype: DType, size: int, seed: int) -> bytearray:
    """Repeatable values of a buffer: floats from -1 to 1, integers from 0 to 7."""
    import numpy as np
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, size) if dtype.is_float else rng.integers(0, 2 if dtype.is_bool else 8, size)
    return bytearray(values.astype(as_array(bytearray(0), dtype).dtype).tobytes())


# ---- the kinds of graph ------------------------------------------------------------------------------------


def level_of(root: UOp) -> str:
    """What a root is: "kernel", "tiled" (after opts), "linear", "schedule" or "tensor"."""
    if root.op is Ops.LINEAR:
        return "schedule" if root.src and all(s.op is Ops.CALL for s in root.src) else "linear"
    nodes = root.toposort()
    if root.op is Ops.SINK and root.src and any(n.op is Ops.PARAM for n in nodes):
        return "tiled" if root.arg is not None or any(_comes_from_opts(n) for n in nodes) else "kernel"
    return "tensor"


def _comes_from_opts(node: UOp) -> bool:
    if node.op is Ops.RANGE:
        return node.arg.axis not in (AxisType.LOOP, AxisType.REDUCE)
    return node.op in (Ops.LOCAL, Ops.SPECIAL)


def run(root: UOp, device: str, seed: int = 0, values: dict[str, int] | None = None,
        opts: Sequence[Opt] | None = None) -> list[Output]:
    """Run a graph of any level on a device; what it wrote."""
    level, values = level_of(root), values or {}
    verify(root, level, "before it runs")
    if level == "schedule":
        found = []
        for number, call in enumerate(s for s in root.src if s.src[0].op is Ops.SINK):
            found += [Output(f"call {number}, {o.name}", o.dtype, o.data) for o in run(call.src[0], device,
                                                                                       seed, values)]
        return found
    return _run_tensors(root, device, seed) if level == "tensor" \
        else _run_kernel(root, level, device, seed, values, opts)


def _program(root: UOp, level: str, device: str, opts: Sequence[Opt] | None) -> Program:
    if level == "kernel" and opts is None:
        return compiled(root, device).program
    runtime = Device.get(device)
    linear = root if level != "kernel" else generate(root, runtime.target, opts).linear
    if level == "tiled":
        from whit.codegen.linearize import linearize
        from whit.codegen.lower import lower_passes
        from whit.uop import run_passes
        linear = linearize(run_passes(root, lower_passes(), runtime.target), runtime.target)
    sizes = {u.arg.name: u.arg.size for u in linear.src if u.op is Ops.SPECIAL}
    groups, items = [tuple([sizes.get(f"{prefix}{n}", 1) for n in range(3)]) for prefix in ("gidx", "lidx")]
    launch = Launch(sizes.get("thread", 1), groups, items)
    return runtime.load(runtime.compile(runtime.render(linear, "repro"), "repro"), "repro", launch)


def _run_kernel(root: UOp, level: str, device: str, seed: int, values: dict[str, int],
                opts: Sequence[Opt] | None) -> list[Output]:
    nodes = root.toposort()
    params = {u.arg.slot: u for u in nodes if u.op is Ops.PARAM}
    buffers: list[Buffer] = []
    for slot in range(max(params, default=-1) + 1):
        param = params.get(slot)
        data = bytearray(8) if param is None else contents(param.dtype, param.arg.size, seed + slot)
        buffers.append(Buffer(device, max(1, len(data))))
        if data:
            buffers[-1].copyin(memoryview(data))
    numbers = [values.get(v.arg.name, v.arg.max) for v in variables_of(nodes)]
    _program(root, level, device, opts)([b.handle for b in buffers], numbers, True)
    Device.get(device).synchronize()
    return [Output(f"buffer {slot}", dtype, buffers[slot].copyout()) for slot,
            dtype in sorted(written(root).items())]


def _run_tensors(root: UOp, device: str, seed: int) -> list[Output]:
    """The roots are the sources of a SINK, or the one node."""
    roots = list(root.src) if root.op is Ops.SINK else [root]
    moved: dict[UOp, UOp] = {}
    for number, old in enumerate(n for n in root.toposort() if n.op is Ops.BUFFER):
        new = moved[old] = UOp.new_buffer(old.arg.size, old.dtype, device)
        data = contents(old.dtype, old.arg.size, seed + number)
        if data:
            buffer_of(new).copyin(memoryview(data))
    roots = [r.substitute(moved) for r in roots]
    plan, externals, values = schedule(roots)
    memory = execute(plan, externals, values)
    found = []
    for number, (result, r) in enumerate(zip(plan.results, roots, strict=True)):
        data = memory[result.slot].copyout()
        start = (result.offset if isinstance(result.offset, int) else 0) * r.dtype.itemsize
        count = int(r.size.vmax) if isinstance(r.size, UOp) else r.size
        found.append(Output(f"root {number}", r.dtype, data[start:start + count * r.dtype.itemsize]))
    return found


# ---- the command -------------------------------------------------------------------------------------------


def report(outputs: Sequence[Output]) -> str:
    """A line for each output: its name, type, length and first values."""
    lines = []
    for out in outputs:
        values = as_array(out.data, out.dtype).tolist()
        lines.append(f"{out.name}: {out.dtype} × {len(values)}: " + ", ".join(str(v) for v in values[:8])
                     + (", …" if len(values) > 8 else ""))
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if the device agrees with the reference, 1 if not or if it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m whit.repro", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="IR text; - reads standard input")
    parser.add_argument("variables", nargs="*", help="values of variables, such as n=3")
    parser.add_argument("--device", default=DEV.value, help="where to run it (default: DEV)")
    parser.add_argument("--opts", help="opts of a kernel, compared with none (default: the heuristics')")
    parser.add_argument("--seed", type=int, default=0, help="seed of the buffers' contents")
    parser.add_argument("--stats", action="store_true", help="print what each step of the compiler cost")
    options = parser.parse_args(arguments)
    try:
        values = dict([_variable(text) for text in options.variables])
        text = sys.stdin.read() if str(options.file) == "-" else options.file.read_text()
        root = parse(text.split("\n# ---- after ")[0])  # of a golden file, its first graph
        device = Device.canonical(options.device)
        opts = None if options.opts is None else parse_opts(options.opts)
        if opts is not None and level_of(root) != "kernel":
            raise ArgumentError(f"--opts {options.opts!r}", fix="give opts for a kernel that has none",
                                because=f"the file holds a {level_of(root)} graph")
        with Context(STATS=1, CACHE=0) if options.stats else contextlib.nullcontext():
            outputs = run(root, device, options.seed, values, opts)
        print(report(outputs))
        if options.stats:
            print(statistics())
        if device != REFERENCE or opts:
            reference = run(root, REFERENCE, options.seed, values, None if opts is None else ())
            for got, wanted in zip(outputs, reference, strict=True):
                compare(got.data, wanted.data, got.dtype, f"{got.name} on {device}")
            print(f"{device} agrees with {REFERENCE}")
    except (WhitError, OSError, UnicodeDecodeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _variable(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.lstrip("-").isdigit():
        raise ArgumentError(f"variable {text!r}", because="it does not read as name=number", fix="write n=3")
    return name, int(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

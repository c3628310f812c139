"""The worker's side of the search: compile a candidate, run it on real memory, compare what it wrote with
the kernel without opts, time it.

Memory lies between guards. Those of what is read are all ones, NaN to floats: a candidate that reads beyond
a buffer computes NaN. One that writes beyond any buffer is found out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from whit.codegen.opts import Opt
from whit.helpers import DeviceError, ceildiv
from whit.uop import Ops, UOp
from whit.uop.rewrite import rebuild
from whit.uop.uop import variables_of

# operations of the kernel without opts, which is slow: of larger kernels it computes a sample
SAMPLED_WORK = 20_000_000
GUARD = 4096  # bytes before and after each buffer
BLOCK = (1 << 22) - 3  # random values are repeated beyond this many


class Compiled(NamedTuple):
    """A candidate as processes exchange it."""

    name: str
    tasks: int
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    binary: bytes


def compile_candidate(ast: UOp, device: str, opts: Sequence[Opt] | None) -> Compiled:
    """Codegen and compiler for one candidate; opts None are those of the heuristics."""
    from whit.codegen.pipeline import generate
    from whit.runtime.device import Device

    runtime = Device.get(device)
    made = generate(ast, runtime.target, opts)
    binary = runtime.compile(runtime.render(made.linear, made.name), made.name)
    return Compiled(made.name, made.tasks, made.global_size, made.local_size, binary)


# ---- the reference -----------------------------------------------------------------------------------------


def work_of(ast: UOp) -> int:
    """Operations and accesses that a kernel makes without any opts; symbolic sizes count in full."""
    total = 0
    for node in ast.toposort():
        if node.op is Ops.REDUCE or node.op is Ops.INDEX or node.op.is_alu:
            inside = node.src[0].ranges if node.op is Ops.REDUCE else node.ranges
            total += math.prod([int(r.src[0].vmax) for r in inside])
    return total


def sampled(ast: UOp, work: int = SAMPLED_WORK) -> UOp:
    """The kernel for a sample of its outputs, so that it takes about `work` operations: LOOPs take equal
    steps, and the last place. The kernel itself when it takes no more than that.

    Before:  i = RANGE(1000); END(STORE(p, i, …), i)
    After:   j = RANGE(112); END(STORE(p, MIN(j*9, 999), …), j)
    """
    ratio = work_of(ast) / work
    filling = {r for u in ast.toposort() if u.op is Ops.STAGE for r in u.src[1:]}
    around = dict.fromkeys(r for end in ast.src if end.op is Ops.END for r in end.src[1:])
    loops = [r for r in around if r not in filling]
    changes: dict[UOp, UOp] = {}
    for r in sorted(loops, key=lambda u: -int(u.src[0].vmax)):
        size = r.src[0].arg if r.src[0].op is Ops.CONST else 0
        if ratio <= 1 or size < 8:
            continue
        step = min(ceildiv(int(ratio * 8), 8) | 1, max(3, (size // 4) | 1))  # odd: it meets every vector lane
        count = ceildiv(size - 1, step) + 1
        fewer = r.replace(src=(UOp.index(count),))
        changes[r] = (fewer * step).minimum(size - 1)
        ratio *= count / size
    if not changes:
        return ast

    def fewer_ends(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.END:
            return new
        return new.src[0].end(*[_range_of(changes.get(r, r), r) for r in old.src[1:]])

    return rebuild(ast, fewer_ends, changes)


def _range_of(value: UOp, old: UOp) -> UOp:
    return value if value is old else next(iter(value.ranges))


def marking(ast: UOp) -> UOp:
    """A kernel that stores 1 wherever `ast` stores something."""
    return ast.substitute(
        {
            u: u.replace(src=(*u.src[:2], UOp.const(1, u.src[2].dtype), *u.src[3:]))
            for u in ast.toposort()
            if u.op is Ops.STORE
        }
    )


# ---- running -----------------------------------------------------------------------------------------------


class Runner:
    """Buffers, contents and reference outputs of one kernel. Every number depends on `seed`; variables (sizes
    that are not fixed) take their greatest value, or a smaller one for other seeds. Or `data` has the
    contents by slot, and `variables` the values."""

    def __init__(
        self,
        ast: UOp,
        device: str,
        seed: int = 0,
        data: dict[int, bytes] | None = None,
        variables: dict[str, int] | None = None,
    ) -> None:
        from whit.runtime.device import Buffer, Device

        self.runtime = Device.get(device)
        nodes = ast.toposort()
        self.params = {u.arg.slot: u for u in nodes if u.op is Ops.PARAM}
        self.written = sorted({u.src[0].arg.slot for u in nodes if u.op is Ops.STORE})
        read = {u.src[0].arg.slot for u in nodes if u.op is Ops.INDEX and u.src[0].op is Ops.PARAM}
        self.is_in_place = not read.isdisjoint(self.written)
        self.variables = variables or {v.arg.name: _value(v, seed) for v in variables_of(nodes)}
        self.values = list(self.variables.values())
        if data is None:
            data = {slot: contents(u, seed * 64 + slot) for slot, u in self.params.items()}
        self.data = data
        self.whole: list[Buffer] = []
        self.buffers: list[Buffer] = []
        for slot in range(max(self.params, default=-1) + 1):
            body = self.data.get(slot, b"")
            self.whole.append(Buffer(device, len(body) + 2 * GUARD))
            self.whole[-1].copyin(memoryview(self.guard(slot) + body + self.guard(slot)))
            self.buffers.append(self.whole[-1].view(GUARD, len(body)))
        reference = sampled(ast)
        self.marks = None if reference is ast else self.mark(marking(reference))
        self.reference = self.run(reference)
        self.first: dict[int, bytearray] | None = None  # all outputs of the first candidate that was right
        self.right: set[bytes] = set()  # binaries whose values were right

    def load(self, candidate: Compiled) -> Any:
        from whit.runtime.device import Launch

        launch = Launch(candidate.tasks, candidate.global_size, candidate.local_size)
        return self.runtime.load(candidate.binary, candidate.name, launch)

    def reset(self) -> None:
        """Give the outputs their initial contents."""
        for slot in self.written:
            self.buffers[slot].copyin(memoryview(self.data[slot]))

    def run(self, kernel: Compiled | UOp) -> dict[int, bytearray]:
        """The outputs of one run of a candidate, or of a kernel without opts, from the initial contents."""
        self.reset()
        return self._outputs(kernel)

    def _outputs(self, kernel: Compiled | UOp) -> dict[int, bytearray]:
        values = self.values
        if isinstance(kernel, UOp):  # a sample may depend on fewer variables
            values = [self.variables[v.arg.name] for v in variables_of(kernel.toposort())]
            kernel = compile_candidate(kernel, self.runtime.name, ())
        self.load(kernel)([b.handle for b in self.buffers], values, wait=True)
        return {slot: self.buffers[slot].copyout() for slot in self.written}

    def mark(self, kernel: UOp) -> dict[int, Any]:
        """Which elements of each output the sample of the reference writes."""
        import numpy as np

        for slot in self.written:
            self.buffers[slot].copyin(memoryview(bytes(len(self.data[slot]))))
        written = self._outputs(kernel)
        found = {}
        for slot in self.written:
            marks = np.frombuffer(written[slot], np.uint8)
            found[slot] = marks.reshape(-1, self.params[slot].dtype.itemsize).any(axis=1)
        return found

    def check(self, candidate: Compiled) -> None:
        """DeviceError if a candidate's outputs are not those of the reference, or if it writes anywhere
        else."""
        if candidate.binary in self.right:
            return
        found = self.run(candidate)
        for slot in self.written:
            marks = None if self.marks is None else self.marks[slot]
            wanted = self.first[slot] if self.first else None
            if not is_close(found[slot], self.reference[slot], self.params[slot], marks) or (
                wanted is not None and not is_close(found[slot], wanted, self.params[slot])
            ):
                raise DeviceError(
                    f"candidate {candidate.name}",
                    because=f"output {slot} differs from that of the kernel without opts",
                    fix="report it: an opt or a lowering is wrong",
                )
        self.check_guards(candidate)
        self.right.add(candidate.binary)
        if self.first is None:
            self.first = found

    def guard(self, slot: int) -> bytes:
        """What lies before and after a buffer."""
        return (b"\xa5" if slot in self.written else b"\xff") * GUARD

    def check_guards(self, candidate: Compiled) -> None:
        for slot, whole in enumerate(self.whole):
            guard = self.guard(slot)
            before, after = whole.view(0, GUARD), whole.view(whole.nbytes - GUARD, GUARD)
            if before.copyout() != guard or after.copyout() != guard:
                before.copyin(memoryview(guard))
                after.copyin(memoryview(guard))
                raise DeviceError(
                    f"candidate {candidate.name}",
                    because=f"it writes outside of buffer {slot}",
                    fix="report it: an opt or a lowering is wrong",
                )

    def check_inputs(self, candidate: Compiled) -> None:
        """DeviceError if buffers that the kernel only reads have changed."""
        for slot, data in self.data.items():
            if slot not in self.written and self.buffers[slot].copyout() != data:
                raise DeviceError(
                    f"candidate {candidate.name}",
                    because=f"it writes to buffer {slot}, which the kernel only reads",
                    fix="report it: an opt or a lowering is wrong",
                )

    def once(self, program: Any, handles: Sequence[Any]) -> float:
        if self.is_in_place:  # else values would grow, or shrink to slow denormals, from run to run
            self.reset()
        return float(program(handles, self.values, wait=True))

    def time(self, candidate: Compiled, best: float) -> float:
        """The least seconds of a few runs; fewer when it is much slower than `best`. DeviceError if it
        computes wrong values."""
        self.check(candidate)
        program, handles = self.load(candidate), [b.handle for b in self.buffers]
        least, start = math.inf, time.perf_counter()
        for runs in itertools.count(1):
            least = min(least, self.once(program, handles))
            spent = time.perf_counter() - start
            if spent > 0.1 or runs == 200 or (runs >= 3 and (spent > 0.01 or least > 3 * best)):
                return least
        raise AssertionError("unreachable")

    def race(self, candidates: Sequence[Compiled], seconds: float) -> list[tuple[float, float, float]]:
        """Of each candidate the least and the lower quartile of its seconds, and in which share of the turns
        it was faster than the first one; run in turns for about `seconds` (at least three turns)."""
        for candidate in candidates:
            self.check(candidate)
        programs, handles = [self.load(c) for c in candidates], [b.handle for b in self.buffers]
        found: list[list[float]] = [[] for _ in candidates]
        start = time.perf_counter()
        for number in itertools.count():
            for place in range(len(programs)):
                at = (place + number) % len(programs)  # so that none always follows the same one
                found[at].append(self.once(programs[at], handles))
            spent = time.perf_counter() - start
            if number >= 2 and (spent > seconds or number == 1000):
                break
        turns = len(found[0])
        wins = [sum([mine < first for mine, first in zip(times, found[0])]) / turns for times in found]
        return [(min(times), sorted(times)[turns // 4], won) for times, won in zip(found, wins)]


def verify(ast: UOp, device: str, candidate: Compiled) -> bool:
    """Whether a candidate is right on other data and other values of the variables than a search uses.
    DeviceError if it is not."""
    for seed in (1, 2) if variables_of(ast.toposort()) else (1,):
        runner = Runner(ast, device, seed)
        runner.check(candidate)
        runner.check_inputs(candidate)
    return True


# ---- contents ----------------------------------------------------------------------------------------------


def _value(variable: UOp, seed: int) -> int:
    low, high = int(variable.arg.min), int(variable.arg.max)
    return (high, (low + high) // 2, low)[seed % 3]


def contents(param: UOp, seed: int) -> bytes:
    """Initial contents of a buffer: floats around 0, small integers, both kinds of bool."""
    import numpy as np

    rng = np.random.default_rng(seed)
    dtype, size = param.dtype, param.arg.size
    count = min(size, BLOCK)
    if dtype.is_float:
        values = (rng.random(count, dtype=np.float32) - np.float32(0.5)).astype(numpy_dtype(dtype.name))
    else:
        values = rng.integers(0, 2 if dtype.is_bool else 8, count).astype(numpy_dtype(dtype.name))
    return bytes(np.resize(values, size).tobytes())


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of an element type's name."""
    import numpy as np

    if name in _NARROW:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _NARROW[name]))
    return np.dtype(np.int64 if name == "index" else name)


_NARROW = {"bfloat16": "bfloat16", "fp8e4m3": "float8_e4m3fn", "fp8e5m2": "float8_e5m2"}
_TOLERANCE = {8: 1e-9, 4: 1e-3, 2: 2e-2, 1: 0.3}  # of floats of so many bytes


def is_close(found: bytes | bytearray, wanted: bytes | bytearray, param: UOp, marks: Any = None) -> bool:
    """Equal, or for floats equal up to the order of additions; where `marks` are true, if there are any."""
    import numpy as np

    if found == wanted:
        return True
    kind = numpy_dtype(param.dtype.name)
    a, b = np.frombuffer(found, kind), np.frombuffer(wanted, kind)
    if marks is not None:
        a, b = a[marks], b[marks]
    if not param.dtype.is_float:
        return bool(np.array_equal(a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = b[np.isfinite(b)]
    scale = float(np.abs(finite).max()) if finite.size else 1.0
    tolerance = _TOLERANCE[param.dtype.itemsize]
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale * 0.1, equal_nan=True))

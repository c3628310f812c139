"""Codegen's door: a kernel and a target become a linear program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whit.codegen.delay import delay_stores
from whit.codegen.estimate import estimate
from whit.codegen.heuristics import choose
from whit.codegen.linearize import linearize
from whit.codegen.lower import lower_passes, prepare
from whit.codegen.opts import Opt, OptError, apply
from whit.codegen.prefetch import prefetch_blocks, prefetch_rows
from whit.codegen.program import lower_program
from whit.codegen.stream import stream_stores
from whit.codegen.target import Target
from whit.helpers import NOOPT, SPEC, human_bytes
from whit.uop import Ops, Sint, UOp
from whit.uop.rewrite import Pass, run_passes, timed


@dataclass(frozen=True)
class Generated:
    """A linear program and what is needed to launch and judge it. `name` is a C identifier and no key."""

    linear: UOp
    name: str
    tasks: int
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    opts: tuple[Opt, ...]
    flops: Sint
    bytes: Sint


def generate(ast: UOp, target: Target, opts: Sequence[Opt] | None = None) -> Generated:
    """Compile a kernel (docs/contracts.md, "Kernel level") to a linear program.

    opts: what to do with its axes; None lets the heuristics choose (NOOPT=1: nothing). OptError if one is
    illegal, or if the kernel takes more scratch than a task has.
    """
    if ast.op is Ops.LINEAR:
        return _generate_program(ast, target)
    if SPEC:
        from whit.uop.spec import verify
        verify(ast, "kernel", "given to codegen")
    plain = prepare(ast)
    ready = prepare(plain, target)
    with timed("choose opts", ready):
        chosen = tuple(opts) if opts is not None else () if NOOPT else tuple(choose(ready, target))
    with timed("apply opts", ready):
        optimised = apply(ready, chosen, target)
    linear = run_passes(optimised, _pipeline(), target)
    scratch, most = _scratch(linear), 2 * target.scratch_bytes  # some comes from the schedule, some is kept
    if scratch > most and chosen and opts is None:
        return generate(ast, target, ())  # a tile of rows multiplies the scratch of a row
    if scratch > most:
        raise OptError(
            f"kernel {optimised.arg.name}",
            because=f"it takes {human_bytes(scratch)} of scratch, a task has {human_bytes(most)}",
            fix="use fewer or smaller UPCASTs",
        )
    sizes = {u.arg.name: u.arg.size for u in linear.src if u.op is Ops.SPECIAL}
    flops, moved = estimate(plain)
    return Generated(
        linear,
        optimised.arg.name,
        sizes.get("thread", 1),
        _launch(sizes, "gidx"),
        _launch(sizes, "lidx"),
        chosen,
        flops,
        moved,
    )


def _generate_program(program: UOp, target: Target) -> Generated:
    """A program written by hand: no opts, no choices."""
    lowered = Pass("lower program", lower_program, "program", "linear", "expressions before their use")
    linear = run_passes(program, (lowered,), target)
    scratch = _scratch(linear)
    if scratch > 2 * target.scratch_bytes:
        raise OptError(
            f"program {program.arg}",
            because=f"it takes {human_bytes(scratch)} of scratch, a task has "
            f"{human_bytes(2 * target.scratch_bytes)}",
            fix="keep large arrays in a buffer that the program writes",
        )
    tasks = max([u.arg.size for u in linear.src if u.op is Ops.SPECIAL], default=1)
    moved = sum([u.arg.size * u.dtype.itemsize for u in linear.src if u.op is Ops.PARAM])
    return Generated(linear, program.arg, tasks, (1, 1, 1), (1, 1, 1), (), 0, moved)


def _pipeline() -> tuple[Pass, ...]:
    return (
        *lower_passes(),
        Pass("linearize", linearize, "tiled", "linear", "instructions in execution order"),
        Pass("stream stores", stream_stores, "linear", "linear", "large results go past the caches"),
        Pass("delay stores", delay_stores, "linear", "linear", "a row is stored while the next is computed"),
        Pass("prefetch rows", prefetch_rows, "linear", "linear", "the next row is fetched during this one"),
        Pass("prefetch blocks", prefetch_blocks, "linear", "linear", "weights in blocks are fetched ahead"),
    )


def _scratch(linear: UOp) -> int:
    """Bytes of private scratch memory that a task takes."""
    own = [u for u in linear.src if u.op is Ops.LOCAL and not u.arg.shared]
    return sum([u.arg.size * u.dtype.itemsize for u in own])


def _launch(sizes: dict[str, int], prefix: str) -> tuple[int, ...]:
    return tuple([sizes.get(f"{prefix}{n}", 1) for n in range(3)])

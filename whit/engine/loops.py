"""Loops as one native replay: all calls of all steps in one table, whose addresses are patched for the
operands of the present call. A step then costs no Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from whit.engine.counters import GlobalCounters
from whit.runtime.device import Buffer, Device, PlanCall

if TYPE_CHECKING:
    from whit.engine.realize import Step
    from whit.schedule.loops import Loop

MOST_CALLS = 100_000  # of one table; longer loops run call by call


class Replay:
    """The calls of a loop on operands that are known by their number."""

    def __init__(self, steps: Iterable[Step], operands: Sequence[Buffer]) -> None:
        numbers = {id(operand): number for number, operand in enumerate(operands)}
        slots: dict[tuple[int, int], int] = {}
        calls: list[PlanCall] = []
        flops = nbytes = 0
        for step in steps:
            assert step.kernel is not None and not step.variables, "looked at before"
            places = [(numbers[id(buffer.base)], buffer.offset) for buffer in step.buffers]
            calls.append(
                PlanCall(step.kernel.program, tuple([slots.setdefault(p, len(slots)) for p in places]), ())
            )
            flops, nbytes = flops + step.kernel.work.flops, nbytes + step.kernel.work.nbytes
        self.device = Device.get(operands[0].device)
        self.places = list(slots)
        self.plan = self.device.plan(calls)
        self.totals = flops, nbytes, len(calls)

    def run(self, operands: Sequence[Buffer]) -> None:
        """Run them on these operands."""
        offset, handles = self.device.offset, [operand.handle for operand in operands]
        self.plan.run([offset(handles[number], at) for number, at in self.places], ())
        GlobalCounters.global_ops += self.totals[0]
        GlobalCounters.global_mem += self.totals[1]
        GlobalCounters.kernel_count += self.totals[2]


# by the schedule of one step, then by the settings that its kernels were compiled with
_known: weakref.WeakKeyDictionary[Any, dict[Hashable, Replay]] = weakref.WeakKeyDictionary()


def replay_of(
    loop: Loop,
    operands: Sequence[Buffer],
    settings: Hashable,
    steps: Callable[[list[Buffer]], Iterable[Step]],
) -> Replay | None:
    """The replay of a loop, made at its first use: `steps` gives the calls on stand-ins for the operands.
    None for loops that copy between devices, and for very long ones."""
    device = operands[0].device
    if calls_of(loop) > MOST_CALLS or any(operand.device != device for operand in operands):
        return None
    made = _known.setdefault(loop.plan, {})
    if settings not in made:
        stands = [Buffer(device, operand.nbytes) for operand in operands]
        made[settings] = Replay(steps(stands), stands)
    return made[settings]


def calls_of(loop: Loop) -> int:
    """How many calls all steps make; more than MOST_CALLS if one of them is a copy."""
    total = 0
    for call in loop.plan.calls:
        if call.loop is None and (call.ast is None or call.variables):
            return MOST_CALLS + 1
        total += 1 if call.loop is None else calls_of(call.loop)
    return total * loop.length

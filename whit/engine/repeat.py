"""The kernels of a computation once more, on other memory.

The layers of a net are the same graph over other weights. Building that graph and scheduling it costs a
hundred times what its kernels cost; so one layer is built and `learn` notes its kernels, and for the layers
that are like it `Recipe.run` starts these kernels with their own weights in place of the first one's.

    out, recipe = learn(lambda: layer(x, weights[0]), [x, *weights[0]])
    for one in weights[1:]:
        out = recipe.run([out, *one])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from whit.engine.realize import (
    Step,
    TensorMemory,
    adopt,
    arenas_of_record,
    buffer_of,
    buffer_so_far,
    forget_overwritten,
    is_realized,
    owned,
    readers_of,
    realize,
    recorder,
    turn,
)
from whit.helpers import prod
from whit.runtime.device import Buffer
from whit.schedule.movement import memory_of
from whit.tensor import Tensor
from whit.uop import Ops, UOp


class _Place(NamedTuple):
    """Where a kernel's operand lies: so many bytes into memory number `number`."""

    number: int
    offset: int
    nbytes: int


class Recipe:
    """The kernels of a computation, and which of their operands change with its tensors.

    Results lie in one of two buffers, in turns: one is overwritten when the second next is made.
    """

    def __init__(self, steps: list[Step], roles: list[Buffer], result: Tensor) -> None:
        self.steps, self.form = steps, result
        out = buffer_of(memory_of(result.uop))
        self.outs = [out, TensorMemory(out.device, out.nbytes)]
        known = {id(root): number for number, root in reversed(list(enumerate([*roles, out])))}
        self.places: list[tuple[_Place | None, ...]] = []
        for step in steps:
            self.places.append(tuple([_place(buffer, known) for buffer in step.buffers]))
        self.sizes = [root.nbytes for root in roles]

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        """The same for these tensors, which must be like those that it was learnt with: as many memories, of
        the same sizes. What the kernels write in place they write to these."""
        with turn.lock:
            roles = memories(tensors)
            assert [root.nbytes for root in roles] == self.sizes, "the tensors are not like the first ones"
            taken = {id(root) for root in roles}
            out = next(root for root in self.outs if id(root) not in taken)
            table = [*roles, out]
            for step, places in zip(self.steps, self.places):
                pairs = zip(step.buffers, places)
                buffers = [kept if at is None else _piece(table[at.number], at) for kept, at in pairs]
                again = step._replace(buffers=tuple(buffers))
                again.run()
                for see in recorder:
                    see(again)
            base = memory_of(self.form.uop)
            node = adopt(UOp.new_buffer(base.arg.size, base.dtype, out.device), out)
            return Tensor._wrap(self.form.uop.substitute({base: node}))


def learn(compute: Callable[[], Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, Recipe | None]:
    """Compute a tensor, and note how. `tensors` are all whose memory differs when it is done again; they are
    in memory, or made of what is.

    The recipe is None where there is none: the result is a piece of other memory, or a tensor besides it got
    memory that lasts.
    """
    steps: list[Step] = []
    with turn.lock:
        roles = memories(tensors)
        births = TensorMemory.births
        outermost = not recorder
        recorder.append(steps.append)
        try:
            result = compute()
            realize([result])
        finally:
            recorder.remove(steps.append)
            if outermost:
                arenas_of_record.clear()
        made = [t for t in Tensor.live if _is_new(t, births)]
        whole = memory_of(result.uop).arg.size == prod(result.shape)
        alone = len(made) == 1 and made[0] is result
        return result, Recipe(steps, roles, result) if whole and alone else None


def _is_new(tensor: Tensor, births: int) -> bool:
    if not is_realized(tensor.uop):
        return False
    memory = buffer_so_far(memory_of(tensor.uop))
    return isinstance(memory, TensorMemory) and memory.birth > births


def overwriting(tensors: Sequence[Tensor]) -> None:
    """Tell that recipes are about to write to the memory of these tensors: whoever reads its present contents
    is computed first."""
    with turn.lock:
        nodes = {memory_of(tensor.uop) for tensor in tensors}
        realize(readers_of(nodes, {id(tensor) for tensor in tensors}))
        for node in nodes:
            owned(node)
        forget_overwritten(nodes)


def memories(tensors: Sequence[Tensor]) -> list[Buffer]:
    """The memories that tensors are made of, in the order of their graphs; none that may be exchanged."""
    return [owned(node) for tensor in tensors for node in tensor.uop.toposort() if node.op is Ops.BUFFER]


def _place(buffer: Buffer, known: dict[int, int]) -> _Place | None:
    number = known.get(id(buffer.base or buffer))
    return None if number is None else _Place(number, buffer.offset, buffer.nbytes)


def _piece(root: Buffer, at: _Place) -> Buffer:
    return root if at.offset == 0 and at.nbytes == root.nbytes else root.view(at.offset, at.nbytes)

"""One prompt on one model, without an engine: what scripts and tests use.

model = Model.load("smollm2.gguf")
for token in generate(model, prompt_ids, limit=20):
    print(token)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from whit.helpers import ArgumentError

if TYPE_CHECKING:
    from whit.llm.model import Cache, Model
    from whit.llm.sampling import SamplingParams
    from whit.tensor import Tensor


def generate(
    model: Model,
    prompt: Sequence[int],
    limit: int | None = None,
    *,
    params: SamplingParams | None = None,
    end_ids: Collection[int] = (),
    cache: Cache | None = None,
) -> Iterator[int]:
    """The tokens that follow a prompt, one by one, up to `limit`, to the end of the context or to a token of
    `end_ids` (which is not given).

    params: how they are drawn (default: the most likely one); cache: a cache to use, from position 0 of slot
    0
    Errors: ArgumentError for an empty prompt, or one that the context does not hold
    """
    from whit.llm.sampling import RowState, Sampler, SamplingParams

    room = cache.context if cache is not None else model.context
    if not 0 < len(prompt) < room:
        raise ArgumentError(
            f"generate from {len(prompt)} tokens",
            because=f"a prompt has 1 to {room - 1} of them in a context of {room}",
            fix="pass a shorter text, or load the model with a longer context" if prompt else "pass a token",
        )
    wanted = room - len(prompt) if limit is None else min(limit, room - len(prompt))
    if cache is None:
        cache = model.new_cache(1, min(room, len(prompt) + wanted))
    sampler, state = Sampler(), RowState(params or SamplingParams(temperature=0.0), prompt, end_ids=end_ids)
    logits = read_prompt(model, prompt, cache)
    for place in range(len(prompt), len(prompt) + wanted):
        token = sampler.sample(logits, [state])[0].token
        if token in end_ids:
            return
        state.accept(token)
        yield token
        if place + 1 < len(prompt) + wanted:
            logits = model.forward([[token]], [place], cache)


def read_prompt(model: Model, prompt: Sequence[int], cache: Cache, slot: int = 0) -> Tensor:
    """Read a prompt of any length into a slot, in pieces. Logits (1, V) after its last token."""
    from whit.llm.model import CHUNK

    for place in range(0, len(prompt), CHUNK):
        logits = model.forward([list(prompt[place : place + CHUNK])], [place], cache, [slot])
    return logits

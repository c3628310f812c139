"""A language model from a GGUF file: tokens in, logits out, keys and values kept for later.

Weights stay as they are in the file, in blocks, mapped and not copied; kernels decode them where they read
them. A `Cache` holds keys and values of several sequences (slots). `Model.forward` reads a few tokens of some
slots, each at its own position; one recorded plan serves all positions, one for each number of slots and
tokens.

    model = Model.load("smollm2.gguf")
    cache = model.new_cache(1)
    logits = model.forward([[504, 3575, 282, 4649, 314]], [0], cache)     # (1, vocabulary) of the last token
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from whit.engine.jit import TinyJit
from whit.engine.repeat import Recipe, learn, overwriting
from whit.helpers import ArgumentError, ceildiv
from whit.llm.arch import Config, check_tensors, read_config
from whit.llm.attention import BLOCK, Memory, attend, rotate, seen_by
from whit.nn.block_products import multiply
from whit.nn.blocks import decode
from whit.nn.gguf import GGUF, open_gguf
from whit.tensor import Tensor
from whit.uop import UOp, dtypes
from whit.uop.dtype import to_dtype

CHUNK = 512  # the most tokens of a sequence in one pass
ACTIVATIONS = ("float32", "int8")  # what vectors are where they meet weights in blocks
CACHE_TYPES = ("float16", "bfloat16", "float32", "int8")


class Matrix:
    """A weight (rows, columns) as the file has it, and its bias. `rounds`: vectors are rounded to 8 bits
    where they meet weights in blocks (nn.block_products)."""

    def __init__(self, gguf: GGUF, name: str, rounds: bool) -> None:
        entry = gguf.tensors[f"{name}.weight"]
        self.type = entry.type
        self.rows, self.columns = entry.shape
        self.raw = gguf.raw(f"{name}.weight") if entry.type.dtype is None else gguf.load(f"{name}.weight")
        self.bias = _vector(gguf, f"{name}.bias")
        self.rounds = rounds and entry.type.dtype is None

    def values(self, raw: Tensor) -> Tensor:
        """Rows as float32 (…, columns)."""
        return raw.cast(dtypes.float32) if self.type.dtype is not None else decode(raw, self.type)

    def __call__(self, x: Tensor) -> Tensor:
        """x (…, columns) -> (…, rows)."""
        if self.rounds:
            out = multiply(x, self.raw, self.type)
        else:
            out = x.matmul(self.values(self.raw).transpose(-1, -2))
        return out if self.bias is None else out + self.bias

    def take(self, numbers: Tensor) -> Tensor:
        """The rows of those numbers: (…,) -> (…, columns)."""
        return self.values(self.raw.take(numbers, 0))


def _vector(gguf: GGUF, name: str) -> Tensor | None:
    return gguf.load(name).cast(dtypes.float32) if name in gguf.tensors else None


class Layer:
    """The weights of one layer by name; absent ones are None."""

    def __init__(self, gguf: GGUF, number: int, rounds: bool) -> None:
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Tensor] = {}
        start = f"blk.{number}."
        for name in gguf.tensors:
            if not name.startswith(start):
                continue
            short, _, kind = name[len(start) :].rpartition(".")
            if "norm" in short:
                self.vectors[f"{short}.{kind}"] = gguf.load(name).cast(dtypes.float32)
            elif kind == "weight":
                self.matrices[short] = Matrix(gguf, f"{start}{short}", rounds)

    @property
    def tensors(self) -> list[Tensor]:
        """All weights, in the order of their names."""
        parts = [vars(self.matrices[name]) for name in sorted(self.matrices)]
        found = [v for part in parts for v in part.values() if isinstance(v, Tensor)]
        return found + [self.vectors[name] for name in sorted(self.vectors)]

    @property
    def kind(self) -> Hashable:
        """Equal for layers that differ in their numbers only."""
        matrices = [(name, m.type.name, m.rounds) for name, m in sorted(self.matrices.items())]
        return (*matrices, *sorted(self.vectors), *[(t.shape, t.dtype) for t in self.tensors])


class Cache:
    """Keys and values of `slots` sequences of up to `context` positions, and the plans that use them.

    A few positions more than `context` exist: a padded chunk ends there, rows that pad a batch write there,
    and positions are read in blocks of `attention.BLOCK`.
    """

    def __init__(self, model: Model, slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        self.capacity = context + CHUNK + BLOCK
        config = model.config
        self.dtype = model.cache_dtype
        heads, keys, values = config.kv_heads, config.head_dim, config.value_dim
        self.keys = [Memory(slots, heads, self.capacity, keys, self.dtype) for _ in range(config.layers)]
        self.values = [Memory(slots, heads, self.capacity, values, self.dtype) for _ in range(config.layers)]
        Tensor.realize_all(self.tensors)
        self.step = TinyJit(_Step(model, self))

    @property
    def tensors(self) -> list[Tensor]:
        """All memory: (slots, heads, positions, numbers) each."""
        return [tensor for memory in (*self.keys, *self.values) for tensor in memory.tensors]

    def of_layer(self, number: int) -> list[Tensor]:
        """The memory of one layer."""
        return [*self.keys[number].tensors, *self.values[number].tensors]

    @property
    def nbytes(self) -> int:
        return sum([_bytes_of(t) for t in self.tensors])

    def save(self, slot: int, length: int) -> bytes:
        """The first `length` positions of a slot."""
        parts = [bytes(t[slot, :, :length].bitcast(dtypes.uint8).data()) for t in self.tensors]
        return b"".join(parts)

    def restore(self, slot: int, length: int, data: bytes) -> None:
        """Put back what `save` gave. ArgumentError if it is of another size."""
        view, done = memoryview(data), 0
        sizes = [t.shape[1] * length * t.shape[3] * t.dtype.itemsize for t in self.tensors]
        if sum(sizes) != len(view):
            raise ArgumentError(
                f"restore {length} positions from {len(view)} bytes",
                because=f"that many take {sum(sizes)} bytes in this cache",
                fix="restore what this model's cache saved, with the same length",
            )
        for tensor, size in zip(self.tensors, sizes):
            piece = Tensor(view[done : done + size], dtype=dtypes.uint8).bitcast(tensor.dtype)
            tensor[slot, :, :length] = piece.reshape(tensor.shape[1], length, tensor.shape[3])
            done += size
        Tensor.realize_all(self.tensors)


def _bytes_of(tensor: Tensor) -> int:
    size = tensor.nbytes()
    assert isinstance(size, int), "caches have sizes"
    return size


class Model:
    """A loaded model. `config` has its numbers, `gguf` its file."""

    def __init__(
        self,
        gguf: GGUF,
        context: int | None = None,
        cache_dtype: str = "float16",
        activations: str = "float32",
    ) -> None:
        if activations not in ACTIVATIONS:
            raise ArgumentError(
                f"activations {activations!r}",
                because="vectors meet weights in blocks as they are or rounded to 8 bits",
                fix=f"one of {ACTIVATIONS}",
            )
        if cache_dtype not in CACHE_TYPES:
            raise ArgumentError(
                f"cache_dtype {cache_dtype!r}",
                because="keys and values are floats, or int8 with a scale for each head and position",
                fix=f"one of {CACHE_TYPES}",
            )
        self.gguf, self.config = gguf, read_config(gguf)
        check_tensors(gguf, self.config)
        most = self.config.context
        if context is not None and not 0 < context <= most:
            raise ArgumentError(
                f"a context of {context}",
                because=f"the model was trained for {most}",
                fix=f"choose 1 to {most}",
            )
        self.context = context or most
        self.cache_dtype = to_dtype(cache_dtype)
        config = self.config
        rounds = activations == "int8"
        self.embedding = Matrix(gguf, "token_embd", rounds)
        self.output = Matrix(gguf, "output", rounds) if "output.weight" in gguf.tensors else self.embedding
        self.places = Matrix(gguf, "position_embd", rounds) if config.arch.learned_positions else None
        self.layers = [Layer(gguf, number, rounds) for number in range(config.layers)]
        self.norm = {
            kind: v for kind in ("weight", "bias") if (v := _vector(gguf, f"output_norm.{kind}")) is not None
        }
        self.frequencies = self._frequencies()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        context: int | None = None,
        cache_dtype: str = "float16",
        activations: str = "float32",
    ) -> Model:
        """Open a GGUF file. Its weights are mapped, and read when they are used.

        context:     the most positions of a sequence (default: what the model was trained for)
        cache_dtype: what keys and values are kept in: "float16", "bfloat16", "float32", or "int8" with a
                     scale for each head and position
        activations: what vectors are where they meet weights in blocks: "float32", or "int8", rounded to 8
                     bits as llama.cpp does: faster, and less exact
        Errors:  FileError, FileFormatError (broken file, unknown architecture, missing or unexpected
                 tensors), ArgumentError for a context, cache_dtype or activations that cannot be
        """
        return cls(open_gguf(path), context, cache_dtype, activations)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab

    def new_cache(self, slots: int = 1, context: int | None = None) -> Cache:
        """Room for keys and values of `slots` sequences. ArgumentError for sizes that cannot be."""
        size = self.context if context is None else context
        if slots < 1 or not 0 < size <= self.context:
            raise ArgumentError(
                f"a cache of {slots} slots of {size} positions",
                because=f"a slot has 1 to {self.context} positions, and there is at least one",
                fix="choose other numbers, or load the model with a longer context",
            )
        return Cache(self, slots, size)

    def _frequencies(self) -> dict[bool, Tensor]:
        """The angle of each pair at position 1, for layers with a window and others."""
        rope, factors = self.config.rope, None
        name = "rope_freqs"
        if rope.scaling == "longrope":
            name = f"rope_factors_{'long' if self.context > rope.original_context else 'short'}"
        if f"{name}.weight" in self.gguf.tensors:
            factors = self.gguf.load(f"{name}.weight").cast(dtypes.float32).tolist()
        if not self.config.arch.rope:
            return {}
        local = {self.config.local(layer) for layer in range(self.config.layers)}
        return {
            kind: Tensor(rope.frequencies(kind, factors), dtype=dtypes.float32).realize() for kind in local
        }

    def forward(
        self,
        tokens: Tensor | Sequence[Sequence[int]],
        start: Sequence[int],
        cache: Cache,
        slots: Sequence[int] | None = None,
        last: Sequence[int] | None = None,
        *,
        every: bool = False,
        padded: bool = False,
    ) -> Tensor:
        """Read `tokens` into the cache and tell what comes next.

        Shapes:  tokens (B, T) int32: row b holds positions start[b] … of slot slots[b] (default: 0, 1, …), of
                 which the first last[b] + 1 count (default: all; the rest is padding, and is overwritten
                 later) -> logits (B, V) float32 of the tokens number last[b]; with `every` (B, T, V) of all
                 tokens; with `padded` perhaps more rows than B, whose values mean nothing
        Errors:  ArgumentError for rows, positions or slots that do not fit
        """
        rows, count = _shape(tokens)
        chosen = list(range(rows)) if slots is None else list(slots)
        ends = [count - 1] * rows if last is None else list(last)
        _check(cache, rows, count, start, chosen, ends)
        width, height = _padded(count), _padded(rows)
        if isinstance(tokens, Tensor) and (width, height) == (count, rows):
            given = tokens
        else:
            listed = tokens.tolist() if isinstance(tokens, Tensor) else tokens
            lines = [[*line, *[0] * (width - count)] for line in listed]
            lines += [[0] * width] * (height - rows)
            given = Tensor(lines, dtype=dtypes.int32)
        firsts = [*start, *[cache.context] * (height - rows)]
        chosen += [chosen[0]] * (height - rows)
        ends += [0] * (height - rows)
        logits = cache.step(
            given, *_spans(self.config, cache, firsts, chosen, width), _rows(ends, width, every)
        )
        if every:
            return logits[:rows, :count]
        return logits if rows == height or padded else logits[:rows]


def _shape(tokens: Tensor | Sequence[Sequence[int]]) -> tuple[int, int]:
    if isinstance(tokens, Tensor):
        if tokens.ndim != 2:
            raise ArgumentError(
                f"forward tokens of {tokens.ndim} axes", because="they are rows", fix="reshape them"
            )
        return tokens.shape[0], tokens.shape[1]
    sizes = {len(line) for line in tokens}
    if len(sizes) != 1:
        raise ArgumentError(
            f"forward {len(tokens)} rows of tokens",
            because="rows are of one length",
            fix="pad them, and pass `last`",
        )
    return len(tokens), sizes.pop()


def _padded(count: int) -> int:
    """The next power of two: few numbers of tokens, few plans."""
    return 1 << (count - 1).bit_length()


def _check(
    cache: Cache, rows: int, count: int, start: Sequence[int], slots: Sequence[int], last: Sequence[int]
) -> None:
    what = f"forward {rows} rows of {count} tokens"
    if not 0 < count <= CHUNK or not rows:
        raise ArgumentError(
            what, because=f"a pass takes 1 to {CHUNK} of them", fix="pass longer texts in pieces"
        )
    if not rows == len(start) == len(slots) == len(last):
        raise ArgumentError(
            what,
            because=f"there are {len(start)} starts, {len(slots)} slots and {len(last)} ends",
            fix="one a row",
        )
    if len(set(slots)) != rows or not all(0 <= slot < cache.slots for slot in slots):
        raise ArgumentError(
            f"{what} of slots {list(slots)}",
            because=f"the cache has slots 0 to {cache.slots - 1}, each of which can be used once a pass",
            fix="choose others",
        )
    for first, end in zip(start, last):
        if first < 0 or not 0 <= end < count or first + end >= cache.context:
            raise ArgumentError(
                f"{what} at position {first}, the last of them number {end}",
                because=f"the cache has {cache.context} positions",
                fix="shorten the text, or make a cache with a longer context",
            )


def _spans(
    config: Config, cache: Cache, firsts: list[int], slots: list[int], count: int
) -> tuple[list[UOp], list[UOp], Span, Tensor | None, Tensor | None]:
    """Where rows lie in the cache, as bound variables: (starts, slots, span, positions, slots). One row needs
    no tensors."""
    limit = cache.capacity - BLOCK - count
    lots = [UOp.variable(f"slot{n}", 0, max(cache.slots - 1, 1)).bind(slot) for n, slot in enumerate(slots)]
    starts = [UOp.variable(f"start{n}", 0, limit).bind(first) for n, first in enumerate(firsts)]
    real = [first for first in firsts if first < cache.context] or firsts
    low = max(0, min(real) - config.window + 1) if config.window else 0
    span = max(real) - low
    widest = min(config.window, limit) if config.window and len(firsts) == 1 else limit
    bounds = Span(
        UOp.variable("low", 0, limit).bind(low),
        UOp.variable("span", 0, widest).bind(span),
        UOp.variable("reach", 1, ceildiv(limit + count, BLOCK)).bind(ceildiv(low + span + count, BLOCK)),
        UOp.variable("near", 1, ceildiv(widest + count, BLOCK)).bind(ceildiv(span + count, BLOCK)),
    )
    if len(firsts) == 1:
        return starts, lots, bounds, None, None
    return starts, lots, bounds, _numbers(firsts), _numbers(slots)


class Span(NamedTuple):
    """What a pass reads of the cache: low + span is the furthest start, and nothing before low is in a
    window; `reach` blocks of positions are read from 0 on, `near` from low on."""

    low: UOp
    span: UOp
    reach: UOp
    near: UOp


def _numbers(values: Iterable[int]) -> Tensor:
    return Tensor(list(values), dtype=dtypes.int32)


def _rows(ends: list[int], count: int, every: bool) -> Tensor | bool:
    """Numbers of the rows whose logits are wanted, among all tokens; True for all of them."""
    if every or count == 1:
        return every
    return _numbers(row * count + end for row, end in enumerate(ends))


class _Step:
    """The tensors of one pass, of which TinyJit records the kernels."""

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model, self.cache, self.config = model, cache, model.config
        self.__name__ = f"{model.config.arch.name} step"

    def __call__(
        self,
        tokens: Tensor,
        starts: list[UOp],
        slots: list[UOp],
        span: Span,
        firsts: Tensor | None,
        lots: Tensor | None,
        wanted: Tensor | bool,
    ) -> Tensor:
        config, model = self.config, self.model
        batch, count = tokens.shape
        steps = Tensor.arange(count, dtype=dtypes.int32).reshape(1, count)
        if firsts is None:
            positions = steps + (span.low + span.span)
        else:
            positions = steps + firsts.reshape(batch, 1)  # (B, T)
        where = _Where(starts, slots, span, positions, lots, self._turns(positions))
        x = model.embedding.take(tokens) * config.embedding_scale  # (B, T, dim)
        if model.places is not None:
            x = x + model.places.take(positions)
        x = self.through(x, where)
        if isinstance(wanted, Tensor):
            x = x.reshape(batch * count, config.dim).take(wanted, 0)
        elif not wanted:
            x = x.reshape(batch, config.dim)
        logits = model.output(self.normed(x, model.norm, "")) * config.logit_scale
        if config.logit_cap:
            logits = (logits / config.logit_cap).tanh() * config.logit_cap
        return logits.realize()

    def through(self, x: Tensor, where: _Where) -> Tensor:
        """All layers. Of those that are alike one is built; the others run its kernels on their weights."""
        cache = self.cache
        Tensor.realize_all([x, *[part for pair in where.turns.values() for part in pair]])
        overwriting(cache.tensors)
        recipes: dict[Hashable, Recipe | None] = {}
        for number, layer in enumerate(self.model.layers):
            own = cache.of_layer(number)
            kind = (layer.kind, self.config.local(number), self.config.turns(number))
            recipe, tensors = recipes.get(kind), [x, *own, *layer.tensors]
            if recipe is not None:
                x = recipe.run(tensors)
                continue

            def build(number: int = number, layer: Layer = layer, x: Tensor = x) -> Tensor:
                out = self.layer(number, layer, x, where)
                Tensor.realize_all([out, *cache.of_layer(number)])
                return out

            x, recipes[kind] = learn(build, tensors)
        return x

    def _turns(self, positions: Tensor) -> dict[bool, tuple[Tensor, Tensor]]:
        """Cosines and sines of all positions, (B, 1, T, pairs), computed once for all layers."""
        out = {}
        for kind, frequencies in self.model.frequencies.items():
            angles = positions.cast(dtypes.float32).unsqueeze(-1) * frequencies
            size = self.config.rope.magnitude(kind)
            cos, sin = angles.cos() * size, angles.sin() * size
            out[kind] = cos.unsqueeze(1).contiguous(), sin.unsqueeze(1).contiguous()
        return out

    def layer(self, number: int, layer: Layer, x: Tensor, where: _Where) -> Tensor:
        arch, scale = self.config.arch, self.config.residual_scale
        v = layer.vectors
        read = x if arch.norms == "after" else self.normed(x, v, "attn_norm.")
        after = self.normed(x, v, "attn_norm_2.") if "attn_norm_2.weight" in v else read
        mixed = self.attention(number, layer, after, where)
        if arch.norms != "before":
            mixed = self.normed(mixed, v, "post_attention_norm.")
        if self.config.parallel:
            if arch.parallel_norms == 2:
                read = self.normed(x, v, arch.ffn_norm_name + ".")
            return x + (mixed + self.ffn(layer, read)) * scale
        x = x + mixed * scale
        read = x if arch.norms == "after" else self.normed(x, v, arch.ffn_norm_name + ".")
        fed = self.ffn(layer, read)
        if arch.norms != "before":
            fed = self.normed(fed, v, "post_ffw_norm.")
        return x + fed * scale

    def normed(self, x: Tensor, vectors: dict[str, Tensor], name: str, kind: str = "") -> Tensor:
        config = self.config
        weight, bias = vectors.get(name + "weight"), vectors.get(name + "bias")
        if (kind or config.arch.norm) == "rms":
            return x.rms_norm(weight, config.eps)
        out = x.layernorm(eps=config.eps)
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def attention(self, number: int, layer: Layer, x: Tensor, where: _Where) -> Tensor:
        config, cache = self.config, self.cache
        batch, count, _ = x.shape
        q, k, v = self.queries_keys_values(layer, x)
        local = config.local(number)
        if config.turns(number) and where.turns:
            neighbours = config.arch.rope == "pairs"
            q, k = rotate(q, *where.turns[local], neighbours), rotate(k, *where.turns[local], neighbours)
        if batch > 1:  # computed for all rows at once, then written row by row
            k, v = k.contiguous(), v.contiguous()
        keys, values = cache.keys[number], cache.values[number]
        for row, (slot, first) in enumerate(zip(where.slots, where.starts)):
            first = where.span.low + where.span.span if batch == 1 else first
            keys.write(slot, first, k[row])
            values.write(slot, first, v[row])
        low, blocks, window = (
            (where.span.low, where.span.near, config.window) if local else (0, where.span.reach, 0)
        )
        part = where.slots[0] if where.lots is None else None
        k, v = (memory.read(part, where.lots, low, blocks) for memory in (keys, values))
        seen = seen_by(where.positions, low, blocks, window)
        out = attend(q, k, v, config.attention_scale, seen, cap=config.attention_cap)
        return layer.matrices["attn_output"](out.transpose(1, 2).reshape(batch, count, -1))

    def queries_keys_values(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, heads, T, size of a head) each."""
        config, m = self.config, layer.matrices
        sizes = [
            (config.heads, config.head_dim),
            (config.kv_heads, config.head_dim),
            (config.kv_heads, config.value_dim),
        ]
        if "attn_qkv" in m:
            parts = m["attn_qkv"](x).split([heads * size for heads, size in sizes], dim=-1)
        else:
            parts = m["attn_q"](x), m["attn_k"](x), m["attn_v"](x)
        if config.clamp_qkv:
            parts = tuple(p.clip(-config.clamp_qkv, config.clamp_qkv) for p in parts)
        out = []
        for part, (heads, size), name in zip(parts, sizes, ("attn_q_norm.", "attn_k_norm.", "")):
            norm = config.arch.head_norm if name + "weight" in layer.vectors else ""
            if norm == "row":
                part = self.normed(part, layer.vectors, name)
            part = part.reshape(*part.shape[:2], heads, size)
            if norm.startswith("head"):
                part = self.normed(part, layer.vectors, name)
            out.append(part.transpose(1, 2))
        return out[0], out[1], out[2]

    def ffn(self, layer: Layer, x: Tensor) -> Tensor:
        arch, m = self.config.arch, layer.matrices
        up = m["ffn_up"](x)
        if arch.packed_ffn:
            gate, up = up.chunk(2, dim=-1)
            up = _active(gate, arch.activation) * up
        elif arch.gated:
            # two kernels: one with two sums of products has no good blocking
            up = _active(m["ffn_gate"](x).contiguous(), arch.activation) * up
        else:
            up = _active(up, arch.activation)
        return m["ffn_down"](up)


class _Where:
    """The places of a pass: rows in the cache, positions, and what they turn by."""

    def __init__(
        self,
        starts: list[UOp],
        slots: list[UOp],
        span: Span,
        positions: Tensor,
        lots: Tensor | None,
        turns: dict[bool, tuple[Tensor, Tensor]],
    ) -> None:
        self.starts, self.slots, self.span = starts, slots, span
        self.positions, self.lots, self.turns = positions, lots, turns


def _active(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return x.silu()
    if kind == "relu2":
        return x.relu().square()
    return x.gelu() if kind == "gelu" else 0.5 * x * (1 + (x * 0.5**0.5).erf())

"""What language models are made of: a table of architectures, and the sizes of one model read from its file.

All of them are the same decoder: an embedding, layers of attention and of a feed-forward net, a norm and
logits. They differ in the choices that a row of `ARCHITECTURES` states: where norms stand and of which kind,
how positions enter, the activation, which biases there are. A new dense model is a row; its numbers come from
the file's metadata.

    before    x + attention(norm(x)), then x + ffn(norm(x))
    after     x + norm(attention(x)), then x + norm(ffn(x))
    both      x + norm(attention(norm(x))), then x + norm(ffn(norm(x)))
    parallel  x + attention(norm(x)) + ffn(norm(x))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from whit.helpers import FileFormatError
from whit.uop.uop import show_shape

if TYPE_CHECKING:
    from whit.nn.gguf import GGUF

QKV = ("attn_q", "attn_k", "attn_v", "attn_qkv")
ATTENTION = (*QKV, "attn_output")
FFN = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Arch:
    """A row of the table. Sizes are in `Config`; the tensors of a file settle what it leaves open."""

    name: str
    rope: Literal["pairs", "halves", ""] = "pairs"  # neighbours turn together, or the halves of a head
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    norms: Literal["before", "after", "both"] = "before"
    parallel: Literal["", "always", "stated", "one norm"] = ""  # "one norm": where a layer has no ffn_norm
    parallel_norms: int = 1  # norms of a parallel layer, for attention and ffn or one for both
    activation: Literal["silu", "gelu", "gelu erf", "relu2"] = "silu"
    gated: bool = True
    packed_qkv: Literal["", "always", "maybe"] = ""  # one matrix for queries, keys and values
    packed_ffn: bool = False  # one matrix for gate and up
    biases: tuple[str, ...] = ()  # matrices that may have one
    head_norm: Literal["", "head", "head maybe", "row"] = (
        ""  # of queries and keys: of each head, or of all together
    )
    learned_positions: bool = False
    embedding_scale: Literal["", "root"] = ""  # times the root of the width
    attention_root: Literal["head", "width"] = "head"
    global_every: int = 0  # each so manieth layer sees everything, the others a window; 0: all see the same
    global_first: bool = False
    local_base: float | None = None  # rope's base in layers with a window, if it differs
    rope_layers: Literal["all", "local", "3 of 4"] = "all"
    logit_scale: Literal["times", "over"] = "times"
    ffn_norm_name: str = "ffn_norm"


_FULL_BIAS = (*ATTENTION, *FFN)
_ROWS = [
    Arch("llama", biases=(*ATTENTION, *FFN)),  # Llama 1 to 3, Mistral, SmolLM, TinyLlama, Yi, …
    Arch("arcee", activation="relu2", gated=False),
    Arch("smollm3", rope_layers="3 of 4"),
    Arch("granite", biases=_FULL_BIAS, logit_scale="over"),
    Arch("ernie4_5", biases=ATTENTION),
    Arch("glm4", norms="both", packed_ffn=True, biases=QKV),
    Arch("olmo", norm="layer", norm_weight=False),
    Arch("olmo2", rope="halves", norms="after", head_norm="row"),
    Arch("exaone4", rope="halves", norms="after", head_norm="head", global_every=4, rope_layers="local"),
    Arch("qwen2", rope="halves", biases=QKV),
    Arch("qwen3", rope="halves", biases=QKV, head_norm="head"),
    Arch("seed_oss", rope="halves", biases=ATTENTION, ffn_norm_name="post_attention_norm"),
    Arch("gemma", rope="halves", activation="gelu", embedding_scale="root"),
    Arch("gemma2", rope="halves", activation="gelu", embedding_scale="root", norms="both", global_every=2),
    Arch("gemma3", rope="halves", activation="gelu", embedding_scale="root", norms="both", head_norm="head",
         global_every=6, local_base=10000.0),
    Arch("phi2", rope="halves", norm="layer", norm_bias=True, parallel="always", activation="gelu",
    gated=False,
         packed_qkv="maybe", biases=(*_FULL_BIAS, "output")),
    Arch("phi3", rope="halves", packed_qkv="maybe", packed_ffn=True),  # Phi 3, Phi 4
    Arch("gpt2", rope="", norm="layer", norm_bias=True, activation="gelu", gated=False, packed_qkv="always",
         biases=_FULL_BIAS, learned_positions=True),
    Arch("starcoder", rope="", norm="layer", norm_bias=True, activation="gelu", gated=False,
    packed_qkv="always",
         biases=_FULL_BIAS, learned_positions=True),
    Arch("starcoder2", rope="halves", norm="layer", norm_bias=True, activation="gelu", gated=False,
         biases=_FULL_BIAS),
    Arch("gptneox", rope="halves", norm="layer", norm_bias=True, parallel="stated", parallel_norms=2,
         activation="gelu erf", gated=False, packed_qkv="always", biases=_FULL_BIAS),
    Arch("falcon", rope="halves", norm="layer", norm_bias=True, parallel="always", activation="gelu erf",
         gated=False, packed_qkv="always", biases=_FULL_BIAS),
    Arch("nemotron", rope="halves", norm="layer", norm_bias=True, activation="relu2", gated=False,
         biases=_FULL_BIAS),
    Arch("stablelm", rope="halves", norm="layer", norm_bias=True, parallel="one norm", biases=QKV,
         head_norm="head maybe"),
    Arch("command-r", norm="layer", parallel="always", head_norm="head maybe"),
    Arch("cohere2", norm="layer", parallel="always", global_every=4, rope_layers="local"),
]  # fmt: skip
ARCHITECTURES: Mapping[str, Arch] = {row.name: row for row in _ROWS}


# ---- the sizes of a model
# --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn queries and keys: pair i by the angle position * base ** (-2i / dim); scaling
    makes it less: "linear" all of them, "yarn" those of long waves, "longrope" by factors from the file."""

    dim: int
    base: float
    local_base: float
    scaling: Literal["none", "linear", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def frequencies(self, local: bool, factors: list[float] | None = None) -> list[float]:
        """The angle of each pair at position 1: dim / 2 numbers. `factors` (of the file) divide them."""
        base = self.local_base if local else self.base
        plain = [base ** (-2 * i / self.dim) for i in range(self.dim // 2)]
        if factors is not None:
            plain = [f / by for f, by in zip(plain, factors, strict=True)]
        if local and self.local_base != self.base:
            return plain
        if self.scaling == "linear":
            return [f / self.factor for f in plain]
        return self._yarn(plain, base) if self.scaling == "yarn" else plain

    def _yarn(self, plain: list[float], base: float) -> list[float]:
        """Waves that turn more than beta_fast times in the original context stay, those below beta_slow are
        stretched by the factor, with a ramp between (Peng et al. 2023)."""

        def pair_of(turns: float) -> float:
            return self.dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_of(self.beta_fast)), 0)
        high = min(math.ceil(pair_of(self.beta_slow)), self.dim - 1)
        out = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            out.append(f / self.factor * ramp + f * (1 - ramp))
        return out

    def magnitude(self, local: bool) -> float:
        """What sines and cosines are multiplied by."""
        if local and self.local_base != self.base:
            return 1.0
        if self.scaling == "yarn":
            grown = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
            return grown * (1.0 if self.attention_factor is None else self.attention_factor)
        if self.scaling == "longrope":
            return 1.0 if self.attention_factor is None else self.attention_factor
        return 1.0


@dataclass(frozen=True, slots=True)
class Config:
    """A model's numbers."""

    arch: Arch
    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocab: int
    context: int
    eps: float
    rope: Rope
    window: int = 0  # positions that a local layer sees, itself included; 0: all
    global_every: int = 0
    parallel: bool = False
    attention_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap)
    logit_cap: float = 0.0
    clamp_qkv: float = 0.0

    def local(self, layer: int) -> bool:
        """Whether a layer sees only the last `window` positions."""
        if not self.window:
            return False
        return self.global_every == 0 or (layer + 1) % self.global_every != 0

    def turns(self, layer: int) -> bool:
        """Whether a layer's queries and keys know their positions."""
        if self.arch.rope_layers == "local":
            return not self.window or self.local(layer)
        if self.arch.rope_layers == "3 of 4":
            return (layer + 1) % 4 != 0
        return bool(self.arch.rope)


class _Reader:
    """Typed values of a file's metadata, with errors that name them."""

    def __init__(self, gguf: GGUF, arch: str) -> None:
        self.path, self.values, self.tensors, self.arch = gguf.path, gguf.metadata, gguf.tensors, arch

    def refuse(self, reason: str, fix: str = "convert the model again") -> FileFormatError:
        return FileFormatError(f"load {self.path}", because=reason, fix=fix)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; per-layer arrays count if all are equal."""
        name = f"{self.arch}.{key}"
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.refuse(f"the metadata lacks {name}")
            return default
        if not isinstance(value, (int, float, str)) and hasattr(value, "__len__") and len(value):
            each = set(value)
            if len(each) > 1:
                raise self.refuse(f"{name} differs between layers", "models of that kind are not supported")
            value = each.pop()
        if isinstance(value, (str, bool)) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refuse(f"{name} is {value!r}, and no number")
        return value

    def size(self, key: str, default: int | None = None, most: int = 1 << 24) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or not 0 < value <= most:
            raise self.refuse(f"{self.arch}.{key} is {value!r}, which is no size from 1 to {most}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(f"{self.arch}.{key}", default)
        if not isinstance(value, str):
            raise self.refuse(f"{self.arch}.{key} is {value!r}, and no text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(f"{self.arch}.{key}", default)
        if not isinstance(value, bool):
            raise self.refuse(f"{self.arch}.{key} is {value!r}, neither true nor false")
        return value


def read_config(gguf: GGUF) -> Config:
    """A model's description from its metadata.

    FileFormatError for an architecture that the table does not have, or numbers that are missing or
    senseless.
    """
    name = gguf.metadata.get("general.architecture")
    arch = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if arch is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise FileFormatError(
            f"load {gguf.path}",
            because=f"its architecture is {name!r}, which whit does not know",
            fix=f"use a model of one of {known}",
        )
    read = _Reader(gguf, arch.name)
    dim, heads = read.size("embedding_length"), read.size("attention.head_count")
    kv_heads = read.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise read.refuse(f"{heads} heads of queries cannot share {kv_heads} heads of keys")
    head_dim = read.size("attention.key_length", max(dim // heads, 1))
    if "token_embd.weight" not in gguf.tensors:
        raise read.refuse("the tensor 'token_embd.weight' is missing")
    layers = read.size("block_count", most=10_000)
    window = read.number("attention.sliding_window", 0) if _has_window(arch, read) else 0
    root = dim / heads if _root_of_width(arch, layers) else head_dim
    kind = "rms_" if arch.norm == "rms" else ""
    default_eps = 1e-5 if arch.norm == "layer" else None
    logit_scale = read.number("logit_scale", 1.0) or 1.0
    return Config(
        arch=arch,
        layers=layers,
        dim=dim,
        hidden=read.size("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=read.size("attention.value_length", head_dim),
        vocab=int(gguf.tensors["token_embd.weight"].shape[0]),
        context=read.size("context_length", most=1 << 31),
        eps=read.number(f"attention.layer_norm_{kind}epsilon", default_eps),
        rope=_read_rope(arch, read, head_dim),
        window=int(window),
        global_every=arch.global_every,
        parallel=_is_parallel(arch, read, gguf),
        attention_scale=read.number("attention.scale", 0.0) or root**-0.5,
        embedding_scale=math.sqrt(dim) if arch.embedding_scale else read.number("embedding_scale", 1.0),
        residual_scale=read.number("residual_scale", 1.0),
        logit_scale=1 / logit_scale if arch.logit_scale == "over" else logit_scale,
        attention_cap=read.number("attn_logit_softcapping", 0.0),
        logit_cap=read.number("final_logit_softcapping", 0.0),
        clamp_qkv=read.number("attention.clamp_kqv", 0.0),
    )


def _has_window(arch: Arch, read: _Reader) -> bool:
    """Some converters write the window of models that do not use it."""
    return arch.name not in ("qwen2", "qwen3") or read.flag("attention.use_sliding_window", False)


def _root_of_width(arch: Arch, layers: int) -> bool:
    """The largest models of two families divide scores by the root of width / heads; files do not say so."""
    return (arch.name, layers) in (("gemma2", 46), ("gemma3", 62))


def _is_parallel(arch: Arch, read: _Reader, gguf: GGUF) -> bool:
    if arch.parallel == "stated":
        return read.flag("use_parallel_residual", True)
    if arch.parallel == "one norm":
        return "blk.0.ffn_norm.weight" not in gguf.tensors
    return arch.parallel == "always"


def _read_rope(arch: Arch, read: _Reader, head_dim: int) -> Rope:
    dim = read.size("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise read.refuse(f"rope turns {dim} of {head_dim} numbers of a head")
    base = read.number("rope.freq_base", 10000.0)
    if base <= 1:
        raise read.refuse(f"rope's base is {base}")
    local_base = read.number("rope.freq_base_swa", arch.local_base or base)
    scaling = read.text("rope.scaling.type", "none")
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0))
    if scaling == "none" and factor not in (0.0, 1.0):
        scaling = "linear"
    if "rope_factors_long.weight" in read.tensors:
        scaling = "longrope"
    if scaling not in ("none", "linear", "yarn", "longrope") or factor < 0:
        raise read.refuse(
            f"rope is scaled by {scaling!r} {factor}", "use a model that scales linearly or by yarn"
        )
    if scaling in ("linear", "yarn") and not factor:
        raise read.refuse(f"rope is scaled by {scaling!r} without a factor")
    context = read.size("context_length", most=1 << 31)
    stretch = read.number("rope.scaling.attn_factor", 0.0) or None
    return Rope(
        dim=dim,
        base=base,
        local_base=local_base,
        scaling=scaling,  # type: ignore[arg-type]
        factor=factor,
        original_context=read.size("rope.scaling.original_context_length", context, most=1 << 31),
        attention_factor=stretch,
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
    )


# ---- the tensors of a model
# --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A tensor that a model has, or may have."""

    name: str
    shape: tuple[int, ...]
    required: bool = True


def places(config: Config) -> Iterator[Place]:
    """The tensors that a file of this model must and may hold."""
    arch, dim = config.arch, config.dim
    yield Place("token_embd.weight", (config.vocab, dim))
    if arch.learned_positions:
        yield Place("position_embd.weight", (config.context, dim))
    yield from _norm(arch, "output_norm", dim)
    yield Place("output.weight", (config.vocab, dim), required=False)
    if "output" in arch.biases:
        yield Place("output.bias", (config.vocab,), required=False)
    half = config.rope.dim // 2
    for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        yield Place(f"{name}.weight", (half,), required=False)
    for layer in range(config.layers):
        for place in _layer_places(config):
            yield place._replace(name=f"blk.{layer}.{place.name}")


def _norm(arch: Arch, name: str, size: int, required: bool = True) -> Iterator[Place]:
    if arch.norm_weight:
        yield Place(f"{name}.weight", (size,), required)
    if arch.norm_bias:
        yield Place(f"{name}.bias", (size,), required)


def _layer_places(config: Config) -> Iterator[Place]:
    arch, dim = config.arch, config.dim
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    values, mixed = config.kv_heads * config.value_dim, config.heads * config.value_dim
    for name, rows, columns, required in [
        ("attn_qkv", queries + keys + values, dim, arch.packed_qkv == "always"),
        ("attn_q", queries, dim, not arch.packed_qkv),
        ("attn_k", keys, dim, not arch.packed_qkv),
        ("attn_v", values, dim, not arch.packed_qkv),
        ("attn_output", dim, mixed, True),
        ("ffn_gate", config.hidden, dim, arch.gated and not arch.packed_ffn),
        ("ffn_up", config.hidden * (2 if arch.packed_ffn else 1), dim, True),
        ("ffn_down", dim, config.hidden, True),
    ]:
        if required or (
            name in QKV and (arch.packed_qkv == "maybe" or (arch.packed_qkv and name == "attn_qkv"))
        ):
            yield Place(f"{name}.weight", (rows, columns), required)
            if name in arch.biases:
                yield Place(f"{name}.bias", (rows,), required=False)
    yield from _layer_norms(config)


def _layer_norms(config: Config) -> Iterator[Place]:
    arch, dim = config.arch, config.dim
    if arch.norms != "after":
        yield from _norm(arch, "attn_norm", dim)
        if arch.name == "falcon":
            yield from _norm(arch, "attn_norm_2", dim, required=False)
        if not config.parallel or arch.parallel_norms == 2:
            yield from _norm(arch, arch.ffn_norm_name, dim)
    if arch.norms != "before":
        yield from _norm(arch, "post_attention_norm", dim)
        yield from _norm(arch, "post_ffw_norm", dim)
    if arch.head_norm:
        for name, heads in (("attn_q_norm", config.heads), ("attn_k_norm", config.kv_heads)):
            required = not arch.head_norm.endswith("maybe")
            if arch.head_norm == "row":
                yield Place(f"{name}.weight", (heads * config.head_dim,), required)
            elif required:
                yield Place(f"{name}.weight", (config.head_dim,), required)
            else:  # a weight for each head
                yield Place(f"{name}.weight", (heads, config.head_dim), required)


def check_tensors(gguf: GGUF, config: Config) -> None:
    """FileFormatError that names tensors which are missing, unexpected, or of other shapes."""
    known = {place.name: place for place in places(config)}
    missing = [p.name for p in known.values() if p.required and p.name not in gguf.tensors]
    stray = [name for name in gguf.tensors if name not in known]
    what = f"load {gguf.path}"
    if missing:
        raise FileFormatError(
            what,
            because=f"a {config.arch.name} model of {config.layers} layers also has {_listed(missing)}",
            fix="get the whole file, or convert the model again",
        )
    if stray:
        raise FileFormatError(
            what,
            because=f"it has {_listed(stray)}, which no {config.arch.name} of {config.layers} layers has",
            fix="use a model of a supported kind",
        )
    for place in known.values():
        found = gguf.tensors.get(place.name)
        if found is not None and found.shape != place.shape:
            raise FileFormatError(
                what,
                because=f"{place.name!r} is {show_shape(found.shape)} and not "
                f"{show_shape(place.shape)}, as its metadata says",
                fix="convert the model again",
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return (
        "the tensor " + shown
        if len(names) == 1
        else f"{len(names)} tensors ({shown}{', …' * (len(names) > 3)})"
    )

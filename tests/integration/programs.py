"""Random tensor programs: made step by step on NumPy arrays, then run by anything that has tensors.

A program is a list of leaves and steps; a step names an operation, its operands (numbers of earlier values)
and its arguments. NumPy computes floats in float64. A step that would be ill-conditioned (a comparison of
values that rounding could swap, overflow) is not taken, so that every program has one right answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whit import Tensor, TinyJit

Array = np.ndarray[Any, Any]
SIZES = [1, 2, 3, 4, 5, 7]
MARGIN = 2e-2  # floats closer than this to a jump are not compared, rounded or ordered
TOLERANCE = {"float64": 1e-8, "float32": 3e-4, "float16": 3e-2}


class Fragile(Exception):
    """The step has no answer that survives rounding."""


@dataclass
class Step:
    op: str
    ins: tuple[int, ...]
    arg: Any = None


@dataclass
class Program:
    seed: int
    leaves: list[Array]
    kinds: list[str]  # dtype name of every value: leaves, then steps
    steps: list[Step] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    tolerances: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}"]
        lines += [
            f"  v{i} = leaf {kind} {leaf.shape}"
            for i, (leaf, kind) in enumerate(zip(self.leaves, self.kinds))
        ]
        for i, step in enumerate(self.steps, len(self.leaves)):
            names = ", ".join(f"v{j}" for j in step.ins)
            lines.append(f"  v{i} = {step.op}({names}; {step.arg})")
        return "\n".join([*lines, f"  outputs {self.outputs}"])


# ---- what the operations mean to NumPy ---------------------------------------------------------------------


def apart(values: Array, margin: float = MARGIN) -> None:
    """Refuse values that are within the margin of 0."""
    if values.dtype.kind == "f" and values.size and np.abs(values).min() < margin:
        raise Fragile


def distinct(x: Array, axis: int) -> None:
    """Refuse values whose order along the axis rounding could change."""
    ordered = np.sort(x, axis)
    gaps = np.diff(ordered, axis=axis)
    if x.dtype.kind == "f":
        apart(gaps)
    elif gaps.size and (gaps == 0).any():
        raise Fragile


def conv2d(x: Array, w: Array, arg: Any) -> Array:
    stride, padding, dilation = arg
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    kh, kw = ((k - 1) * dilation + 1 for k in w.shape[2:])
    windows = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), (2, 3))  # type: ignore[call-overload]
    windows = windows[:, :, ::stride, ::stride, ::dilation, ::dilation]
    return np.einsum("nchwij,ocij->nohw", windows, w)


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def compare(x: Array, y: Array, arg: str) -> Array:
    apart(x - y)
    return {"lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal}[arg](x, y)


def np_floor(x: Array, _: Any) -> Array:
    apart(x - np.round(x))
    return np.floor(x)


def np_max(x: Array, y: Array, _: Any) -> Array:
    apart(x - y)
    return np.maximum(x, y)


def np_cast(x: Array, arg: str) -> Array:
    if x.dtype.kind == "f" and not arg.startswith("float"):
        apart(x - np.round(x))
        if arg != "bool" and x.size and (x.min() < (0 if arg == "uint8" else -1e6) or x.max() > 250):
            raise Fragile
        if arg == "bool":
            apart(x)
    if arg == "float16":
        return x.astype(np.float16).astype(np.float64)
    return x.astype("float64" if arg.startswith("float") else arg)


def np_reduce(x: Array, arg: Any) -> Array:
    name, axes, keep = arg
    if name in ("max", "min") and x.dtype.kind == "f" and axes is not None and len(axes) == 1:
        distinct(x, axes[0])
    if name in ("max", "min") and x.dtype.kind == "f" and (axes is None or len(axes) > 1) and x.size:
        distinct(x.reshape(-1), 0) if axes is None else None
    result = getattr(np, name)(x, axis=axes, keepdims=keep)
    if name in ("sum", "prod") and x.dtype.kind in "iu":
        result = result.astype(
            x.dtype if x.dtype.itemsize >= 4 else {"i": np.int32, "u": np.uint32}[x.dtype.kind]
        )
    return np.asarray(result)


def np_write(x: Array, *rest: Any) -> Array:
    place, result = rest[-1], x.copy()
    result[place] = rest[0] if len(rest) == 2 else 2
    return result


def np_sort(x: Array, axis: int) -> Array:
    distinct(x, axis)
    return np.sort(x, axis)


def np_argmax(x: Array, axis: int) -> Array:
    distinct(x, axis)
    return np.argmax(x, axis).astype(np.int32)


def np_gather(x: Array, axis: int, index: Array) -> Array:
    corner = tuple(slice(None) if a == axis else slice(0, n) for a, n in enumerate(index.shape))
    return np.take_along_axis(x[corner], index, axis)


def np_where(c: Array, x: Array, y: Array, _: Any) -> Array:
    return np.where(c, x, y)


def gelu_like(x: Any) -> Any:
    return x * (1 / (1 + np.exp(-1.5 * x)))


def np_abs(x: Array, _: Any) -> Array:
    apart(x)
    return np.abs(x)


def np_relu(x: Array, _: Any) -> Array:
    apart(x)
    return np.maximum(x, 0)


Meaning = Callable[..., Any]
# operation -> its meaning on NumPy arrays, on whit's tensors, and on PyTorch's where that differs from whit's
OPS: dict[str, tuple[Meaning, Meaning] | tuple[Meaning, Meaning, Meaning]] = {
    "add": (lambda x, y, _: x + y, lambda x, y, _: x + y),
    "sub": (lambda x, y, _: x - y, lambda x, y, _: x - y),
    "mul": (lambda x, y, _: x * y, lambda x, y, _: x * y),
    "div": (lambda x, y, _: x / (y * y + 1), lambda x, y, _: x / (y * y + 1)),
    "maximum": (np_max, lambda x, y, _: x.maximum(y)),
    "affine": (lambda x, a: x * a[0] + a[1], lambda x, a: x * a[0] + a[1]),
    "rsub": (lambda x, a: a - x, lambda x, a: a - x),
    "tanh": (lambda x, _: np.tanh(x), lambda x, _: x.tanh()),
    "sin": (lambda x, _: np.sin(x), lambda x, _: x.sin()),
    "exp": (
        lambda x, _: np.exp(np.minimum(x, 4)),
        lambda x, _: x.minimum(4).exp(),
        lambda x, _: x.clamp(max=4).exp(),
    ),
    "log": (lambda x, _: np.log(x * x + 1), lambda x, _: (x * x + 1).log()),
    "sqrt": (lambda x, _: np.sqrt(x * x + 0.5), lambda x, _: (x * x + 0.5).sqrt()),
    "sigmoid": (lambda x, _: 1 / (1 + np.exp(-x)), lambda x, _: x.sigmoid()),
    "swish": (lambda x, _: gelu_like(x), lambda x, _: x * (x * 1.5).sigmoid()),
    "relu": (np_relu, lambda x, _: x.relu()),
    "abs": (np_abs, lambda x, _: x.abs()),
    "floor": (np_floor, lambda x, _: x.floor()),
    "compare": (compare, lambda x, y, a: getattr(x, a)(y)),
    "where": (np_where, lambda c, x, y, _: c.where(x, y), lambda c, x, y, _: x.where(c, y)),
    "not": (lambda x, _: ~x, lambda x, _: ~x),
    "bits": (
        lambda x, y, a: {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[a](x, y),
        lambda x, y, a: x & y if a == "and" else x | y if a == "or" else x ^ y,
    ),
    "floordiv": (lambda x, a: x // a, lambda x, a: x // a),
    "mod": (lambda x, a: x % a, lambda x, a: x % a),
    "cast": (np_cast, lambda x, a: x.cast(a)),
    "reduce": (
        np_reduce,
        lambda x, a: getattr(x, a[0])(a[1], keepdim=a[2]),
        lambda x, a: getattr(x, {"max": "amax", "min": "amin"}.get(a[0], a[0]))(
            tuple(range(x.ndim)) if a[1] is None else a[1], keepdim=a[2]
        ),
    ),
    "var": (
        lambda x, a: np.var(x, axis=a, ddof=0, keepdims=True),
        lambda x, a: x.var(a, keepdim=True, correction=0),
    ),
    "reshape": (lambda x, a: x.reshape(a), lambda x, a: x.reshape(a)),
    "permute": (lambda x, a: x.transpose(a), lambda x, a: x.permute(*a)),
    "flip": (lambda x, a: np.flip(x, a), lambda x, a: x.flip(a)),
    "expand": (lambda x, a: np.broadcast_to(x, a), lambda x, a: x.expand(a)),
    "pad": (
        lambda x, a: np.pad(x, a[0], constant_values=a[1]),
        lambda x, a: x.pad(a[0], value=a[1]),
        lambda x, a: _torch_pad(x, a),
    ),
    "slice": (lambda x, a: x[a], lambda x, a: x[a], lambda x, a: _torch_slice(x, a)),
    "roll": (lambda x, a: np.roll(x, *a), lambda x, a: x.roll(*a)),
    "cat": (
        lambda *v: np.concatenate(v[:-1], v[-1]),
        lambda *v: v[0].cat(*v[1:-1], dim=v[-1]),
        lambda *v: _torch().cat(v[:-1], v[-1]),
    ),
    "stack": (
        lambda *v: np.stack(v[:-1], v[-1]),
        lambda *v: v[0].stack(*v[1:-1], dim=v[-1]),
        lambda *v: _torch().stack(v[:-1], v[-1]),
    ),
    "matmul": (lambda x, y, _: x @ y, lambda x, y, _: x @ y),
    "conv2d": (
        conv2d,
        lambda x, w, a: x.conv2d(w, stride=a[0], padding=a[1], dilation=a[2]),
        lambda x, w, a: _torch().nn.functional.conv2d(x, w, None, a[0], a[1], a[2]),
    ),
    "softmax": (softmax, lambda x, a: x.softmax(a)),
    "cumsum": (lambda x, a: np.cumsum(x, a, dtype=x.dtype), lambda x, a: x.cumsum(a)),
    "index": (lambda x, a: x[np.array(a)], lambda x, a: x[Tensor(a)], lambda x, a: x[_torch().tensor(a)]),
    "take": (lambda x, i, a: x[i % x.shape[0]], lambda x, i, a: x[i % x.shape[0]]),
    "gather": (
        lambda x, a: np_gather(x, *a),
        lambda x, a: x.gather(a[0], Tensor(a[1])),
        lambda x, a: x.gather(a[0], _torch().tensor(a[1])),
    ),
    "sort": (np_sort, lambda x, a: x.sort(a)[0]),
    "argmax": (np_argmax, lambda x, a: x.argmax(a).cast("int32")),
    "contiguous": (lambda x, _: x, lambda x, _: x.contiguous()),
    # writes make a new version of the operand; the rest of the program reads the new one
    "setitem": (np_write, lambda *v: _whit_write(*v), lambda *v: _torch_write(*v)),
    "assign": (
        lambda x, y, _: np.array(np.broadcast_to(y, x.shape)),
        lambda x, y, _: x.assign(y),
        lambda x, y, _: y.expand(x.shape).clone(),
    ),
}
WRITES = ("setitem", "assign")
SMOOTH = [
    "add",
    "sub",
    "mul",
    "div",
    "affine",
    "rsub",
    "tanh",
    "sin",
    "exp",
    "log",
    "sqrt",
    "sigmoid",
    "swish",
    "relu",
    "abs",
    "maximum",
    "reduce",
    "var",
    "reshape",
    "permute",
    "flip",
    "expand",
    "pad",
    "slice",
    "roll",
    "cat",
    "stack",
    "matmul",
    "conv2d",
    "softmax",
    "cumsum",
    "index",
    "gather",
    "sort",
    "contiguous",
]


def _torch() -> Any:
    import torch

    return torch


def _torch_pad(x: Any, arg: Any) -> Any:
    flat = [n for pair in reversed(arg[0]) for n in pair]
    return _torch().nn.functional.pad(x, flat, value=arg[1])


def _torch_slice(x: Any, arg: Any) -> Any:
    for axis, part in enumerate(arg):
        if part.step is not None and part.step < 0:
            indices = list(range(x.shape[axis]))[part]
            x = x.index_select(axis, _torch().tensor(indices, dtype=_torch().int64))
        else:
            x = x[(slice(None),) * axis + (part,)]
    return x


def _whit_write(x: Tensor, *rest: Any) -> Tensor:
    x[rest[-1]] = rest[0] if len(rest) == 2 else 2
    return x


def _torch_write(x: Any, *rest: Any) -> Any:
    x = x.clone()
    x[rest[-1]] = rest[0] if len(rest) == 2 else 2
    return x


# ---- making a program --------------------------------------------------------------------------------------


class Maker:
    """Grows a program; `values[i]` is what NumPy computes for value i."""

    def __init__(self, seed: int, smooth: bool = False) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.smooth = smooth
        self.values: list[Array] = []
        self.program = Program(seed, [], [])
        self.stale: set[int] = set()  # values whose tensor was written since: read as the new version only

    def leaf(self) -> None:
        rng, shape = (
            self.rng,
            tuple(self.rng.choice(SIZES) for _ in range(self.rng.choice([0, 1, 2, 2, 3, 3, 4]))),
        )
        kind = (
            "float64" if self.smooth else rng.choice(["float32"] * 4 + ["float64", "int32", "int64", "uint8"])
        )
        if kind.startswith("float"):
            data = self.numbers.standard_normal(shape).astype(kind)
        else:
            data = self.numbers.integers(0 if kind == "uint8" else -9, 10, shape).astype(kind)
        self.program.leaves.append(np.asarray(data))
        self.program.kinds.append(kind)
        self.program.tolerances.append(TOLERANCE.get(kind, 0))
        self.values.append(np.asarray(data, np.float64) if kind.startswith("float") else np.asarray(data))

    def pick(self, test: Callable[[int], bool] = lambda i: True) -> int:
        live = [i for i in range(len(self.values)) if i not in self.stale and test(i)]
        if not live:
            raise Fragile
        return self.rng.choice(live[-4:] if self.rng.random() < 0.75 else live)

    def is_float(self, i: int) -> bool:
        return self.program.kinds[i] in ("float32", "float64", "float16")

    def partner(self, i: int) -> int:
        """A value of the same dtype that broadcasts with value i."""

        def fits(j: int) -> bool:
            if self.program.kinds[j] != self.program.kinds[i]:
                return False
            try:
                return int(np.prod(np.broadcast_shapes(self.values[i].shape, self.values[j].shape))) < 3000
            except ValueError:
                return False

        return self.pick(fits)

    def try_step(self) -> None:
        name = self.rng.choice(
            SMOOTH if self.smooth else [o for o in OPS for _ in range(2 if o in WRITES else 1)]
        )
        ins, arg, kind = self.choose(name)
        with np.errstate(all="ignore"):
            value = np.array(OPS[name][0](*[self.values[i] for i in ins], arg))
        if value.size > 3000 or (value.dtype.kind == "f" and not np.isfinite(value).all()):
            raise Fragile
        if value.dtype.kind == "f" and value.size and np.abs(value).max() > (6e2 if self.smooth else 4e2):
            raise Fragile
        self.values.append(value)
        self.program.kinds.append(kind)
        spread = max([self.program.tolerances[i] for i in ins] + [TOLERANCE.get(kind, 0)])
        self.program.tolerances.append(spread if kind.startswith("float") else 0)
        self.program.steps.append(Step(name, ins, arg))
        if name in WRITES:
            self.stale.add(ins[0])

    def choose(self, name: str) -> tuple[tuple[int, ...], Any, str]:
        """Operands, arguments and result dtype for an operation. Fragile when there are none."""
        rng, kinds = self.rng, self.program.kinds
        if name in ("add", "sub", "mul", "maximum", "compare"):
            i = self.pick(lambda j: kinds[j] != "bool")
            j = self.partner(i)
            return (i, j), rng.choice(["lt", "le", "eq", "ne"]), "bool" if name == "compare" else kinds[i]
        if name == "div":
            i = self.pick(self.is_float)
            return (i, self.partner(i)), None, kinds[i]
        if name in ("tanh", "sin", "exp", "log", "sqrt", "sigmoid", "swish", "relu", "abs", "floor"):
            i = self.pick(self.is_float)
            return (i,), None, kinds[i]
        if name in ("affine", "rsub"):
            i = self.pick(lambda j: kinds[j] not in ("bool", "uint8"))
            arg = rng.choice([(2, 1), (-1, 0), (1, -3), (0, 2)] + ([(0.5, 0.25)] if self.is_float(i) else []))
            return (i,), arg if name == "affine" else arg[1], kinds[i]
        if name == "where":
            i = self.pick(lambda j: kinds[j] != "bool")
            j = self.partner(i)
            shape = np.broadcast_shapes(self.values[i].shape, self.values[j].shape)
            c = self.pick(lambda k: kinds[k] == "bool" and _broadcasts(self.values[k].shape, shape))
            return (c, i, j), None, kinds[i]
        if name == "not":
            i = self.pick(lambda j: not self.is_float(j))
            return (i,), None, kinds[i]
        if name == "bits":
            i = self.pick(lambda j: not self.is_float(j))
            return (i, self.partner(i)), rng.choice(["and", "or", "xor"]), kinds[i]
        if name in ("floordiv", "mod"):
            i = self.pick(lambda j: kinds[j] in ("int32", "int64", "uint8"))
            return (i,), rng.choice([1, 2, 3, 7] + ([-2, -3] if kinds[i] != "uint8" else [])), kinds[i]
        if name == "cast":
            i = self.pick()
            arg = rng.choice(["float32", "float64", "float16", "int32", "int64", "uint8", "bool", "float32"])
            if arg == "uint8" and self.values[i].size and not self.is_float(i) and self.values[i].min() < 0:
                raise Fragile
            return (i,), arg, arg
        return self.choose_shaped(name)

    def choose_shaped(self, name: str) -> tuple[tuple[int, ...], Any, str]:
        rng, kinds, values = self.rng, self.program.kinds, self.values
        if name in ("matmul", "conv2d"):
            return self.choose_product(name)
        floats = name in ("softmax", "var", "sort", "argmax")
        i = self.pick(lambda j: values[j].ndim > 0 and (not floats or self.is_float(j)))
        x, kind = values[i], kinds[i]
        axis = rng.randrange(x.ndim)
        if name == "reduce":
            axes = rng.choice(
                [(axis,), None, tuple(sorted(rng.sample(range(x.ndim), rng.randint(1, x.ndim))))]
            )
            what = rng.choice(["sum", "max", "min", "mean"] if self.is_float(i) else ["sum", "max", "min"])
            if kind == "bool":
                raise Fragile
            if self.smooth and what in ("max", "min"):
                axes = (axis,)
            out = {"uint8": "uint32"}.get(kind, kind) if what == "sum" else kind
            return (i,), (what, axes, rng.random() < 0.5), out
        if name in ("softmax", "sort", "var"):
            return (i,), axis, kind
        if name == "argmax":
            return (i,), axis, "int32"
        if name == "cumsum":
            if kind in ("bool", "uint8", "float16"):
                raise Fragile
            return (i,), axis, kind
        if name == "reshape":
            order = [n for n in x.shape for n in _factors(n)]
            rng.shuffle(order)
            cut = rng.randint(0, len(order))
            shape = (int(np.prod(order[:cut], dtype=int)), int(np.prod(order[cut:], dtype=int)))
            return (i,), rng.choice([shape, (-1,), (*x.shape, 1), (1, *x.shape)]), kind
        if name == "permute":
            return (i,), tuple(rng.sample(range(x.ndim), x.ndim)), kind
        if name == "flip":
            return (i,), tuple(sorted(rng.sample(range(x.ndim), rng.randint(1, x.ndim)))), kind
        if name == "expand":
            return (
                (i,),
                tuple(
                    rng.choice([2, 3]) if n == 1 else n for n in ((1, *x.shape) if x.ndim < 4 else x.shape)
                ),
                kind,
            )
        if name == "pad":
            widths = [
                (rng.randint(0, 2), rng.randint(0, 2)) if a == axis or rng.random() < 0.3 else (0, 0)
                for a in range(x.ndim)
            ]
            return (i,), (widths, 0 if kind == "bool" or rng.random() < 0.6 else 1), kind
        if name == "slice":
            return (i,), tuple(_slice(rng, n) for n in x.shape), kind
        if name == "roll":
            return (i,), (rng.randint(-3, 3), axis), kind
        if name in ("cat", "stack"):

            def joins(j: int) -> bool:
                same = [n for a, n in enumerate(values[j].shape) if a != axis or name == "stack"]
                mine = [n for a, n in enumerate(x.shape) if a != axis or name == "stack"]
                return kinds[j] == kind and values[j].ndim == x.ndim and same == mine

            return (i, *[self.pick(joins) for _ in range(rng.randint(1, 2))]), axis, kind
        if name == "index":
            return (i,), [rng.randrange(-x.shape[0], x.shape[0]) for _ in range(rng.randint(1, 4))], kind
        if name == "take":
            j = self.pick(lambda k: kinds[k] in ("int32", "int64") and 0 < values[k].size < 20)
            return (i, j), None, kind
        if name == "gather":
            shape = tuple(
                rng.randint(1, n) if a != axis else rng.randint(1, 5) for a, n in enumerate(x.shape)
            )
            return (i,), (axis, self.numbers.integers(0, x.shape[axis], shape)), kind
        if name == "contiguous":
            return (i,), None, kind
        return self.choose_write(name, i)

    def choose_product(self, name: str) -> tuple[tuple[int, ...], Any, str]:
        rng, kinds, values = self.rng, self.program.kinds, self.values
        if name == "matmul":
            i = self.pick(lambda j: self.is_float(j) and 2 <= values[j].ndim <= 3)
            j = self.pick(
                lambda k: (
                    kinds[k] == kinds[i]
                    and values[k].ndim in (1, 2)
                    and values[k].shape[0] == values[i].shape[-1]
                )
            )
            return (i, j), None, kinds[i]
        i = self.pick(lambda j: self.is_float(j) and values[j].ndim == 4)
        j = self.pick(
            lambda k: (
                kinds[k] == kinds[i] and values[k].ndim == 4 and values[k].shape[1] == values[i].shape[1]
            )
        )
        arg = rng.choice([1, 2]), rng.choice([0, 1, 2]), rng.choice([1, 2])
        sizes = [n + 2 * arg[1] - (k - 1) * arg[2] for n, k in zip(values[i].shape[2:], values[j].shape[2:])]
        if min(sizes) < 1:
            raise Fragile
        return (i, j), arg, kinds[i]

    def choose_write(self, name: str, i: int) -> tuple[tuple[int, ...], Any, str]:
        rng, kinds, values = self.rng, self.program.kinds, self.values
        x = values[i]
        if kinds[i] == "bool":
            raise Fragile
        if name == "assign":
            j = self.pick(lambda k: kinds[k] == kinds[i] and k != i and values[k].shape == x.shape)
            return (i, j), None, kinds[i]
        place = tuple(
            rng.randrange(n) if rng.random() < 0.4 else _slice(rng, n, forward=rng.random() < 0.7)
            for n in x.shape[: rng.randint(1, x.ndim)]
        )
        shape = x[place].shape
        if rng.random() < 0.4:
            return (i,), place, kinds[i]
        j = self.pick(
            lambda k: (
                kinds[k] == kinds[i] and values[k].ndim <= len(shape) and _broadcasts(values[k].shape, shape)
            )
        )
        return (i, j), place, kinds[i]


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _factors(n: int) -> list[int]:
    return [2, n // 2] if n % 2 == 0 else [n]


def _slice(rng: random.Random, n: int, forward: bool = False) -> slice:
    if n == 0:
        return slice(None)
    start = rng.randrange(n)
    stop = rng.randint(start + 1, n)
    step = rng.choice([1, 1, 2, 3])
    if not forward and rng.random() < 0.25:
        return slice(stop - 1, start - 1 if start else None, -step)
    return rng.choice([slice(start, stop, step), slice(None), slice(start, None), slice(None, None, step)])


def make(seed: int, smooth: bool = False) -> Program:
    """A program of 5 to 40 steps."""
    maker = Maker(seed, smooth)
    for _ in range(maker.rng.randint(2, 4)):
        maker.leaf()
    wanted = maker.rng.choice([5, 8, 12, 20, 40] if not smooth else [5, 8, 12])
    for _ in range(wanted * 6):
        if len(maker.program.steps) == wanted:
            break
        try:
            maker.try_step()
        except Fragile:
            continue
    program = maker.program
    live = [i for i in range(len(maker.values)) if i not in maker.stale]
    program.outputs = sorted(set(live[-2:] + maker.rng.sample(live, min(3, len(live)))))
    return program


# ---- running it --------------------------------------------------------------------------------------------


def in_numpy(program: Program, leaves: list[Array]) -> list[Array]:
    """Outputs by NumPy, floats in float64. Fragile if these leaves are near a jump."""
    values: list[Array] = [np.asarray(x, np.float64) if x.dtype.kind == "f" else x for x in leaves]
    with np.errstate(all="ignore"):
        for step in program.steps:
            values.append(np.array(OPS[step.op][0](*[values[i] for i in step.ins], step.arg)))
    return [values[i] for i in program.outputs]


def in_whit(
    program: Program, leaves: list[Tensor], after: Callable[[Tensor], Tensor] = lambda t: t
) -> list[Tensor]:
    """Outputs as tensors; `after` sees each value (realise, or nothing)."""
    values = list(leaves)
    for step in program.steps:
        ins = [values[i] for i in step.ins]
        if step.op in WRITES and sum(v is ins[0] for v in values) > 1:  # a step gave back its own operand
            ins[0] = ins[0].clone()
        values.append(after(OPS[step.op][1](*ins, step.arg)))
    return [values[i] for i in program.outputs]


def in_torch(program: Program, leaves: list[Any]) -> list[Any]:
    """Outputs by PyTorch."""
    values = list(leaves)
    for step in program.steps:
        values.append(OPS[step.op][-1](*[values[i] for i in step.ins], step.arg))
    return [values[i] for i in program.outputs]


def tensors(leaves: list[Array]) -> list[Tensor]:
    """Realised tensors of arrays."""
    made = [Tensor(x.copy()) for x in leaves]
    Tensor.realize_all(made)
    return made


def check(program: Program, got: list[Tensor], want: list[Array], how: str, text: str = "") -> None:
    """Compare outputs with NumPy's; dtypes too."""
    for i, t, expected in zip(program.outputs, got, want, strict=True):
        where = f"v{i} {how}\n{program}\n{text}"
        assert t.dtype.name == program.kinds[i], f"{t.dtype.name}: {where}"
        value = np.asarray(t.numpy())
        assert value.shape == expected.shape, f"{value.shape}, not {expected.shape}: {where}"
        if program.kinds[i].startswith("float"):
            tolerance = program.tolerances[i]
            scale = float(np.abs(expected).max()) if expected.size else 0.0
            np.testing.assert_allclose(
                value.astype(np.float64),
                expected,
                rtol=tolerance,
                atol=tolerance * max(1.0, scale),
                err_msg=where,
            )
        else:
            np.testing.assert_array_equal(value, expected, err_msg=where)


def fresh_data(program: Program) -> tuple[list[Array], list[Array]] | None:
    """Other leaves for the same program and NumPy's outputs for them; None if every draw is fragile."""
    numbers = np.random.default_rng(program.seed + 1)
    return next(filter(None, (shuffled(program, numbers) for _ in range(4))), None)


def shuffled(program: Program, numbers: np.random.Generator) -> tuple[list[Array], list[Array]] | None:
    """The program's leaves with their elements in another order, and NumPy's outputs; None if they are
    fragile."""
    leaves = [np.asarray(numbers.permutation(x.reshape(-1)).reshape(x.shape)) for x in program.leaves]
    try:
        want = in_numpy(program, leaves)
    except Fragile:
        return None
    tame = all(np.isfinite(w).all() and (not w.size or np.abs(w.astype(float)).max() < 1e3) for w in want)
    return (leaves, want) if tame else None


def run_every_way(program: Program, jit: bool = True) -> None:
    """Lazily, step by step and jitted: all agree with NumPy."""
    from whit.uop.text import show

    want = in_numpy(program, program.leaves)
    lazy = in_whit(program, tensors(program.leaves))
    text = show(lazy[-1].uop)
    Tensor.realize_all(lazy)
    check(program, lazy, want, "lazily", text)
    eager = in_whit(program, tensors(program.leaves), lambda t: t.realize())
    check(program, eager, want, "step by step", text)
    if not jit:
        return
    other = fresh_data(program)

    @TinyJit
    def replay(*leaves: Tensor) -> list[Tensor]:
        outputs = in_whit(program, list(leaves))
        Tensor.realize_all(outputs)
        return outputs

    first = replay(*tensors(program.leaves))
    check(program, first, want, "jitted, call 1", text)
    for call in range(2, 5):
        leaves, expected = (program.leaves, want) if other is None or call % 2 == 0 else other
        check(program, replay(*tensors(leaves)), expected, f"jitted, call {call}", text)
    check(program, first, want, "jitted, call 1 after the others", text)


def run_gradients(program: Program) -> None:
    """First and second derivatives of a smooth program against PyTorch's, in float64."""
    import torch

    from whit.uop.text import show

    numbers = np.random.default_rng(program.seed + 7)
    theirs = [torch.tensor(x, requires_grad=True) for x in program.leaves]
    ours = tensors(program.leaves)
    for leaf in ours:
        leaf.requires_grad = True
    weights = [numbers.standard_normal(w.shape) for w in in_numpy(program, program.leaves)]
    loss_t: Any = sum((o * torch.tensor(w)).sum() for o, w in zip(in_torch(program, theirs), weights))
    loss: Any = sum((o * Tensor(w)).sum() for o, w in zip(in_whit(program, ours), weights))
    for order in ("first", "second"):
        grads_t = torch.autograd.grad(
            loss_t, theirs, create_graph=True, allow_unused=True, materialize_grads=True
        )
        grads = loss.gradient(*ours, materialize_grads=True)
        weights = [numbers.standard_normal(x.shape) for x in program.leaves]
        text = show(grads[0].uop)
        Tensor.realize_all(grads)
        for n, (g, g_t) in enumerate(zip(grads, grads_t, strict=True)):
            want = g_t.detach().numpy(force=True)
            scale = max(1.0, float(np.abs(want).max()) if want.size else 0.0)
            np.testing.assert_allclose(
                g.numpy(),
                want,
                rtol=1e-7,
                atol=1e-9 * scale,
                err_msg=f"{order} derivative by v{n}\n{program}\n{text}",
            )
        if not any(g.requires_grad for g in grads_t):
            return
        loss_t = sum((g * torch.tensor(w)).sum() for g, w in zip(grads_t, weights))
        loss = sum((g * Tensor(w)).sum() for g, w in zip(grads, weights))

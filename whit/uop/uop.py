"""The one node type of the IR: immutable, hash-consed, with shape, device, ranges and bounds derived and
memoised."""
from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from whit.helpers import DTypeError, ShapeError, blake2b, prod
from whit.uop.args import BufferArg, CallArg, RangeArg, ReduceArg, VarArg
from whit.uop.dtype import DType, PyConst, dtypes, wrap
from whit.uop.ops import AxisType, Op, Ops

Sint: TypeAlias = "int | UOp"  # a size or offset: a Python int, or an index expression of Variables
Shape: TypeAlias = "tuple[Sint, ...]"

# ---- the node ----------------------------------------------------------------------------------------------

_interned: dict[Any, _Ref] = {}
_small_indices: dict[Any, UOp] = {}
_uids = itertools.count()


def fresh_uid() -> int:
    """A number not given out before in this process."""
    return next(_uids)


class _Ref(weakref.ref["UOp"]):
    __slots__ = ("key",)
    key: Any


def _forget(ref: Any) -> None:
    key = ref.key
    if _interned.get(key) is ref:
        del _interned[key]


_CONST = Ops.CONST


def _const_key(dtype: DType, src: tuple[UOp, ...], arg: Any) -> Any:
    """The key of a CONST: tells 1, 1.0 and True apart, and 0.0 from -0.0; all NaNs are one."""
    cls = arg.__class__
    if cls is float and (arg == 0.0 or arg != arg):
        return _CONST, dtype, src, repr(arg), cls
    if cls is tuple:
        return _CONST, dtype, src, tuple([(repr(item), item.__class__) for item in arg]), cls
    return _CONST, dtype, src, arg, cls


class UOp:
    """A node `op(src…)` with `dtype` and `arg`. Equal nodes are the same object, so compare with `is`."""

    __slots__ = (
        "__weakref__",
        "_bounds",
        "_canonical",
        "_key",
        "_linear",
        "_ranges",
        "arg",
        "became",
        "device",
        "dtype",
        "op",
        "shape",
        "src",
    )
    op: Op
    dtype: DType
    src: tuple[UOp, ...]
    arg: Any
    shape: Shape
    device: str | None
    _key: bytes | None
    _bounds: tuple[PyConst, PyConst] | None
    _ranges: frozenset[UOp] | None
    _linear: tuple[dict[UOp, int], int] | None  # whit.uop.symbolic keeps its results here
    _canonical: UOp | bool | None  # True: this node itself
    # the memory that holds this value since it was realized (set by the engine; no part of the value)
    became: UOp | None

    def __new__(cls, op: Op, dtype: DType = dtypes.void, src: tuple[UOp, ...] = (), arg: Any = None) -> UOp:
        key = (op, dtype, src, arg) if op is not _CONST else _const_key(dtype, src, arg)
        found = _interned.get(key)
        if found is not None:
            node = found()
            if node is not None:
                return node
        self = object.__new__(cls)
        self.op, self.dtype, self.src, self.arg = op, dtype, src, arg
        self._key = self._bounds = self._ranges = self._linear = self._canonical = self.became = None
        if op.is_elementwise:
            first = src[0]
            shape, device = first.shape, first.device
            for source in src:
                other = source.shape
                if other is not shape and other and other != shape:  # a scalar fits everything
                    shape = broadcast_shapes(shape, other) if shape else other
            if device is None:
                device = _device_of(self)
            self.shape, self.device = shape, device
        else:
            rule = _SHAPE_RULES.get(op)
            self.shape = () if rule is None else rule(self)
            self.device = _device_of(self) if src or op is Ops.BUFFER or op is Ops.CALL else None
        ref = _Ref(self, _forget)
        ref.key = key
        found = _interned.setdefault(key, ref)
        if found is not ref:  # another thread made the same node meanwhile, or the one before has just died
            node = found()
            if node is not None:
                return node
            _interned[key] = ref
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _unpickle, (_flatten_nodes(self),)

    def __repr__(self) -> str:
        return f"UOp({self.op.name}, {self.dtype}, {len(self.src)} src, arg={self.arg!r}, shape={self.shape})"

    def replace(self, *, op: Op | None = None, dtype: DType | None = None, src: tuple[UOp, ...] | None = None,
                arg: Any = ...) -> UOp:
        """The same node with some fields changed."""
        return UOp(op or self.op, dtype or self.dtype, self.src if src is None else src,
                   self.arg if arg is ... else arg)

    # ---- derived

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Sint:
        """Number of elements."""
        return prod(self.shape)  # type: ignore[no-any-return]

    def toposort(self, stop: Callable[[UOp], bool] | None = None) -> list[UOp]:
        """All nodes reachable through src, sources first, each once. Below a node for which `stop` holds
        nothing is visited."""
        done: dict[UOp, None] = {}
        stack: list[tuple[UOp, bool]] = [(self, False)]
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if ready or not node.src or (stop is not None and stop(node)):
                done[node] = None
                continue
            stack.append((node, True))
            for source in reversed(node.src):
                if source not in done:
                    stack.append((source, False))
        return list(done)

    def _unknown(self, slot: str) -> list[UOp]:
        """The nodes whose derived value in `slot` is yet to be computed, sources first."""
        for source in self.src:
            if getattr(source, slot) is None:
                return [n for n in self.toposort(lambda n: getattr(n, slot) is not None)
                        if getattr(n, slot) is None]
        return [self]

    @property
    def key(self) -> bytes:
        """A digest of the whole graph below, equal across processes (if the args' reprs are)."""
        if self._key is None:
            for node in self._unknown("_key"):
                arg = node.arg
                text = f"{node.op.name}|{node.dtype.name}|{'' if arg is None else stable_text(arg)}|"
                node._key = blake2b(text.encode() + b"".join([s._key or b"" for s in node.src]),
                                            digest_size=16).digest()
        assert self._key is not None
        return self._key

    @property
    def ranges(self) -> frozenset[UOp]:
        """The RANGEs whose value this one depends on: a REDUCE or END ends its own."""
        if self._ranges is None:
            for node in self._unknown("_ranges"):
                node._ranges = _ranges_of(node)
        assert self._ranges is not None
        return self._ranges

    @property
    def bounds(self) -> tuple[PyConst, PyConst]:
        """(least, greatest) possible value; the dtype's limits when nothing better is known."""
        if self._bounds is None:
            for node in self._unknown("_bounds"):
                node._bounds = bounds_of(node)
        assert self._bounds is not None
        return self._bounds

    @property
    def vmin(self) -> Any:
        return self.bounds[0]

    @property
    def vmax(self) -> Any:
        return self.bounds[1]

    # ---- construction

    @staticmethod
    def const(value: PyConst | tuple[PyConst, ...], dtype: DType) -> UOp:
        """A constant, wrapped to the dtype."""
        if isinstance(value, tuple):
            return UOp(Ops.CONST, dtype, (), tuple(wrap(item, dtype.scalar) for item in value))
        return UOp(Ops.CONST, dtype, (), wrap(value, dtype.scalar))

    def const_like(self, value: PyConst) -> UOp:
        """A constant of this node's dtype."""
        return UOp.const(value, self.dtype)

    @staticmethod
    def index(value: Sint) -> UOp:
        """A size as a node of dtype index."""
        if value.__class__ is int:
            found = _small_indices.get(value)
            if found is None:
                found = UOp(_CONST, dtypes.index, (), value)
                if -64 <= value <= 1024:
                    _small_indices[value] = found
            return found
        return value if isinstance(value, UOp) else UOp(_CONST, dtypes.index, (), int(value))

    @staticmethod
    def range(size: Sint, axis: AxisType = AxisType.LOOP, uid: int | None = None) -> UOp:
        """A new loop variable 0 … size-1."""
        return UOp(Ops.RANGE, dtypes.index, (UOp.index(size),),
                   RangeArg(fresh_uid() if uid is None else uid, axis))

    @staticmethod
    def variable(name: str, min: int, max: int) -> UOp:
        """A symbolic integer with inclusive bounds."""
        return UOp(Ops.VAR, dtypes.index, (), VarArg(name, min, max))

    def bind(self, value: int) -> UOp:
        """This VAR with a value for the present call."""
        name, low, high = self.arg.name, self.arg.min, self.arg.max
        if not low <= value <= high:
            raise ShapeError(f"bind {name} to {value}", because=f"its bounds are {low} to {high}",
                             fix="choose a value within the bounds or declare the Variable with wider ones")
        return UOp(Ops.BIND, dtypes.index, (self, UOp.index(value)))

    def unbind(self) -> tuple[UOp, int]:
        """(VAR, value) of a BIND."""
        assert self.op is Ops.BIND, f"unbind of {self.op}"
        return self.src[0], self.src[1].arg

    @staticmethod
    def new_buffer(size: int, dtype: DType, device: str) -> UOp:
        """A BUFFER that no other node names."""
        return UOp(Ops.BUFFER, dtype, (), BufferArg(fresh_uid(), size, device))

    def alu(self, op: Op, *others: UOp) -> UOp:
        """Apply an elementwise op; operands must already agree in dtype. Broadcasts shapes as NumPy does."""
        return alu(op, self, *others)

    def cast(self, dtype: DType) -> UOp:
        if dtype is self.dtype:
            return self
        if self.op is Ops.CONST and isinstance(self.arg, (bool, int, float)):
            return UOp.const(cast_value(self.arg, dtype), dtype)
        return UOp(Ops.CAST, dtype, (self,))

    def bitcast(self, dtype: DType) -> UOp:
        if dtype is self.dtype:
            return self
        if dtype.bitsize != self.dtype.bitsize:
            raise DTypeError(f"bitcast {self.dtype} to {dtype}",
                             because=f"{self.dtype.bitsize} bits into {dtype.bitsize}",
                             fix="use types of the same width")
        return UOp(Ops.BITCAST, dtype, (self,))

    # ---- movement (arguments are checked by the shape rule)

    def reshape(self, shape: Shape) -> UOp:
        if shape == self.shape:
            return self
        return UOp(Ops.RESHAPE, self.dtype, (self.src[0] if self.op is Ops.RESHAPE else self,),
                   shape).collapse()

    def collapse(self) -> UOp:
        """A movement op that changes nothing is its source."""
        return self.src[0] if self.shape == self.src[0].shape and self.op in (Ops.RESHAPE,
                                                                              Ops.EXPAND) else self

    def permute(self, axes: tuple[int, ...]) -> UOp:
        return self if axes == tuple(range(self.ndim)) else UOp(Ops.PERMUTE, self.dtype, (self,), axes)

    def expand(self, shape: Shape) -> UOp:
        return self if shape == self.shape else UOp(Ops.EXPAND, self.dtype, (self,), shape)

    def pad(self, widths: tuple[tuple[Sint, Sint], ...]) -> UOp:
        return self if all(w == (0, 0) for w in widths) else UOp(Ops.PAD, self.dtype, (self,), widths)

    def shrink(self, limits: tuple[tuple[Sint, Sint], ...]) -> UOp:
        if all(limit == (0, size) for limit, size in zip(limits, self.shape, strict=True)):
            return self
        return UOp(Ops.SHRINK, self.dtype, (self,), limits)

    def flip(self, axes: tuple[int, ...]) -> UOp:
        return UOp(Ops.FLIP, self.dtype, (self,), axes) if axes else self

    def reduce(self, op: Op, axes: tuple[int, ...]) -> UOp:
        """Fold over axes, which vanish from the shape."""
        return UOp(Ops.REDUCE, self.dtype, (self,), ReduceArg(op, axes)) if axes else self

    def reduce_ranges(self, op: Op, *ranges: UOp) -> UOp:
        """Kernel level: fold over loop variables."""
        return UOp(Ops.REDUCE, self.dtype, (self, *ranges), ReduceArg(op)) if ranges else self

    def contiguous(self) -> UOp:
        return UOp(Ops.CONTIGUOUS, self.dtype, (self,))

    def detach(self) -> UOp:
        return UOp(Ops.DETACH, self.dtype, (self,))

    def copy_to(self, device: str) -> UOp:
        return UOp(Ops.COPY, self.dtype, (self,), device)

    def after(self, *stores: UOp) -> UOp:
        return UOp(Ops.AFTER, self.dtype, (self, *stores))

    def end(self, *ranges: UOp) -> UOp:
        return UOp(Ops.END, dtypes.void, (self, *ranges)) if ranges else self

    @staticmethod
    def sink(*sources: UOp) -> UOp:
        return UOp(Ops.SINK, dtypes.void, sources)

    # ---- arithmetic: a Python scalar takes the node's dtype; index expressions fold what is obvious

    def _operand(self, other: UOp | PyConst) -> UOp:
        return other if isinstance(other, UOp) else UOp.const(other, self.dtype)

    def __add__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.ADD, self, self._operand(other))

    def __radd__(self, other: PyConst) -> UOp:
        a, b = self._operand(other), self
        return alu(Ops.ADD, b, a) if self.dtype is dtypes.index else alu(Ops.ADD, a, b)

    def __sub__(self, other: UOp | PyConst) -> UOp:
        other = self._operand(other)
        return alu(Ops.ADD, self, -other) if self.dtype is dtypes.index else alu(Ops.SUB, self, other)

    def __rsub__(self, other: PyConst) -> UOp:
        return self._operand(other) - self

    def __mul__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.MUL, self, self._operand(other))

    def __rmul__(self, other: PyConst) -> UOp:
        a, b = self._operand(other), self
        return alu(Ops.MUL, b, a) if self.dtype is dtypes.index else alu(Ops.MUL, a, b)

    def __neg__(self) -> UOp:
        return alu(Ops.MUL, self, self.const_like(-1)) if self.dtype is dtypes.index else alu(Ops.NEG, self)

    def __truediv__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.FDIV, self, self._operand(other))

    def __rtruediv__(self, other: PyConst) -> UOp:
        return alu(Ops.FDIV, self._operand(other), self)

    def __floordiv__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.FLOORDIV, self, self._operand(other))

    def __rfloordiv__(self, other: PyConst) -> UOp:
        return alu(Ops.FLOORDIV, self._operand(other), self)

    def __mod__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.FLOORMOD, self, self._operand(other))

    def __and__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.AND, self, self._operand(other))

    def __or__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.OR, self, self._operand(other))

    def __xor__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.XOR, self, self._operand(other))

    def __lshift__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.SHL, self, self._operand(other))

    def __rshift__(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.SHR, self, self._operand(other))

    def __invert__(self) -> UOp:
        return alu(Ops.XOR, self, self.const_like(True if self.dtype is dtypes.bool else -1))

    def lt(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.CMPLT, self, self._operand(other))

    def le(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.CMPLE, self, self._operand(other))

    def gt(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.CMPLT, self._operand(other), self)

    def ge(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.CMPLE, self._operand(other), self)

    def equal(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.CMPEQ, self, self._operand(other))

    def not_equal(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.CMPNE, self, self._operand(other))

    def maximum(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.MAX, self, self._operand(other))

    def minimum(self, other: UOp | PyConst) -> UOp:
        return alu(Ops.MIN, self, self._operand(other))

    def where(self, yes: UOp | PyConst, no: UOp | PyConst) -> UOp:
        """This bool chooses; at least one branch must be a node."""
        if not isinstance(yes, UOp):
            assert isinstance(no, UOp), "where: one branch must be a UOp to give the dtype"
            yes = no.const_like(yes)
        return alu(Ops.WHERE, self, yes, yes._operand(no))

    # ---- graph edits

    def substitute(self, changes: dict[UOp, UOp]) -> UOp:
        """The graph with each key replaced by its value (not searched again); args are not touched."""
        if not changes:
            return self
        new: dict[UOp, UOp] = dict(changes)
        for node in self.toposort(lambda n: n in changes):
            if node not in new:
                src = tuple([new[s] for s in node.src])
                new[node] = node if src == node.src else node.replace(src=src)
        return new[self]


def alu(op: Op, *src: UOp) -> UOp:
    """An elementwise node: comparisons give bool, everything else the dtype of the last operand."""
    if op.category == "compare":
        dtype = dtypes.bool if src[0].dtype.count == 1 else dtypes.bool.vec(src[0].dtype.count)
    else:
        dtype = src[-1].dtype
        if dtype is dtypes.index:
            folded = _fold_index(op, src)
            if folded is not None:
                return folded
    return UOp(op, dtype, src)


def _fold_index(op: Op, src: tuple[UOp, ...]) -> UOp | None:
    """Constants and neutral elements of index arithmetic; constants go to the right."""
    if len(src) != 2:
        return None
    a, b = src
    if a.op is Ops.CONST:
        if b.op is Ops.CONST:
            assert op.meaning is not None
            return UOp(Ops.CONST, dtypes.index, (), op.meaning(a.arg, b.arg))
        if op.commutative:
            return alu(op, b, a)
    if b.op is Ops.CONST:
        value = b.arg
        if value == 0 and op is Ops.ADD:
            return a
        if value == 0 and op is Ops.MUL:
            return b
        if value == 1 and op in (Ops.MUL, Ops.FLOORDIV):
            return a
        if value == 1 and op is Ops.FLOORMOD:
            return UOp(Ops.CONST, dtypes.index, (), 0)
    return None


def cast_value(value: PyConst, dtype: DType) -> PyConst:
    """CAST on a Python scalar. Floats outside of an integer type saturate and NaN gives 0, as the kernels do.
    """
    if isinstance(value, float) and (dtype.is_int or dtype.kind == "x"):
        if math.isnan(value):
            return 0
        return int(min(max(value, dtype.min),
                       dtype.max)) if abs(value) != math.inf else (dtype.max if value > 0 else dtype.min)
    return wrap(value, dtype)


# ---- derived properties, one function each -----------------------------------------------------------------


def broadcast_shapes(*shapes: Shape) -> Shape:
    """NumPy's rule: align at the right; each axis must agree or be 1.

    >>> broadcast_shapes((5, 1, 3), (4, 1))
    (5, 4, 3)
    """
    first = shapes[0]
    if all(shape == first for shape in shapes[1:]):
        return first
    rank = max(len(shape) for shape in shapes)
    result: list[Sint] = []
    for sizes in zip(*[(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes], strict=True):
        wide = {size for size in sizes if not (isinstance(size, int) and size == 1)}
        if len(wide) > 1:
            named = " and ".join(sorted(show_size(size) for size in wide))
            raise ShapeError("broadcast " + " with ".join(show_shape(s) for s in shapes),
                             because=f"sizes {named} differ and none is 1",
                             fix="reshape or expand one of them")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def show_size(size: Sint) -> str:
    """A readable size: 3, or an expression of variables."""
    if isinstance(size, int):
        return str(size)
    if size.op is Ops.VAR:
        return str(size.arg.name)
    if size.op is Ops.BIND:
        return f"{size.src[0].arg.name}={size.src[1].arg}"
    if size.op is Ops.CONST:
        return str(size.arg)
    symbol = {Ops.ADD: "+", Ops.MUL: "*", Ops.FLOORDIV: "//", Ops.FLOORMOD: "%"}.get(size.op)
    return "(" + (symbol or size.op.name).join(show_size(s) for s in size.src) + ")"


def show_shape(shape: Shape) -> str:
    """A shape as Python would print it."""
    return "(" + ", ".join(show_size(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"


def _shape_reshape(u: UOp) -> Shape:
    old, new = u.src[0].shape, u.arg
    if prod(old) != prod(new) and not _same_size(prod(old), prod(new)):
        raise ShapeError(f"reshape: cannot turn {show_shape(old)} into {show_shape(new)}",
                         because=f"{show_size(prod(old))} elements into {show_size(prod(new))}",
                         fix="the sizes must multiply to the same number; -1 infers one of them")
    return tuple(new)


def _same_size(a: Sint, b: Sint) -> bool:
    from whit.uop.symbolic import simplify
    return simplify(UOp.index(a)) is simplify(UOp.index(b))


def _shape_permute(u: UOp) -> Shape:
    old = u.src[0].shape
    if sorted(u.arg) != list(range(len(old))):
        raise ShapeError(f"permute {show_shape(old)} by {u.arg}",
                         because=f"the axes must be 0 … {len(old) - 1}, each once",
                         fix="name every axis once")
    return tuple([old[axis] for axis in u.arg])


def _shape_expand(u: UOp) -> Shape:
    old, new = u.src[0].shape, u.arg
    if len(old) != len(new) or any(a != b and a != 1 for a, b in zip(old, new, strict=True)):
        raise ShapeError(f"expand {show_shape(old)} to {show_shape(new)}",
                         because="only axes of size 1 can be expanded",
                         fix="reshape first so that the expanded axes have size 1")
    return tuple(new)


def _shape_pad(u: UOp) -> Shape:
    old = u.src[0].shape
    if len(u.arg) != len(old) or any(isinstance(w, int) and w < 0 for pair in u.arg for w in pair):
        raise ShapeError(f"pad {show_shape(old)} by {u.arg}",
                         because="it takes one (before, after) >= 0 per axis",
                         fix="use shrink to remove elements")
    return tuple([known_size(size + before + after)
                  for size, (before, after) in zip(old, u.arg, strict=True)])


def known_size(size: Sint) -> Sint:
    """The size in its simplest form; an int where the variables cancel."""
    if isinstance(size, int):
        return size
    from whit.uop.symbolic import simplify
    size = simplify(size)
    return size.arg if size.op is Ops.CONST else size


def _shape_shrink(u: UOp) -> Shape:
    old = u.src[0].shape
    if len(u.arg) != len(old):
        raise ShapeError(f"shrink {show_shape(old)} to {u.arg}",
                         because="it takes one (start, stop) per axis", fix="name every axis")
    for size, (start, stop) in zip(old, u.arg, strict=True):
        known = isinstance(size, int) and isinstance(start, int) and isinstance(stop, int)
        if known and not 0 <= start <= stop <= size:
            raise ShapeError(f"shrink {show_shape(old)} to {u.arg}",
                             because=f"({start}, {stop}) is not within 0 … {size}",
                             fix="keep 0 <= start <= stop <= size")
    return tuple([known_size(stop - start) for start, stop in u.arg])


def _shape_reduce(u: UOp) -> Shape:
    axes = u.arg.axes
    return tuple([size for axis, size in enumerate(u.src[0].shape) if axis not in axes])


def _shape_take(u: UOp) -> Shape:
    source, index = u.src
    return source.shape[:u.arg] + index.shape + source.shape[u.arg + 1:]


def _shape_first(u: UOp) -> Shape:
    return u.src[0].shape


def _shape_output(u: UOp) -> Shape:
    return tuple(u.arg[1]) if isinstance(u.src[0].arg, CallArg) or len(u.src) == 2 else ()


_SHAPE_RULES: dict[Op, Callable[[UOp], Shape]] = {
    Ops.IOTA: lambda u: (u.arg,), Ops.BUFFER: lambda u: (u.arg.size,), Ops.PARAM: lambda u: (u.arg.size,),
    Ops.RESHAPE: _shape_reshape, Ops.PERMUTE: _shape_permute, Ops.EXPAND: _shape_expand, Ops.PAD: _shape_pad,
    Ops.SHRINK: _shape_shrink, Ops.FLIP: _shape_first, Ops.REDUCE: _shape_reduce, Ops.TAKE: _shape_take,
    Ops.CONTIGUOUS: _shape_first, Ops.DETACH: _shape_first, Ops.COPY: _shape_first, Ops.AFTER: _shape_first,
    Ops.OUTPUT: _shape_output,
}


def _device_of(u: UOp) -> str | None:
    if u.op is Ops.BUFFER:
        return str(u.arg.device)
    if u.op is Ops.COPY:
        return str(u.arg)
    if u.op is Ops.CALL and isinstance(u.arg, CallArg):
        return str(u.arg.device)
    for source in u.src:
        if source.device is not None:
            return source.device
    return None


_NO_RANGES: frozenset[UOp] = frozenset()


def _ranges_of(u: UOp) -> frozenset[UOp]:
    if u.op is Ops.RANGE:
        return frozenset({u}) | (u.src[0]._ranges or _NO_RANGES)
    if not u.src:
        return _NO_RANGES
    result = u.src[0]._ranges or _NO_RANGES
    for source in u.src[1:]:
        more = source._ranges
        if more and more is not result:
            result = (result | more) if not more <= result else result
    if u.op in (Ops.REDUCE, Ops.END, Ops.STAGE) and len(u.src) > 1:
        result = result - frozenset(u.src[1:])
    return result


def arg_fields(cls: type) -> dict[str, str]:
    """Field names and types of an argument's class: a NamedTuple, or a dataclass."""
    if hasattr(cls, "__dataclass_fields__"):
        return {name: str(field.type) for name, field in cls.__dataclass_fields__.items()}
    return {name: _type_text(kind) for name, kind in cls.__annotations__.items()}


def _type_text(kind: Any) -> str:
    """An annotation as it is written: it may be evaluated or not."""
    return kind.__name__ if isinstance(kind, type) else str(getattr(kind, "__forward_arg__", kind))


def stable_text(arg: Any) -> str:
    """A text of an argument that does not change between processes (UOps by digest)."""
    if isinstance(arg, UOp):
        return "u" + arg.key.hex()
    cls = type(arg)
    if cls is tuple:
        return "(" + ",".join([stable_text(item) for item in arg]) + ")"
    if hasattr(cls, "_fields") or hasattr(cls, "__dataclass_fields__"):
        values = ",".join([stable_text(getattr(arg, name)) for name in arg_fields(cls)])
        return f"{cls.__name__}({values})"
    return repr(arg)


def _flatten_nodes(root: UOp) -> list[tuple[Op, DType, tuple[int, ...], Any]]:
    """For pickling: nodes in order with sources as positions, so that depth costs no recursion."""
    position: dict[UOp, int] = {}
    rows: list[tuple[Op, DType, tuple[int, ...], Any]] = []
    for node in root.toposort():
        rows.append((node.op, node.dtype, tuple([position[s] for s in node.src]), node.arg))
        position[node] = len(position)
    return rows


def _unpickle(rows: list[tuple[Op, DType, tuple[int, ...], Any]]) -> UOp:
    nodes: list[UOp] = []
    for op, dtype, src, arg in rows:
        nodes.append(UOp(op, dtype, tuple([nodes[i] for i in src]), arg))
    return nodes[-1]


def uops_in(arg: Any) -> Iterator[UOp]:
    """The UOps inside an argument (symbolic sizes)."""
    if isinstance(arg, UOp):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from uops_in(item)


def variables_of(nodes: Iterable[UOp]) -> list[UOp]:
    """The VARs that the nodes or their symbolic sizes name, sorted by name."""
    found: dict[UOp, None] = {}
    for node in nodes:
        if node.op is Ops.VAR:
            found[node] = None
        kind = node.arg.__class__
        if kind is tuple or kind is UOp:  # sizes; other arguments hold none
            for inner in uops_in(node.arg):
                for part in inner.toposort():
                    if part.op is Ops.VAR:
                        found[part] = None
    return sorted(found, key=lambda v: str(v.arg.name))


from whit.uop.bounds import bounds_of  # noqa: E402  (it needs UOp)

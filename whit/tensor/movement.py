"""Movement: operations that rearrange elements without computing. Most are views and cost no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from whit.helpers import ArgumentError, DTypeError, ShapeError, ceildiv, prod
from whit.tensor.base import check_devices, scalar_shape
from whit.tensor.special import SpecialMixin
from whit.uop import DType, Ops, PyConst, Shape, Sint, UOp, dtypes
from whit.uop.dtype import common_dtype, to_dtype
from whit.uop.uop import known_size, show_shape


def sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`f(2, 3)` and `f((2, 3))` alike."""
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    return args


def whole(values: tuple[Any, ...], what: str, least: int | None = 0) -> tuple[Any, ...]:
    """Sizes as Python ints (or symbolic) that are at least `least`."""
    result = []
    for value in values:
        if not isinstance(value, UOp):
            try:
                number = value.__index__()
            except (AttributeError, TypeError):
                raise ShapeError(
                    f"{what} {values}", because=f"{value!r} is no size", fix="sizes are whole numbers"
                ) from None
            if least is not None and number < least:
                raise ShapeError(
                    f"{what} {values}", because=f"{number} is too small", fix=f"use {least} or more"
                )
            value = number
        result.append(value)
    return tuple(result)


class MovementMixin(SpecialMixin):
    """Methods of the movement family."""

    # ---- the primitive movements

    def reshape(self, *shape: Any) -> Self:
        """The same elements in row-major order in another shape; one size may be -1, and None keeps an axis.

        >>> Tensor.arange(6).reshape(2, -1).shape
        (2, 3)
        """
        new = sizes(shape)
        old = self.shape
        if any(size is None for size in new):
            new = tuple(
                [old[axis] if size is None and axis < len(old) else size for axis, size in enumerate(new)]
            )
        wrong = [
            size for size in new if not isinstance(size, (int, UOp)) or (isinstance(size, int) and size < -1)
        ]
        if wrong:
            new_integers = _integers(new)
            if new_integers is None:
                raise ShapeError(
                    f"reshape {show_shape(old)} to {new}",
                    because=f"{wrong[0]!r} is no size",
                    fix="sizes are whole numbers >= 0, and at most one -1",
                )
            new = new_integers
        if -1 in [size for size in new if isinstance(size, int)]:
            new = self._inferred(old, new)
        if any(type(size) is bool for size in new):
            new = tuple([int(size) if isinstance(size, bool) else size for size in new])
        return self._wrap(self.uop.reshape(new))

    def _inferred(self, old: Shape, new: tuple[Any, ...]) -> tuple[Any, ...]:
        """`new` with its -1 replaced by what is left of the elements."""
        known = prod([size for size in new if not (isinstance(size, int) and size == -1)])
        total = prod(old)
        why = ""
        if sum(1 for size in new if isinstance(size, int) and size == -1) > 1:
            why = "only one size can be inferred"
        elif isinstance(known, int) and known == 0:
            why = "with a size of 0, -1 could be anything"
        elif isinstance(known, int) and isinstance(total, int) and total % known:
            why = f"{total} elements are no multiple of {known}"
        if why:
            raise ShapeError(
                f"reshape {show_shape(old)} to {show_shape(new)}", because=why, fix="write the sizes out"
            )
        left = total // known
        if isinstance(left, UOp):
            from whit.uop.symbolic import simplify

            left = simplify(left)
            left = left.arg if left.op is Ops.CONST else left
        return tuple([left if isinstance(size, int) and size == -1 else size for size in new])

    def view(self, *shape: Any) -> Self:
        """Another name of `reshape`."""
        return self.reshape(*shape)

    def permute(self, *order: Any) -> Self:
        """Reorder the axes; axis i of the result is axis order[i].

        >>> Tensor.zeros(2, 3, 5).permute(2, 0, 1).shape
        (5, 2, 3)
        """
        axes = tuple([self._axis(axis, "permute") for axis in sizes(order)])
        return self._wrap(self.uop.permute(axes))

    def transpose(self, dim0: int = 1, dim1: int = 0) -> Self:
        """Swap two axes."""
        order = list(range(self.ndim))
        a, b = self._axis(dim0, "transpose"), self._axis(dim1, "transpose")
        order[a], order[b] = order[b], order[a]
        return self._wrap(self.uop.permute(tuple(order)))

    @property
    def T(self) -> Self:
        """The transpose of a matrix; axes reversed in general."""
        return self._wrap(self.uop.permute(tuple(reversed(range(self.ndim)))))

    def expand(self, *shape: Any) -> Self:
        """Repeat axes of size 1 (and add axes at the left) up to `shape`; -1 keeps a size. Costs no
        memory."""
        new = whole(sizes(shape), "expand to", least=-1)
        old = self.shape
        extra = len(new) - len(old)
        if extra < 0:
            raise ShapeError(
                f"expand {show_shape(old)} to {show_shape(new)}",
                because="the new shape has fewer axes",
                fix="name every axis",
            )
        aligned = (1,) * extra + old
        target = tuple(
            [size if isinstance(want, int) and want == -1 else want for want, size in zip(new, aligned)]
        )
        return self._wrap(self.uop.reshape(aligned).expand(target))

    def broadcast_to(self, *shape: Any) -> Self:
        """Another name of `expand`."""
        return self.expand(*shape)

    def shrink(self, limits: Sequence[tuple[Sint, Sint] | None]) -> Self:
        """Keep start <= i < stop on each axis; None keeps the axis.

        >>> Tensor.arange(6).shrink(((1, 4),)).tolist()
        [1, 2, 3]
        """
        old = self.shape
        pairs: Any = tuple([(0, size) if pair is None else tuple(pair) for pair, size in zip(limits, old)])
        if len(limits) != len(old):
            raise ShapeError(
                f"shrink {show_shape(old)} to {tuple(limits)}",
                because="it takes one (start, stop) per axis",
                fix="name every axis; None keeps one",
            )
        return self._wrap(self.uop.shrink(pairs))

    def shrink_to(self, *shape: Any) -> Self:
        """Keep the first sizes of each axis; None keeps the axis."""
        new = sizes(shape)
        if len(new) != self.ndim:
            raise ShapeError(
                f"shrink_to {new} of shape {show_shape(self.shape)}",
                because="it takes one size per axis",
                fix="name every axis; None keeps one",
            )
        return self.shrink([None if size is None else (0, size) for size in new])

    def pad_to(self, *shape: Any) -> Self:
        """Zeros after the end of each axis up to the sizes; None keeps the axis."""
        new, old = sizes(shape), self.shape
        if len(new) != len(old):
            raise ShapeError(
                f"pad_to {new} of shape {show_shape(old)}",
                because="it takes one size per axis",
                fix="name every axis; None keeps one",
            )
        return self._wrap(
            self.uop.pad(tuple([(0, 0 if want is None else want - size) for want, size in zip(new, old)]))
        )

    def flip(self, *axis: Any) -> Self:
        """Reverse axes; without arguments all of them.

        >>> Tensor([[1, 2], [3, 4]]).flip(1).tolist()
        [[2, 1], [4, 3]]
        """
        return self._wrap(self.uop.flip(self._axes(sizes(axis) if axis else None, "flip")))

    # ---- padding

    def pad(self, padding: Sequence[Any], mode: str = "constant", value: PyConst = 0) -> Self:
        """Elements around. `padding` is one (before, after) or None per axis, or PyTorch's flat form (last
        axis first); negative amounts remove. Modes: "constant" (with `value`), "reflect", "replicate",
        "circular".

        >>> Tensor([1, 2, 3]).pad(((2, 1),), mode="reflect").tolist()
        [3, 2, 1, 2, 3, 2]
        """
        widths = self._padding(padding)
        if mode == "constant":
            return self._pad_constant(widths, value)
        if mode not in ("reflect", "replicate", "circular"):
            raise ArgumentError(
                f"pad(mode={mode!r})",
                because="there is no such mode",
                fix='use "constant", "reflect", "replicate" or "circular"',
            )
        result = self
        for axis, (before, after) in enumerate(widths):
            result = result._pad_axis(axis, before, after, mode)
        return result

    def _padding(self, padding: Sequence[Any]) -> tuple[tuple[Any, Any], ...]:
        ndim = len(self.shape)
        flat = all(isinstance(width, (int, UOp)) for width in padding) and len(padding) > 0
        if flat:
            if len(padding) % 2 or len(padding) // 2 > ndim:
                raise ShapeError(
                    f"pad {show_shape(self.shape)} by {tuple(padding)}",
                    because="the flat form takes two numbers per axis, last axis first",
                    fix="pass one (before, after) per axis",
                )
            pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)]
            return ((0, 0),) * (ndim - len(pairs)) + tuple(reversed(pairs))
        if len(padding) != ndim or any(width is not None and len(width) != 2 for width in padding):
            raise ShapeError(
                f"pad {show_shape(self.shape)} by {tuple(padding)}",
                because="it takes one (before, after) per axis",
                fix="name every axis; None leaves one alone",
            )
        return tuple([(0, 0) if w is None else whole(tuple(w), "pad by", least=None) for w in padding])

    def _pad_constant(self, widths: tuple[tuple[Any, Any], ...], value: PyConst) -> Self:
        old = self.shape
        uop = self.uop
        if any(isinstance(w, int) and w < 0 for pair in widths for w in pair):
            cut = [(-min(before, 0), size + min(after, 0)) for size, (before, after) in zip(old, widths)]
            if any(start > stop for start, stop in cut):
                raise ShapeError(
                    f"pad {show_shape(old)} by {widths}",
                    because="more elements are removed than there are",
                    fix="remove fewer",
                )
            uop = uop.shrink(tuple(cut))
            widths = tuple([(max(before, 0), max(after, 0)) for before, after in widths])
        inner = uop.shape
        if 0 in [size for size in inner if isinstance(size, int)]:  # nothing is inside
            new = tuple([size + before + after for size, (before, after) in zip(inner, widths)])
            return self._wrap(scalar_shape(self._wrap(uop)._operands(value, "pad")[1], new))
        if value == 0 or all(pair == (0, 0) for pair in widths):
            return self._wrap(uop.pad(widths))
        x = self._wrap(uop)
        fill, x_node = x._operands(value, "pad")[::-1]
        inside = scalar_shape(UOp.const(True, dtypes.bool), inner).pad(widths)
        return self._wrap(UOp(Ops.WHERE, x_node.dtype, (inside, x_node.pad(widths), fill)))

    def _pad_axis(self, axis: int, before: int, after: int, mode: str) -> Self:
        """One axis of the modes that repeat elements."""
        size = self.shape[axis]
        limit = {"reflect": size - 1, "circular": size, "replicate": None}[mode]
        if limit is not None and (before > limit or after > limit):
            raise ShapeError(
                f"pad(mode={mode!r}) of an axis of size {size} by ({before}, {after})",
                because=f"this mode can add at most {limit} on a side",
                fix="pad less, or in several steps",
            )
        if mode == "replicate" and size == 0 and (before or after):
            raise ShapeError(
                "pad(mode='replicate') of an empty axis",
                because="there is no edge to repeat",
                fix="pad constants",
            )

        pieces: list[Self] = [self]
        if before > 0:
            pieces.insert(
                0,
                self._repeated_edge(
                    axis,
                    mode,
                    {"reflect": (1, before + 1), "replicate": (0, 1), "circular": (size - before, size)}[
                        mode
                    ],
                    before,
                ),
            )
        if after > 0:
            pieces.append(
                self._repeated_edge(
                    axis,
                    mode,
                    {
                        "reflect": (size - 1 - after, size - 1),
                        "circular": (0, after),
                        "replicate": (size - 1, size),
                    }[mode],
                    after,
                )
            )
        result = pieces[0].cat(*pieces[1:], dim=axis) if len(pieces) > 1 else self
        cut = (-min(before, 0), result.shape[axis] + min(after, 0))
        return result.shrink([cut if a == axis else None for a in range(self.ndim)])

    def _repeated_edge(self, axis: int, mode: str, limits: tuple[int, int], count: int) -> Self:
        piece = self._part(axis, *limits)
        if mode == "reflect":
            return piece.flip(axis)
        return (
            piece.expand(*[count if a == axis else -1 for a in range(self.ndim)])
            if mode == "replicate"
            else piece
        )

    # ---- axes of size 1, merging and splitting

    def squeeze(self, dim: int | tuple[int, ...] | None = None) -> Self:
        """Drop axes of size 1: all, or `dim` where its size is 1."""
        shape = self.shape
        drop = range(len(shape)) if dim is None else self._axes(dim, "squeeze")
        kept = [
            size
            for axis, size in enumerate(shape)
            if not (axis in drop and isinstance(size, int) and size == 1)
        ]
        return self._wrap(self.uop.reshape(tuple(kept)))

    def unsqueeze(self, dim: int) -> Self:
        """A new axis of size 1 at position `dim`."""
        at = self._axis(dim, "unsqueeze", extra=1)
        shape = self.shape
        return self._wrap(self.uop.reshape((*shape[:at], 1, *shape[at:])))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge the axes start_dim … end_dim into one."""
        shape = self.shape
        if not shape:
            return self._wrap(self.uop.reshape((1,)))
        start, end = self._axis(start_dim, "flatten"), self._axis(end_dim, "flatten")
        if start > end:
            raise ShapeError(
                f"flatten axes {start_dim} to {end_dim} of {show_shape(shape)}",
                because="the first comes after the last",
                fix="swap them",
            )
        return self._wrap(self.uop.reshape((*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :])))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Split axis `dim` into `sizes`, one of which may be -1."""
        at = self._axis(dim, "unflatten")
        shape = self.shape
        inner = self._inferred((shape[at],), tuple(sizes)) if -1 in sizes else tuple(sizes)
        return self.reshape(*shape[:at], *inner, *shape[at + 1 :])

    # ---- repetition, joining, cutting

    def repeat(self, *repeats: Any) -> Self:
        """Tile: each axis `repeats` times, new axes at the left.

        >>> Tensor([1, 2]).repeat(2, 2).tolist()
        [[1, 2, 1, 2], [1, 2, 1, 2]]
        """
        counts = whole(sizes(repeats), "repeat by")
        if len(counts) < self.ndim:
            raise ShapeError(
                f"repeat {show_shape(self.shape)} by {counts}",
                because="it takes a count for every axis",
                fix="give at least as many counts as there are axes",
            )
        shape = (1,) * (len(counts) - self.ndim) + self.shape
        split = [size for pair in zip((1,) * len(shape), shape) for size in pair]
        tiled = [size for pair in zip(counts, shape) for size in pair]
        merged = tuple([count * size for count, size in zip(counts, shape)])
        return self._wrap(self.uop.reshape(tuple(split)).expand(tuple(tiled)).reshape(merged))

    def repeat_interleave(self, repeats: int, dim: int | None = None) -> Self:
        """Each element `repeats` times in a row, along `dim` or flattened."""
        x = self.flatten() if dim is None else self
        at = x._axis(0 if dim is None else dim, "repeat_interleave")
        shape = x.shape
        (repeats,) = whole((repeats,), "repeat_interleave by")
        wide = x.uop.reshape((*shape[: at + 1], 1, *shape[at + 1 :])).expand(
            (*shape[: at + 1], repeats, *shape[at + 1 :])
        )
        return self._wrap(wide.reshape((*shape[:at], shape[at] * repeats, *shape[at + 1 :])))

    def cat(self, *others: Self, dim: int = 0) -> Self:
        """Join along an existing axis. Also `Tensor.cat(a, b, dim=…)` and `Tensor.cat([a, b])`; dtypes
        promote.

        >>> Tensor([1, 2]).cat(Tensor([3])).tolist()
        [1, 2, 3]
        """
        parts: list[Self] = _parts(self, others)
        if not parts:
            raise ArgumentError(
                "cat of no tensors", because="there is nothing to join", fix="pass at least one"
            )
        first = parts[0]
        if first.ndim == 0:
            raise ShapeError("cat of scalars", because="shape () has no axis to join along", fix="use stack")
        at = first._axis(dim, "cat")
        dtype = common_dtype(*[part.uop.dtype for part in parts])
        nodes = [part.uop.cast(dtype) for part in parts]
        check_devices("cat", *nodes)
        rest = first.shape[:at] + first.shape[at + 1 :]
        for node in nodes:
            if len(node.shape) != first.ndim or node.shape[:at] + node.shape[at + 1 :] != rest:
                raise ShapeError(
                    f"cat of {' and '.join(show_shape(n.shape) for n in nodes)} along axis {at}",
                    because="the other axes differ",
                    fix="make them equal, or join along another axis",
                )
        nodes = [
            node for node in nodes if not (isinstance(node.shape[at], int) and node.shape[at] == 0)
        ] or nodes[:1]
        return first._wrap(_joined(nodes, at))

    def stack(self, *others: Self, dim: int = 0) -> Self:
        """Join along a new axis; all shapes must be equal.

        >>> Tensor.stack(Tensor([1, 2]), Tensor([3, 4]), dim=1).tolist()
        [[1, 3], [2, 4]]
        """
        parts: list[Self] = _parts(self, others)
        if not parts:
            raise ArgumentError(
                "stack of no tensors", because="there is nothing to join", fix="pass at least one"
            )
        if any(part.shape != parts[0].shape for part in parts):
            raise ShapeError(
                f"stack of {' and '.join(show_shape(p.shape) for p in parts)}",
                because="the shapes differ",
                fix="make them equal",
            )
        wide = [part.unsqueeze(dim) for part in parts]
        return wide[0].cat(*wide[1:], dim=parts[0]._axis(dim, "stack", extra=1))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Consecutive pieces: of `sizes` elements each (the last may be shorter), or of the listed sizes."""
        at = self._axis(dim, "split")
        total = self.shape[at]
        if isinstance(sizes, int):
            if sizes <= 0:
                raise ArgumentError(
                    f"split into pieces of {sizes}", because="a piece needs elements", fix="use 1 or more"
                )
            sizes = [min(sizes, total - start) for start in range(0, total, sizes)] or [0]
        if sum(sizes) != total:
            raise ShapeError(
                f"split axis {at} of {show_shape(self.shape)} into {list(sizes)}",
                because=f"the pieces have {sum(sizes)} elements and the axis has {total}",
                fix="make them add up",
            )
        result, start = [], 0
        for size in sizes:
            result.append(self._part(at, start, start + size))
            start += size
        return tuple(result)

    def _part(self, axis: int, start: Sint, stop: Sint) -> Self:
        """start <= i < stop of one axis."""
        limits = tuple([(start, stop) if a == axis else (0, size) for a, size in enumerate(self.shape)])
        return self._wrap(self.uop.shrink(limits))

    def chunk(self, chunks: int, dim: int = 0) -> list[Self]:
        """At most `chunks` pieces of equal size; the last may be shorter."""
        at = self._axis(dim, "chunk")
        if chunks <= 0:
            raise ArgumentError(f"chunk into {chunks}", because="there must be a piece", fix="use 1 or more")
        size = self.shape[at]
        return list(self.split(ceildiv(size, chunks), at)) if size else [self] * chunks

    def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Self:
        """Shift elements along axes; what leaves at the end comes in at the start. Without dims: flattened.

        >>> Tensor([1, 2, 3]).roll(1).tolist()
        [3, 1, 2]
        """
        if dims is None:
            flat = self.flatten()
            return flat.roll(shifts if isinstance(shifts, int) else sum(shifts), 0).reshape(*self.shape)
        pairs = (
            [(shifts, dims)]
            if isinstance(shifts, int) and isinstance(dims, int)
            else list(zip(*_same_length(shifts, dims)))
        )
        result = self
        for shift, dim in pairs:
            at = self._axis(dim, "roll")
            size = self.shape[at]
            cut = (size - shift % size) % size if size else 0
            if cut:
                result = result._part(at, cut, size).cat(result._part(at, 0, cut), dim=at)
        return result

    def unfold(self, dim: int, size: int, step: int) -> Self:
        """Windows of `size` every `step` along `dim`, in a new last axis."""
        at = self._axis(dim, "unfold")
        total = self.shape[at]
        if size < 0 or step <= 0 or size > total:
            raise ShapeError(
                f"unfold axis {at} of {show_shape(self.shape)} into windows of {size} every {step}",
                because=f"it takes 0 <= size <= {total} and step >= 1",
                fix="choose a smaller window",
            )
        x = self.transpose(at, -1) if at != self.ndim - 1 else self
        windows = x._windows(size, step)  # (..., count, size)
        return windows.transpose(at, -2) if at != self.ndim - 1 else windows

    def _windows(self, size: int, step: int) -> Self:
        """(..., n) -> (..., count, size): repeat the axis, then read it with a longer stride."""
        *lead, n = self.shape
        count = (n - size) // step + 1
        if size == 0:
            return self._part(self.ndim - 1, 0, 0).unsqueeze(-2).expand(*lead, count, 0)
        if step >= size:  # windows do not overlap: cut rows of length step
            need = count * step
            x = self._wrap(self.uop.pad(((0, 0),) * len(lead) + ((0, max(0, need - n)),)))._part(
                self.ndim - 1, 0, need
            )
            return x.reshape(*lead, count, step)._part(self.ndim, 0, size)
        # row r of the (count, n + step) grid starts r * step further than row r - 1 when n + step columns are
        # read as n
        width = n + step
        x = self.unsqueeze(-2).expand(*lead, count + 1, n).flatten(-2)  # index r * n + c
        need = count * width
        have = (count + 1) * n
        if have < need:
            x = self._wrap(x.uop.pad(((0, 0),) * len(lead) + ((0, need - have),)))
        x = x._part(x.ndim - 1, 0, need).reshape(*lead, count, width)  # (r, c) reads (r * step + c) mod n
        return x._part(x.ndim - 1, 0, size)

    def rot90(self, k: int = 1, dims: tuple[int, int] = (0, 1)) -> Self:
        """Turn by k quarters from the first axis of `dims` towards the second.

        >>> Tensor([[1, 2], [3, 4]]).rot90().tolist()
        [[2, 4], [1, 3]]
        """
        a, b = self._axis(dims[0], "rot90"), self._axis(dims[1], "rot90")
        if a == b:
            raise ShapeError(f"rot90 of axes {dims}", because="they are the same", fix="name two axes")
        if k % 4 == 2:
            return self.flip(a, b)
        return (
            self
            if k % 4 == 0
            else self.flip(b).transpose(a, b)
            if k % 4 == 1
            else self.transpose(a, b).flip(b)
        )

    def diff(self, n: int = 1, dim: int = -1) -> Self:
        """Differences of neighbours along `dim`, n times; of bools `xor`.

        >>> Tensor([1, 4, 9]).diff().tolist()
        [3, 5]
        """
        at, result = self._axis(dim, "diff"), self
        for _ in range(n):
            size = result.shape[at]
            later, earlier = result._part(at, min(1, size), size), result._part(at, 0, max(size - 1, 0))
            result = later ^ earlier if self.uop.dtype.is_bool else later - earlier
        return result

    # ---- diagonals

    def diag(self) -> Self:
        """A vector as the diagonal of a matrix; the diagonal of a matrix as a vector."""
        if self.ndim == 2:
            return self.diagonal()
        if self.ndim != 1:
            raise ShapeError(
                f"diag of shape {show_shape(self.shape)}",
                because="it takes a vector or a matrix",
                fix="use diagonal for more axes",
            )
        n = self.shape[0]
        return self._wrap(
            self.uop.reshape((n, 1))
            .pad(((0, 0), (0, n)))
            .reshape((n * (n + 1),))
            .shrink(((0, n * n),))
            .reshape((n, n))
        )

    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Self:
        """The elements (i, i + offset) of axes dim1 and dim2, in a new last axis.

        >>> Tensor([[1, 2], [3, 4]]).diagonal().tolist()
        [1, 4]
        """
        a, b = self._axis(dim1, "diagonal"), self._axis(dim2, "diagonal")
        if a == b:
            raise ShapeError(
                f"diagonal of axes {dim1} and {dim2}", because="they are the same", fix="name two axes"
            )
        order = [axis for axis in range(self.ndim) if axis not in (a, b)] + [a, b]
        x = self.permute(order)
        *lead, rows, columns = x.shape
        x = x._part(x.ndim - 2, min(max(-offset, 0), rows), rows)._part(
            x.ndim - 1, min(max(offset, 0), columns), columns
        )
        n = min(x.shape[-2], x.shape[-1])
        x = x._part(x.ndim - 2, 0, n)._part(x.ndim - 1, 0, n)
        if n == 0:
            return x.reshape(*lead, 0)
        x = x.flatten(-2)
        return (
            self._wrap(x.uop.pad(((0, 0),) * len(lead) + ((0, n),)))
            .reshape(*lead, n, n + 1)
            ._part(len(lead) + 1, 0, 1)
            .reshape(*lead, n)
        )

    # ---- bits

    def bitcast(self, dtype: DType | str) -> Self:
        """The same bits in another dtype. Of another width, the last axis shrinks or grows accordingly.

        >>> Tensor([1.0]).bitcast(dtypes.uint32).tolist()
        [1065353216]
        """
        want, have = to_dtype(dtype), self.uop.dtype
        if want.is_bool or have.is_bool:
            if want is have:
                return self
            raise DTypeError(f"bitcast {have} to {want}", because="bool has no defined bits", fix="use cast")
        if want.bitsize == have.bitsize:
            return self._wrap(self.uop.bitcast(want))
        if not self.ndim:
            raise ShapeError(
                f"bitcast a scalar {have} to {want}",
                because="the widths differ and there is no axis to resize",
                fix="reshape to (1,) first",
            )
        return self._split_bits(want) if want.bitsize < have.bitsize else self._join_bits(want)

    def _split_bits(self, want: DType) -> Self:
        ratio = self.uop.dtype.bitsize // want.bitsize
        word = self._wrap(self.uop.bitcast(_unsigned(self.uop.dtype.bitsize))).unsqueeze(-1)
        shift = UOp(Ops.IOTA, dtypes.int32, (), ratio).cast(word.uop.dtype)
        parts = word.rshift(self._wrap(shift) * want.bitsize).cast(_unsigned(want.bitsize))
        return self._wrap(parts.flatten(-2).uop.bitcast(want))

    def _join_bits(self, want: DType) -> Self:
        ratio, small = want.bitsize // self.uop.dtype.bitsize, self.uop.dtype.bitsize
        size = self.shape[-1]
        if size % ratio:
            raise ShapeError(
                f"bitcast {self.uop.dtype} of shape {show_shape(self.shape)} to {want}",
                because=f"the last axis is no multiple of {ratio}",
                fix="pad it first",
            )
        parts = self._wrap(self.uop.bitcast(_unsigned(small))).cast(_unsigned(want.bitsize))
        parts = parts.reshape(*self.shape[:-1], size // ratio, ratio)
        last = parts.ndim - 1
        word = parts._part(last, 0, 1)
        for i in range(1, ratio):
            word = word | parts._part(last, i, i + 1).lshift(i * small)
        return self._wrap(word.squeeze(-1).uop.bitcast(want))

    # ---- einops

    def rearrange(self, formula: str, **sizes: int) -> Self:
        """Reshape and permute by names, as einops' rearrange: "b (h w) c -> b c h w", `...`, and 1.

        >>> Tensor.arange(6).rearrange("(a b) -> b a", a=2).tolist()
        [[0, 3], [1, 4], [2, 5]]
        """
        from whit.tensor.einops import plan

        first, order, last = plan(formula, self.shape, sizes)
        return self.reshape(*first).permute(*order).reshape(*last)


def _parts(first: Any, others: tuple[Any, ...]) -> list[Any]:
    """The tensors of `a.cat(b)`, `Tensor.cat(a, b)` and `Tensor.cat([a, b])`."""
    return [*first, *others] if isinstance(first, (list, tuple)) else [first, *others]


def _joined(nodes: list[UOp], axis: int) -> UOp:
    """Nodes of equal dtype and other axes, side by side. Pads each to the whole, and chooses by position, so
    that signed zeros and NaN stay as they are."""
    if len(nodes) == 1:
        return nodes[0]
    total: Any = 0
    starts = []
    for node in nodes:
        starts.append(total)
        total = known_size(total + node.shape[axis])
    ndim = len(nodes[0].shape)

    def padded(node: UOp, before: Sint, after: Sint) -> UOp:
        return node.pad(tuple([(before, after) if a == axis else (0, 0) for a in range(len(node.shape))]))

    position = UOp(Ops.IOTA, dtypes.int32, (), total).reshape(
        tuple([total if a == axis else 1 for a in range(ndim)])
    )
    result = padded(nodes[-1], starts[-1], 0)
    for node, start, end in reversed(list(zip(nodes[:-1], starts[:-1], starts[1:]))):
        limit = UOp.const(end, dtypes.int32) if isinstance(end, int) else end.cast(dtypes.int32)
        before = UOp(Ops.CMPLT, dtypes.bool, (position, limit))
        result = UOp(Ops.WHERE, node.dtype, (before, padded(node, start, total - end), result))
    return result


def _unsigned(bits: int) -> DType:
    return {8: dtypes.uint8, 16: dtypes.uint16, 32: dtypes.uint32, 64: dtypes.uint64}[bits]


def _integers(values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The values as Python ints (NumPy's integers have __index__); None if one is no size."""
    result = []
    for value in values:
        if not isinstance(value, UOp):
            try:
                value = value.__index__()
            except (AttributeError, TypeError):
                return None
            if value < -1:
                return None
        result.append(value)
    return tuple(result)


def _same_length(shifts: Any, dims: Any) -> tuple[list[int], list[int]]:
    a = [shifts] if isinstance(shifts, int) else list(shifts)
    b = [dims] if isinstance(dims, int) else list(dims)
    if len(a) != len(b):
        raise ArgumentError(
            f"roll by {shifts} along {dims}",
            because=f"{len(a)} shifts for {len(b)} axes",
            fix="give one per axis",
        )
    return a, b

"""`Tensor`: construction from data, reading data out, realisation, assignment; the operations come from the
mixins."""

from __future__ import annotations

import array
import contextlib
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Self

from whit.helpers import TRAINING, ArgumentError, Context, DTypeError, ShapeError, all_int, prod
from whit.tensor import storage
from whit.tensor.base import TensorBase, check_devices
from whit.tensor.guard import guard
from whit.tensor.indexing import memory_below
from whit.tensor.interchange import InterchangeMixin, node_of_array
from whit.tensor.storage import device_name, hooks, next_version
from whit.uop import DType, Ops, Shape, UOp, dtypes
from whit.uop.dtype import FLOAT_INFO, to_dtype, wrap
from whit.uop.uop import show_shape


class _TensorType(type):
    """Makes `Tensor.training` a view of the TRAINING setting."""

    @property
    def training(cls) -> bool:
        return bool(TRAINING.value)

    @training.setter
    def training(cls, value: bool) -> None:
        TRAINING.value = int(value)


class Tensor(InterchangeMixin, metaclass=_TensorType):
    """A multi-dimensional array whose value is a lazy graph.

    Tensor(data, dtype=None, device=None, requires_grad=None). `data`: a Python scalar, nested lists of them
    (ragged ones raise ShapeError), bytes (uint8), a NumPy array or anything with `__array__`, a Tensor, or a
    symbolic integer. A CPU device reads row-major arrays where they lie: change one afterwards and the
    tensor changes too (`Tensor(array.copy())` keeps its values); writes to the tensor never reach the array.

    >>> (Tensor([1, 2, 3]) + 0.5).tolist()
    [1.5, 2.5, 3.5]
    """

    def __init__(
        self,
        data: Any,
        device: str | None = None,
        dtype: DType | str | None = None,
        requires_grad: bool | None = None,
    ) -> None:
        want = None if dtype is None else to_dtype(dtype)
        uop = _node_of(data, want, None if device is None else device_name(device))
        self.uop = uop if want is None else uop.cast(want)
        TensorBase.live.add(self)
        if requires_grad is not None:
            self.requires_grad = requires_grad

    # ---- computing

    def realize(self, *others: Self) -> Self:
        """Compute this tensor (and the others, together) now. Returns self."""
        hooks.realize([self, *_tensors("realize", others)])
        return self

    @staticmethod
    def realize_all(tensors: Sequence[Tensor]) -> None:
        """Compute several tensors together."""
        hooks.realize(_tensors("realize_all", tensors))

    def backward(self, gradient: Self | None = None) -> Self:
        """Add the gradient of this value (times `gradient`) to `grad` of every tensor with requires_grad=True
        below it."""
        if gradient is not None:
            _tensors("backward", [gradient])
        hooks.backward(self, gradient)
        return self

    def gradient(
        self, *targets: Self, gradient: Self | None = None, materialize_grads: bool = False
    ) -> list[Tensor]:
        """The gradients of this value (times `gradient`) with respect to the targets; touches no `grad`. For
        a target that the value does not depend on: zeros with `materialize_grads`, else ArgumentError."""
        _tensors("gradient", targets if gradient is None else (*targets, gradient))
        return hooks.gradient(self, list(targets), gradient, materialize_grads)

    # ---- data out

    def _concrete_shape(self) -> tuple[int, ...]:
        """The shape with bound variables replaced by their values."""
        return tuple([size if isinstance(size, int) else _value_of(size) for size in self.uop.shape])

    def _bytes(self) -> memoryview:
        """The elements as host bytes, row-major."""
        if prod(self._concrete_shape()) == 0:
            return memoryview(b"")
        uop = self.uop
        if uop.op is Ops.CONST:
            return memoryview(pack([uop.arg], uop.dtype))
        return hooks.read(self)

    def data(self) -> memoryview:
        """The elements as a memoryview with format and shape. DTypeError for dtypes without a format
        (bfloat16, fp8)."""
        dtype = self.uop.dtype
        if not dtype.fmt:
            raise DTypeError(
                f"data() of a {dtype} tensor",
                because="Python has no format character for it",
                fix="cast it to float32 first, or use numpy()",
            )
        shape = self._concrete_shape()
        view = self._bytes()
        if not view.nbytes:
            return view
        if dtype is dtypes.float16:  # not every Python casts to "e"
            import numpy as np

            return np.frombuffer(view, np.float16).reshape(shape).data
        fmt: Any = dtype.fmt
        return view.cast(fmt, shape) if shape else view.cast(fmt)

    def item(self) -> Any:
        """The value of a tensor of one element as a Python scalar. ShapeError for others.

        >>> Tensor([3]).item()
        3
        """
        shape = self._concrete_shape()
        if prod(shape) != 1:
            raise ShapeError(
                f"item() of shape {show_shape(shape)}",
                because=f"it has {prod(shape)} elements and not one",
                fix="index one element, or use tolist()",
            )
        return unpack(self._bytes(), self.uop.dtype)[0]

    def tolist(self) -> Any:
        """The values as nested lists of Python scalars; a scalar for shape ().

        >>> Tensor([[1, 2], [3, 4]]).tolist()
        [[1, 2], [3, 4]]
        """
        shape = self._concrete_shape()
        rows: list[Any] = unpack(self._bytes(), self.uop.dtype)
        if not shape:
            return rows[0]
        for axis in range(len(shape) - 1, 0, -1):
            width = shape[axis]
            rows = [rows[i * width : (i + 1) * width] for i in range(prod(shape[:axis]))]
        return rows

    def numpy(self) -> Any:
        """The values as a NumPy array of its own memory; bfloat16 and fp8 as the types of ml_dtypes."""
        import numpy as np

        kind = numpy_dtype(self.uop.dtype)
        shape = self._concrete_shape()
        if len(shape) > 64:
            raise ShapeError(
                f"numpy() of a tensor of {len(shape)} axes",
                because="NumPy has at most 64",
                fix="reshape it first",
            )
        data = self._bytes()
        if not data.nbytes:
            return np.empty(shape, kind)
        result = np.frombuffer(data, kind).reshape(shape)
        return result if result.flags.writeable else result.copy()

    def __len__(self) -> int:
        if not self.uop.shape:
            raise ShapeError(
                "len() of a scalar tensor", because="shape () has no first axis", fix="use numel()"
            )
        return self._concrete_shape()[0]

    def __iter__(self) -> Iterator[Self]:
        for i in range(len(self)):
            yield self[i]

    def __contains__(self, value: Any) -> bool:
        return bool(self.eq(value).any().item())

    def __bool__(self) -> bool:
        if prod(self._concrete_shape()) != 1:
            raise ShapeError(
                f"truth of a tensor of shape {show_shape(self.uop.shape)}",
                because="it is ambiguous unless there is one element",
                fix="use .any() or .all()",
            )
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        if not self.uop.dtype.is_int:
            raise DTypeError(
                f"a {self.uop.dtype} tensor as an index",
                because="an index is an integer",
                fix="cast it to an integer dtype",
            )
        return int(self.item())

    def __repr__(self) -> str:
        uop = self.uop
        about = f"{show_shape(uop.shape)} {uop.dtype} on {self.device}"
        stored = _in_plain_memory(uop)
        if all_int(uop.shape) and (stored or uop.op is Ops.CONST):
            with contextlib.suppress(ArgumentError):  # inside of a jitted function nothing is read
                return f"<Tensor {about}: {self._preview()}>"
        return f"<Tensor {about}, {'in memory' if stored else 'lazy ' + uop.op.name}>"

    def _preview(self) -> str:
        """The values as text, of long axes the first and last three."""
        if prod(self.uop.shape) <= 64:
            return str(self.tolist())
        import numpy as np

        return np.array2string(np.asarray(self), separator=", ", threshold=64, edgeitems=3)

    def __complex__(self) -> complex:
        return complex(self.item())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            bytes(self._bytes()),
            self._concrete_shape(),
            self.uop.dtype,
            self.device,
            self._requires_grad,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result = self.clone()
        result._requires_grad = self._requires_grad
        return result

    # ---- memory and devices

    def contiguous_backward(self) -> Self:
        """The value itself: where gradients are stored is the schedule's decision."""
        return self

    def detach(self) -> Self:
        """The value, through which no gradient flows."""
        return self._wrap(self.uop.detach())

    def clone(self) -> Self:
        """A copy in memory of its own."""
        return self._wrap(self.uop.copy_to(self.device))

    def to(self, device: str | tuple[str, ...] | None) -> Self:
        """The value on another device; itself if it is there. None is the default device."""
        name = device_name(device)
        if self.device == name:
            return self
        result = self._wrap(self.uop.copy_to(name))
        result._requires_grad = self._requires_grad
        if self.grad is not None:
            result.grad = self.grad.to(name)
        return result

    def to_(self, device: str | tuple[str, ...] | None) -> Self:
        """Move this tensor itself."""
        self.uop = self.to(device).uop
        return self

    def replace(self, other: Self) -> Self:
        """Take over another tensor's value, without a copy. The shapes must agree."""
        _tensors("replace", [other])
        if other.uop.shape != self.uop.shape:
            raise ShapeError(
                f"replace shape {show_shape(self.uop.shape)} by {show_shape(other.uop.shape)}",
                because="the shapes differ",
                fix="reshape the new value",
            )
        self.uop = other.uop
        return self

    def assign(self, value: Any) -> Self:
        """Write a value of this dtype, broadcast to this shape, into this tensor's memory. Whoever read the
        tensor before, or shares its memory, keeps the old value. A tensor that is no whole piece of memory
        (not realized yet, or a view such as `x[1:3]` or `x.T`) takes over the value: use `x[1:3] = value` to
        change a part of x.

        Errors: ShapeError, DTypeError (nothing is cast), DeviceError.

        >>> x = Tensor([1, 2, 3]).realize()
        >>> y = x + 0
        >>> x.assign(Tensor([4, 5, 6])).tolist(), y.tolist()
        ([4, 5, 6], [1, 2, 3])
        """
        new = self._assigned(value)
        uop = self.uop
        if new is uop:
            return self
        memory = memory_below(uop)
        self.uop = new if memory is None else next_version(memory, uop, new).reshape(uop.shape)
        return self

    def _assigned(self, value: Any) -> UOp:
        """The value to assign, checked."""
        mine = self.uop
        if isinstance(value, (bool, int, float)):
            if not math.isfinite(value) and not mine.dtype.is_float:
                raise DTypeError(
                    f"assign {value} to a {mine.dtype} tensor",
                    because="no such integer",
                    fix="use a float tensor",
                )
            new = UOp.const(value, mine.dtype)
        else:
            new = self._of(value).uop
        if new.dtype is not mine.dtype:
            raise DTypeError(
                f"assign {new.dtype} to a {mine.dtype} tensor",
                because="assign casts nothing",
                fix=f"cast the value to {mine.dtype}",
            )
        check_devices("assign", mine, new)
        shape = mine.shape
        if new.shape != shape:
            padded = (1,) * (len(shape) - len(new.shape)) + new.shape
            if len(padded) != len(shape) or any(a != b and a != 1 for a, b in zip(padded, shape)):
                raise ShapeError(
                    f"assign {show_shape(new.shape)} to a tensor of shape {show_shape(shape)}",
                    because="the value does not broadcast to the tensor",
                    fix="reshape the value",
                )
            new = new.reshape(padded).expand(shape)
        return new

    # ---- settings

    @staticmethod
    def train(mode: bool = True) -> Context:
        """A context in which layers behave as in training (`with Tensor.train(): …`); `Tensor.training`
        tells."""
        return Context(TRAINING=int(mode))


# elementwise operations, reductions and movement, which are called most, check their arguments themselves
_GUARDED = """
    __array__ __dlpack__ alu const corrcoef cov from_dlpack from_url invalids keccak threefry to_device
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d affine_grid avg_pool1d avg_pool3d ctc_loss embedding fold grid_sample max_pool1d
    max_pool3d arange argsort avg_pool2d batchnorm binary_crossentropy
    binary_crossentropy_logits bincount broadcast_to bucketize cat cholesky cholesky_solve chunk cond
    const_like conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    cosine_similarity cross cross_entropy det diag diagonal diff dropout eigh eigvalsh einsum empty
    empty_like expand eye full full_like gather glorot_uniform histc huber_loss index_add index_copy
    index_select interpolate inv kaiming_normal kaiming_uniform kl_div kthvalue l1_loss layernorm
    linspace lstsq lu masked_fill masked_select matrix_exp matrix_norm matrix_power matrix_rank
    max_pool2d max_unpool2d median meshgrid mode mse_loss multinomial nanmedian nanquantile
    newton_schulz nll_loss norm normal normalize one_hot ones ones_like pad pad_to pinv pixel_shuffle
    pixel_unshuffle put_along_dim qr quantile rand rand_like randint randn randn_like random_bits
    randperm rearrange repeat repeat_interleave rms_norm roll rot90 round scaled_dot_product_attention
    scaled_uniform scatter scatter_add scatter_reduce searchsorted shrink shrink_to smooth_l1_loss
    solve solve_triangular sort sparse_categorical_crossentropy split squeeze stack std std_mean svd
    take take_along_dim tensordot topk train tril triu unflatten unfold uniform unique
    unique_consecutive var var_mean vector_norm zeros zeros_like
"""
guard(Tensor, _GUARDED.split())


def _in_plain_memory(uop: UOp) -> bool:
    while uop.op is Ops.RESHAPE:
        uop = uop.src[0]
    return uop.op is Ops.BUFFER


def _value_of(size: UOp) -> int:
    from whit.uop.symbolic import simplify

    bound = {node: node.src[1] for node in size.toposort() if node.op is Ops.BIND}
    result = simplify(size.substitute(bound))
    if result.op is not Ops.CONST:
        raise ShapeError(
            f"a size of {show_shape((size,))}",
            because="it has a variable without a value",
            fix="bind the variable before reading the tensor",
        )
    return int(result.arg)


def _rebuild(
    data: bytes, shape: tuple[int, ...], dtype: DType, device: str, requires_grad: bool | None
) -> Tensor:
    result = Tensor._wrap(buffer_of(memoryview(data), shape, dtype, device))
    result._requires_grad = requires_grad
    return result


def numpy_dtype(dtype: DType) -> Any:
    """NumPy's (or ml_dtypes') type of the same layout."""
    import numpy as np

    if dtype in (dtypes.bfloat16, *dtypes.fp8s):
        import ml_dtypes

        return np.dtype(
            {
                "bfloat16": ml_dtypes.bfloat16,
                "fp8e4m3": ml_dtypes.float8_e4m3fn,
                "fp8e5m2": ml_dtypes.float8_e5m2,
            }[dtype.name]
        )
    return np.dtype(dtype.name)


def unpack(data: memoryview, dtype: DType) -> list[Any]:
    """Bytes of a dtype as Python scalars: the inverse of `pack`."""
    if dtype is dtypes.bfloat16:
        return [struct.unpack("f", struct.pack("I", bits << 16))[0] for bits in data.cast("H")]
    if dtype in dtypes.fp8s:
        return [_decode_fp8(bits, dtype) for bits in data]
    if dtype is dtypes.float16:
        return list(struct.unpack(f"{data.nbytes // 2}e", data))
    fmt: Any = dtype.fmt
    return list(data.cast(fmt))


def _decode_fp8(bits: int, dtype: DType) -> float:
    info = FLOAT_INFO[dtype]
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, fraction = bits >> info.mantissa & (1 << info.exponent) - 1, bits & (1 << info.mantissa) - 1
    if info.has_inf and exponent == (1 << info.exponent) - 1:
        return math.nan if fraction else sign * math.inf
    if not info.has_inf and bits & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - info.bias - info.mantissa)
    return sign * math.ldexp((1 << info.mantissa) + fraction, exponent - info.bias - info.mantissa)


# ---- nodes of Python data


def _node_of(data: Any, dtype: DType | None, device: str | None) -> UOp:
    """The graph of anything that `Tensor(...)` takes."""
    if isinstance(data, (bool, int, float)):
        chosen = (
            dtypes.from_py(data) if dtype is None or not isinstance(data, int) or dtype.is_float else dtype
        )
        return move(UOp.const(data, chosen), device)
    if isinstance(data, TensorBase):
        return move(data.uop, device)
    if isinstance(data, UOp):
        return move(data.cast(dtypes.default_int) if data.dtype is dtypes.index else data, device)
    if isinstance(data, (list, tuple)):
        return _node_of_list(data, dtype, device)
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = memoryview(bytes(data))
        return buffer_of(view, (len(view),), dtypes.uint8, device)
    if hasattr(data, "__array__"):
        return node_of_array(data, device)
    raise ArgumentError(
        f"Tensor({type(data).__name__})",
        because="this type holds no numbers that a tensor can take",
        fix="pass a scalar, nested lists, bytes, a NumPy array or a Tensor",
    )


def buffer_of(data: memoryview, shape: Shape, dtype: DType, device: str | None, keep: object = None) -> UOp:
    """A new BUFFER with these bytes, seen as `shape`. `data` must not change afterwards."""
    buffer = UOp.new_buffer(prod(shape), dtype, device or storage.default_device())
    storage.put(buffer, data, keep)
    return buffer.reshape(tuple(shape))


def move(uop: UOp, device: str | None) -> UOp:
    """The value on a device; constants move by themselves when they are asked for where the default is."""
    if device is None or (uop.device or storage.default_device()) == device:
        return uop
    return uop.copy_to(device)


def _node_of_list(data: Sequence[Any], dtype: DType | None, device: str | None) -> UOp:
    """Nested lists; items may be tensors or arrays, which are stacked."""
    shape: list[int] = []
    level: Any = data
    while isinstance(level, (list, tuple)):
        shape.append(len(level))
        level = level[0] if level else None
    flat: list[Any] = list(data)
    for depth, size in enumerate(shape[1:], 1):
        if not all(isinstance(row, (list, tuple)) and len(row) == size for row in flat):
            lengths = sorted(
                {str(len(row)) if isinstance(row, (list, tuple)) else "a scalar" for row in flat}
            )
            raise ShapeError(
                "Tensor of nested lists",
                because=f"at depth {depth} the lengths are {', '.join(lengths)}",
                fix="give every row the same length",
            )
        flat = [item for row in flat for item in row]
    kinds = set(map(type, flat))
    if any(kind is UOp or hasattr(kind, "__array__") for kind in kinds):
        stacked = Tensor.stack(*[Tensor(item) for item in flat]).reshape(*shape, *Tensor(flat[0]).shape)
        return move(stacked.uop, device)
    if list in kinds or tuple in kinds:
        raise ShapeError(
            "Tensor of nested lists",
            because="some rows are scalars and some are lists",
            fix="give every row the same depth",
        )
    natural = _dtype_of_scalars(flat, kinds)
    chosen = natural if dtype is None else dtype
    return buffer_of(memoryview(pack(flat, chosen)), tuple(shape), chosen, device)


def _dtype_of_scalars(values: list[Any], kinds: set[type]) -> DType:
    """The dtype that holds all of them; the kinds of long lists are few."""
    if kinds <= {int, bool} and int in kinds:
        return dtypes.from_py([int(min(values)), int(max(values))])
    return dtypes.from_py([next(value for value in values if type(value) is kind) for kind in kinds])


def pack(values: Sequence[Any], dtype: DType) -> bytes:
    """Python scalars as bytes of a dtype; floats round, integers must fit.

    >>> pack([1, 2], dtypes.int16)
    b'\\x01\\x00\\x02\\x00'
    """
    try:
        if dtype.fmt and dtype.fmt not in "?e":
            return array.array(dtype.fmt, values).tobytes()
    except (OverflowError, TypeError):
        pass  # a float for an integer dtype, or too large a value: one by one below
    if dtype.kind in "iu":
        values = [_fitting(value, dtype) for value in values]
    else:
        values = [wrap(value, dtype) for value in values]
    if dtype.fmt:
        return struct.pack(f"{len(values)}{dtype.fmt}", *values)
    return b"".join([encode_float(value, dtype) for value in values])


def _fitting(value: Any, dtype: DType) -> int:
    try:
        number = int(value)
    except (ValueError, OverflowError):
        raise DTypeError(
            f"Tensor({value}, dtype={dtype})", because="it is no integer", fix="choose a float dtype"
        ) from None
    if not dtype.min <= number <= dtype.max:
        raise DTypeError(
            f"Tensor({value}, dtype={dtype})",
            because=f"{dtype} holds {dtype.min} to {dtype.max}",
            fix="choose a wider dtype",
        )
    return number


def encode_float(value: float, dtype: DType) -> bytes:
    """The bits of an already rounded bfloat16 or 8-bit float."""
    if dtype is dtypes.bfloat16:
        return struct.pack("f", value)[2:]
    info = FLOAT_INFO[dtype]
    sign = 0x80 if struct.pack(">d", value)[0] & 0x80 else 0
    if value != value:
        return bytes([sign | 0x7F])
    magnitude = abs(value)
    if magnitude == float("inf"):
        return bytes([sign | ((1 << info.exponent) - 1) << info.mantissa])
    if magnitude == 0:
        return bytes([sign])
    exponent = max(0, int(struct.unpack(">Q", struct.pack(">d", magnitude))[0] >> 52) - 1023 + info.bias)
    step = 2.0 ** (max(exponent, 1) - info.bias - info.mantissa)
    fraction = int(magnitude / step)
    return bytes([sign | (fraction if exponent == 0 else (exponent - 1 << info.mantissa) + fraction)])


def _tensors(what: str, given: Any) -> list[Any]:
    """The tensors that somebody passed, and nothing else."""
    try:
        found = [] if isinstance(given, Tensor) else list(given)
    except TypeError:
        found = [given]
    if isinstance(given, Tensor) or not all(isinstance(t, Tensor) for t in found):
        raise ArgumentError(
            f"{what} of {repr(given)[:60]}", because="it takes several tensors", fix="pass a list of tensors"
        )
    return found

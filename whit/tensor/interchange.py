"""Values from and for other libraries: NumPy arrays, DLPack, the array API, files on the network."""

from __future__ import annotations

from typing import Any, Self

from whit.helpers import ArgumentError, DTypeError, FileFormatError, ShapeError, cache_dir, write_atomic
from whit.tensor import storage
from whit.tensor.hashing import HashMixin
from whit.tensor.storage import hooks
from whit.uop import DType, Shape, UOp, dtypes
from whit.uop.dtype import to_dtype
from whit.uop.uop import show_shape

_HOST = (1, 0)  # DLPack's kDLCPU


class InterchangeMixin(HashMixin):
    """Methods of the family of interchange."""

    # ---- NumPy

    def _shared(self) -> Any:
        """The elements as a NumPy array of the same memory, or None where nothing can be shared."""
        import numpy as np

        from whit.tensor.tensor import numpy_dtype

        shape = self._concrete_shape()  # type: ignore[attr-defined]  # Tensor's
        memory = hooks.share(self) if 0 not in shape else None  # type: ignore[arg-type]  # self is a Tensor
        return None if memory is None else np.asarray(memory).view(numpy_dtype(self.dtype)).reshape(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """What `np.asarray(tensor)` gives: an array of the same memory where the device's can be seen (the
        CPU's; a later write to one is seen in the other), else a copy. copy=True always copies, False raises
        ValueError where that would be needed."""
        shared = None if copy else self._shared()
        result = self.numpy() if shared is None else shared  # type: ignore[attr-defined]  # Tensor's
        converted = result if dtype is None else result.astype(dtype, copy=False)
        if copy is False and (shared is None or converted is not shared):
            raise ArgumentError(
                f"np.asarray({self.dtype} tensor on {self.device}, copy=False)",
                because="its memory cannot be seen from here" if shared is None else "the dtype differs",
                fix="leave copy out",
            )
        return converted

    # ---- DLPack

    def __dlpack_device__(self) -> tuple[int, int]:
        """Host memory: (1, 0)."""
        return _HOST

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule over this tensor's memory (a copy of it where the device's cannot be seen, or with
        copy=True). Errors: DTypeError for bfloat16 and 8-bit floats, ArgumentError for a device that is not
        the host.

        >>> import numpy
        >>> numpy.from_dlpack(Tensor([1.5, 2.5])).tolist()
        [1.5, 2.5]
        """
        if stream is not None:
            raise ArgumentError(f"__dlpack__(stream={stream!r})", because="the CPU has none", fix="use None")
        if dl_device is not None and tuple(dl_device) != _HOST:
            raise ArgumentError(
                f"__dlpack__(dl_device={dl_device!r})",
                because="only host memory is shared",
                fix=f"ask for {_HOST}",
            )
        if self.dtype is dtypes.bfloat16 or self.dtype in dtypes.fp8s:
            raise DTypeError(
                f"__dlpack__ of a {self.dtype} tensor",
                because="NumPy, which makes the capsule, has no such type",
                fix='share the bits with bitcast("uint16") or bitcast("uint8")',
            )
        array = self.__array__(copy=copy or None)
        return array.__dlpack__() if max_version is None else array.__dlpack__(max_version=max_version)

    @classmethod
    def from_dlpack(cls, x: Any, device: str | None = None, copy: bool | None = None) -> Self:
        """A tensor over the memory of anything with `__dlpack__` (NumPy, PyTorch, JAX … on the CPU), which it
        keeps alive: writes to either are seen in both, once they are computed. copy=True copies; copy=False
        raises ArgumentError where sharing is impossible (another device, memory that is not row-major or
        read-only).

        >>> import numpy
        >>> Tensor.from_dlpack(numpy.arange(3)).tolist()
        [0, 1, 2]
        """
        import numpy as np

        if not hasattr(x, "__dlpack__"):
            raise ArgumentError(
                f"from_dlpack({type(x).__name__})", because="it has no __dlpack__", fix="pass an array"
            )
        try:
            array = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"from_dlpack({type(x).__name__})",
                because=f"NumPy cannot read it ({error})",
                fix="move it to the CPU, to a type that NumPy has, and detach it from gradients",
            ) from error
        place = storage.device_name(device)
        fits = is_plain(array) and array.flags.writeable and _sees_host(place)
        if copy is False and not fits:
            raise ArgumentError(
                f"from_dlpack of shape {show_shape(array.shape)} for {place}, copy=False",
                because="its memory is not row-major, is read-only, or cannot be used by that device",
                fix="leave copy out",
            )
        if not fits or copy or not array.size:
            return cls._of(array.copy()).to(place)  # type: ignore[attr-defined, no-any-return]  # Tensor's
        address = array.__array_interface__["data"][0]
        # whoever gave the memory may write to it at any time, so nobody may take it for unchanging
        owner = storage.Lent(address, array)
        return cls._wrap(borrow(array, array.shape, dtype_of(array.dtype), place, owner))

    # ---- the array API

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """The module of the Python array API standard (`whit.array_api`).

        >>> Tensor([1]).__array_namespace__().__name__
        'whit.array_api'
        """
        return hooks.namespace(api_version)

    @property
    def mT(self) -> Self:
        """The matrix transpose: the last two axes exchanged. ShapeError below two axes."""
        if self.ndim < 2:
            raise ShapeError(
                f"mT of shape {show_shape(self.shape)}", because="a matrix has two axes", fix="unsqueeze it"
            )
        return self.transpose(-1, -2)

    def to_device(self, device: str, /, *, stream: Any = None) -> Self:
        """`to` under the array API's name."""
        if stream is not None:
            raise ArgumentError(f"to_device(stream={stream!r})", because="there are none", fix="use None")
        return self.to(device)  # type: ignore[attr-defined, no-any-return]  # Tensor's

    # ---- other sources

    @classmethod
    def invalids(cls, *shape: Any, device: str | None = None, dtype: DType | str | None = None) -> Self:
        """`empty` under tinygrad's name: elements that are written before anybody reads them."""
        return cls.empty(*shape, dtype=dtype, device=device)

    @classmethod
    def from_url(cls, url: str, gunzip: bool = False, device: str | None = None) -> Self:
        """The bytes behind a URL (http, https or file), kept in the cache folder. gunzip: unpacked.

        Shape: (bytes,). Dtype: uint8. Errors: ArgumentError for other schemes and for what cannot be
        fetched, FileFormatError for what is not gzip.
        """
        data = _fetch(url)
        if gunzip:
            import gzip
            import zlib

            try:
                data = gzip.decompress(data)
            except (OSError, EOFError, zlib.error) as error:
                raise FileFormatError(
                    f"from_url({url!r}, gunzip=True)",
                    because=f"it is no gzip file ({error})",
                    fix="leave gunzip out",
                ) from error
        return cls(data, device=device)  # type: ignore[call-arg]  # Tensor's constructor


def _fetch(url: str) -> bytes:
    """The bytes behind a URL; what came over the network is kept."""
    import hashlib
    import urllib.error
    import urllib.request
    from pathlib import Path

    scheme = url.partition(":")[0].lower() if isinstance(url, str) else ""
    if scheme not in ("http", "https", "file"):
        raise ArgumentError(f"from_url({url!r})", because="it is no http, https or file URL", fix="pass one")
    kept = Path(cache_dir()) / "downloads" / hashlib.sha256(url.encode()).hexdigest()
    if scheme != "file" and kept.is_file():
        return kept.read_bytes()
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            data: bytes = response.read()
    except (OSError, ValueError) as error:  # URLError is an OSError
        raise ArgumentError(
            f"from_url({url!r})",
            because=f"it cannot be fetched ({getattr(error, 'reason', error)})",
            fix="check the address and the network, or pass a file: URL of a local copy",
        ) from error
    if scheme != "file":
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, data)
    return data


# ---- arrays of others


def dtype_of(kind: Any) -> DType:
    """The dtype of a NumPy type. DTypeError if there is none."""
    name = {"float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2"}.get(kind.name, kind.name)
    if name not in {d.name for d in dtypes.all}:
        raise DTypeError(
            f"Tensor of a NumPy array of {kind}",
            because="whit has no such dtype",
            fix="convert it with .astype first",
        )
    return to_dtype(name)


def is_plain(array: Any) -> bool:
    """Whether the elements of a NumPy array lie row-major, aligned, in this machine's byte order."""
    return bool(array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative)


def _sees_host(device: str) -> bool:
    """Whether a device computes in this process's memory."""
    return device.partition(":")[0] == "CPU"


def borrow(array: Any, shape: Shape, dtype: DType, device: str, owner: Any) -> UOp:
    """A BUFFER over the memory of a plain array, which `owner` (Lent or Borrowed) keeps."""
    import ctypes

    from whit.tensor.tensor import buffer_of

    nbytes = array.nbytes
    data = memoryview((ctypes.c_uint8 * nbytes).from_address(owner.address)).cast("B")
    return buffer_of(data, shape, dtype, device, owner)


def node_of_array(data: Any, device: str | None) -> UOp:
    """The BUFFER of a NumPy array, or of what `__array__` gives. A CPU device reads a plain array where it
    lies (and never writes there: a write copies first); all others are copied now."""
    import numpy as np

    from whit.tensor.tensor import buffer_of

    array = np.asarray(data)
    dtype = dtype_of(array.dtype)
    place = device or storage.default_device()
    if array.size and is_plain(array) and _sees_host(place):
        address = array.__array_interface__["data"][0]
        return borrow(array, array.shape, dtype, place, storage.Borrowed(address, array))
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    copied = np.array(array, dtype=native, order="C", copy=True)
    raw = copied.reshape(-1).view(np.uint8).data if copied.size else memoryview(b"")
    return buffer_of(raw, array.shape, dtype, device)

"""Settings, errors, the disk cache and small pure helpers. Imports nothing of whit; the only file that reads
`os.environ`."""
from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

try:
    # what hashlib.blake2b is; hashlib itself would load OpenSSL, some milliseconds
    from _blake2 import blake2b as blake2b
except ImportError:
    from hashlib import blake2b as blake2b

T = TypeVar("T")

VERSION = "0.1.0"  # of whit
PAGE = 4096  # bytes, as far as the order of loads and stores goes; the system's may be larger

# ---- errors ------------------------------------------------------------------------------------------------


class WhitError(Exception):
    """An error in three parts: what was asked, why it cannot be, what to do.

    >>> print(WhitError("reshape: cannot turn (2, 3) into (4, 2)", because="6 elements into 8",
    ...                 fix="use (3, 2)"))
    reshape: cannot turn (2, 3) into (4, 2): 6 elements into 8. To fix: use (3, 2)
    """

    def __init__(self, asked: str, because: str = "", fix: str = "") -> None:
        self.asked, self.because, self.fix = asked, because, fix
        text = asked + (f": {because}" if because else "") + (f". To fix: {fix}" if fix else "")
        super().__init__(text)

    def __reduce__(self) -> tuple[type[WhitError], tuple[str, str, str]]:
        # so that it crosses process borders unchanged
        return type(self), (self.asked, self.because, self.fix)


class ShapeError(WhitError, ValueError):
    """Shapes, axes or sizes that do not fit."""


class DTypeError(WhitError, TypeError):
    """A dtype that the operation does not take, or that does not exist."""


class ArgumentError(WhitError, ValueError):
    """Any other wrong argument of a public call."""


class IndexingError(WhitError, IndexError):
    """An index outside of its axis, or of a kind that cannot index."""


class DeviceError(WhitError, RuntimeError):
    """A device that is missing, does not support what was asked, or failed."""


class CompileError(WhitError, RuntimeError):
    """A compiler that is missing or refused a kernel."""


class FileFormatError(WhitError, ValueError):
    """A file that is truncated, malformed or hostile."""


class NumericError(WhitError, ArithmeticError):
    """A NaN or an infinity, where somebody watches for them."""


class SettingError(WhitError, ValueError):
    """A setting that does not exist, or a value that it does not take."""


class IRError(WhitError, ValueError):
    """IR that is not well formed: a spec violation, or text that does not parse."""


# ---- settings ----------------------------------------------------------------------------------------------

S = TypeVar("S", int, str)


class ContextVar(Generic[S]):
    """A setting with a type, a default, a help line and an environment variable of the same name.

    `DEBUG.value` reads it, `with Context(DEBUG=2): ...` changes it for a block.
    """

    registry: dict[str, ContextVar[Any]] = {}

    def __init__(self, name: str, default: S, help: str) -> None:
        self.name, self.help = name, help
        self.default: S = default
        self.value: S = self._parse(os.environ[name]) if os.environ.get(name, "") != "" else default
        ContextVar.registry[name] = self

    def _parse(self, text: str) -> S:
        try:
            return type(self.default)(text)
        except ValueError:
            raise SettingError(f"{self.name}={text!r}", because="this setting takes a whole number",
                               fix=f"{self.name}: {self.help}") from None

    def __bool__(self) -> bool:
        return bool(self.value)

    def __repr__(self) -> str:
        return f"{self.name}={self.value!r}"


class Context(contextlib.ContextDecorator):
    """Change settings for the length of a `with` block or a decorated function.

    >>> with Context(DEBUG=2): DEBUG.value
    2
    """

    def __init__(self, **settings: int | str) -> None:
        for name, value in settings.items():
            var = ContextVar.registry.get(name)
            if var is None:
                known = ", ".join(sorted(ContextVar.registry))
                raise SettingError(f"Context({name}={value!r})", because="there is no such setting",
                                   fix=f"known: {known}")
            if not isinstance(value, type(var.default)):
                kind = "text" if isinstance(var.default, str) else "a whole number"
                raise SettingError(f"Context({name}={value!r})", because=f"it takes {kind}",
                                   fix=f"{name}: {var.help}")
        self.settings = settings
        self.saved: list[dict[str, int | str]] = []

    def __enter__(self) -> Context:
        self.saved.append({name: ContextVar.registry[name].value for name in self.settings})
        for name, value in self.settings.items():
            ContextVar.registry[name].value = value
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None,
                 tb: TracebackType | None) -> None:
        for name, value in self.saved.pop().items():
            ContextVar.registry[name].value = value


DEV = ContextVar("DEV", "CPU", "Default device: CPU, CPU:CLANG, CPU:GCC, PYTHON, NULL or DISK:path.")
DEBUG = ContextVar("DEBUG", 0,
                   "1: device and cache events. 2: a line per kernel. 3: fusion reasons and opts. 4: source. "
                   "5: IR. 6: linear program. 7: machine code.")
BEAM = ContextVar("BEAM", 0, "Beam width of the kernel search; 0 uses the heuristics.")
BEAM_TIME = ContextVar("BEAM_TIME", 10, "Seconds that the search of one kernel may take.")
TUNED = ContextVar("TUNED", "",
                   "File of opts that searches found (python -m whit.engine.beam export FILE).")
NOOPT = ContextVar("NOOPT", 0, "1: no kernel optimisations at all.")
JIT = ContextVar("JIT", 1,
                 "0: TinyJit calls its function every time. 1: capture and replay. "
                 "2: replay without a native plan.")
SPEC = ContextVar("SPEC", 0, "1: check the IR's spec after every pass.")
STATS = ContextVar("STATS", 0,
                   "1: count and time every rewrite rule and pass; a table is printed at the end.")
CHECK = ContextVar("CHECK", 0, "1: read index tensors when they are used; IndexingError if one is outside.")
VALIDATE = ContextVar("VALIDATE", 0, "1: run every kernel on the reference device too and compare.")
PROFILE = ContextVar("PROFILE", 0, "1: write a Chrome trace of everything that ran when the process ends.")
TRAINING = ContextVar("TRAINING", 0, "1: layers such as Dropout and BatchNorm behave as in training.")
CACHE = ContextVar("CACHE", 1, "0: do not read or write the disk cache.")
CACHE_DIR = ContextVar("WHIT_CACHE", "",
                       "Folder of the disk cache; default $XDG_CACHE_HOME/whit or ~/.cache/whit.")
NUM_CPU_THREADS = ContextVar("NUM_CPU_THREADS", 0,
                             "Threads that the CPU device uses; 0: as many as this process may run on.")
SEED = ContextVar("SEED", 0, "Seed of the random numbers when Tensor.manual_seed was not called.")


def cpu_threads() -> int:
    """How many threads the CPU device uses. SettingError for a negative number."""
    wanted = NUM_CPU_THREADS.value
    if wanted < 0:
        raise SettingError(f"NUM_CPU_THREADS={wanted}", because="there is no negative number of threads",
                           fix="give a number from 1 on, or 0 for as many as this process may run on")
    return wanted or min(len(os.sched_getaffinity(0)), cpu_quota("/sys/fs/cgroup"))


def cpu_quota(folder: str) -> int:
    """CPUs whose time the control group of a container gets, rounded up; many when nothing limits it. Threads
    beyond that would wait for each other."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words: list[str] = []
            for name in names:
                with open(f"{folder}/{name}") as file:
                    words += file.read().split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue  # another version of control groups, or "max"
        if quota > 0 and period > 0:
            return -(-quota // period)
    return 1 << 20


def environment(name: str, default: str = "") -> str:
    """Read a variable that belongs to the system (PATH, HOME, …), not to whit."""
    return os.environ.get(name, default)


# ---- disk cache --------------------------------------------------------------------------------------------


def cache_dir() -> str:
    """The folder of the disk cache (not created)."""
    if CACHE_DIR.value:
        return CACHE_DIR.value
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "whit")


_cache_broken = False


def cache_get(table: str, key: str) -> bytes | None:
    """The bytes stored under (table, key), or None. A damaged entry (checksum does not match) counts as
    absent."""
    if not CACHE:
        return None
    try:
        with open(os.path.join(cache_dir(), table, key), "rb") as file:
            data = file.read()
    except OSError:
        return None
    body, digest = data[:-16], data[-16:]
    return body if len(data) >= 16 and blake2b(body, digest_size=16).digest() == digest else None


def cache_put(table: str, key: str, body: bytes) -> None:
    """Store bytes under (table, key): written to a temporary name, then renamed, so that readers and other
    processes never see half an entry. A folder that cannot be written (read-only, full disk) warns once and
    is then left alone."""
    global _cache_broken
    if not CACHE or _cache_broken:
        return
    folder = os.path.join(cache_dir(), table)
    try:
        os.makedirs(folder, exist_ok=True)
        write_atomic(os.path.join(folder, key), body + blake2b(body, digest_size=16).digest())
    except OSError as error:
        _cache_broken = True
        warnings.warn(f"disk cache: cannot write {folder}: {error}. Kernels are compiled anew in each "
                      "process; set WHIT_CACHE to a folder that can be written, or CACHE=0", stacklevel=2)


@functools.lru_cache(None)
def sources_digest(*rooms: str) -> str:
    """Changes when any source file of these rooms changes, so that nothing stale is taken from the cache."""
    root = os.path.dirname(os.path.abspath(__file__))
    digest = blake2b(digest_size=8)
    for room in rooms:
        with os.scandir(os.path.join(root, room)) as entries:
            for name, stat in sorted([(e.name, e.stat()) for e in entries if e.name.endswith(".py")]):
                digest.update(f"{name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()


def write_atomic(
    path: str | Path, body: bytes | Iterable[bytes | memoryview], *, durable: bool = False
) -> None:
    """Write a file so that it is either the old one or the whole new one; on failure nothing remains of the
    new. `body` may come in parts; `durable`: it is on the disk when this returns."""
    temporary = os.path.join(os.path.dirname(path), f".tmp-{os.getpid()}-{os.urandom(8).hex()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines([body] if isinstance(body, bytes) else body)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# ---- small pure helpers ------------------------------------------------------------------------------------


def prod(values: Iterable[Any]) -> Any:
    """The product, 1 for no values. Works on symbolic sizes too."""
    result: Any = 1
    for value in values:
        result = result * value
    return result


def dedup(values: Iterable[T]) -> list[T]:
    """The distinct values in order of first appearance."""
    return list(dict.fromkeys(values))


def flatten(lists: Iterable[Iterable[T]]) -> list[T]:
    """One list of all the items."""
    return list(itertools.chain.from_iterable(lists))


def ceildiv(a: Any, b: Any) -> Any:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is at least a."""
    return -(-a // b) * b


def argsort(values: Iterable[int]) -> tuple[int, ...]:
    """Positions that would sort the values; of a permutation, its inverse."""
    items = list(values)
    return tuple(sorted(range(len(items)), key=items.__getitem__))


def all_int(values: Iterable[object]) -> bool:
    """Whether every value is a Python int, i.e. nothing is symbolic."""
    return all(isinstance(value, int) for value in values)


def human_bytes(count: float) -> str:
    """1536 -> '1.50 KB'."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def colored(text: str, color: str) -> str:
    """ANSI colour when standard error is a terminal, else the text itself."""
    if not sys.stderr.isatty():
        return text
    code = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}[color]
    return f"\x1b[{code}m{text}\x1b[0m"


def log(level: int, text: str) -> None:
    """Print to standard error when DEBUG is at least `level`."""
    if DEBUG.value >= level:
        print(text, file=sys.stderr, flush=True)


def strides_of(shape: Iterable[Any]) -> tuple[Any, ...]:
    """Row-major strides in elements.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    result: list[Any] = []
    step: Any = 1
    for size in reversed(list(shape)):
        result.append(step)
        step = step * size
    return tuple(reversed(result))


def is_power_of_two(value: int) -> bool:
    """Whether it is 1, 2, 4, 8, …"""
    return value > 0 and value & (value - 1) == 0


def chunked(values: list[T], size: int) -> Iterator[list[T]]:
    """Consecutive pieces of at most `size` items."""
    for start in range(0, len(values), size):
        yield values[start:start + size]

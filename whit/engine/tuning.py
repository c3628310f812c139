"""What searches found: kept in the disk cache, and shared as a tuning file.

A tuning file is JSON, one object a line. The first line says what it is; each other line has the opts of
one kernel (the digest of its graph) on one kind of machine (`Target.key`):

    {"format": "whit tuning", "version": 2, "whit": "0.1.0"}
    {"kernel": "5e…", "target": "cpu-llvm-…", "name": "r_64_64_r64", "opts": "UPCAST axis 1 by 16", …}

`TUNED=FILE` uses one for the kernels that it names; `python -m whit.engine.beam export FILE` writes one from
the disk cache and `import FILE` puts one there. A file is data only: whatever is not exactly such a line is
refused with the file's name and the line's number, and opts are checked again when they are applied to a
kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from whit.codegen.opts import AxisTable, Opt, OptError, parse_opts
from whit.codegen.target import Target
from whit.helpers import (
    TUNED,
    FileFormatError,
    blake2b,
    cache_dir,
    cache_get,
    cache_put,
    write_atomic,
)
from whit.helpers import VERSION as WHIT
from whit.uop import UOp

FORMAT = "whit tuning"
VERSION = 2  # of the entries
TABLE = "beam"  # of the disk cache
MOST_BYTES = 64 << 20  # of a tuning file
MOST_LINE = 1 << 16
MOST_OPTS = 64


class Entry(NamedTuple):
    """The opts that a search found for a kernel on a kind of machine. Texts are what `parse_opts` reads."""

    kernel: str  # UOp.key as hexadecimal digits
    target: str  # Target.key
    name: str  # of the function, for people
    opts: str
    base: str  # what the heuristics chose then: when they choose otherwise now, the search is out of date
    width: int  # of the beam
    complete: bool  # False when the search was interrupted
    before: float  # seconds with the heuristics' opts
    after: float  # seconds with `opts`, measured in turns with `before`


def kernel_key(ast: UOp) -> str:
    """The name of a kernel in tuning files: the same in every process and on every machine."""
    return ast.key.hex()


def repr_opts(opts: Sequence[Opt]) -> str:
    """The text that `parse_opts` reads."""
    return ", ".join(map(repr, opts))


def legal(text: str, ready: UOp, target: Target) -> tuple[Opt, ...] | None:
    """Opts from their text if a prepared kernel allows them all, else None."""
    try:
        opts = parse_opts(text)
        table = AxisTable.of(ready, target)
        for opt in opts:
            table.apply(opt)
    except OptError:
        return None
    return opts


# ---- entries as text ---------------------------------------------------------------------------------------


def dump(entry: Entry) -> str:
    """An entry as a line of JSON."""
    return json.dumps(entry._asdict())


_KINDS: dict[str, tuple[type, ...]] = {
    "kernel": (str,), "target": (str,), "name": (str,), "opts": (str,), "base": (str,), "width": (int,),
    "complete": (bool,), "before": (int, float), "after": (int, float),
}  # fmt: skip


def entry_of(text: str, where: str) -> Entry:
    """The entry that a line of JSON holds. FileFormatError, naming `where`, for anything else."""
    found = _object(text, where)
    if set(found) != set(Entry._fields):
        names = ", ".join(sorted(set(found) ^ set(Entry._fields))[:6])
        raise _refused(where, f"it has not the fields of an entry (differing: {names[:200]})")
    for name, kinds in _KINDS.items():
        value = found[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _refused(where, f"{name} is {str(value)[:40]!r}, not {kinds[-1].__name__}")
    entry = Entry(**found)
    if len(entry.kernel) != 32 or not set(entry.kernel) <= set("0123456789abcdef"):
        raise _refused(where, f"kernel {entry.kernel[:40]!r} is no digest of 32 hexadecimal digits")
    if not 0 < entry.width < 1 << 16 or not (0 <= entry.after <= entry.before < 1e9):
        raise _refused(where, "its width or its seconds are impossible")
    for text in (entry.opts, entry.base):
        try:
            opts = parse_opts(text)
        except OptError as error:
            raise _refused(where, str(error)[:300]) from None
        if len(opts) > MOST_OPTS:
            raise _refused(where, f"it has {len(opts)} opts, the most is {MOST_OPTS}")
    return entry


def _object(text: str, where: str) -> dict[str, Any]:
    if len(text) > MOST_LINE:
        raise _refused(where, f"a line of {len(text)} characters, the most is {MOST_LINE}")
    try:
        found = json.loads(text, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise _refused(where, f"it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _refused(where, f"it is a JSON {type(found).__name__}, not an object")
    return found


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refused(where: str, because: str) -> FileFormatError:
    return FileFormatError(
        where, because=because, fix="write tuning files with `python -m whit.engine.beam export FILE`"
    )


# ---- files -------------------------------------------------------------------------------------------------


def read_file(path: str) -> list[Entry]:
    """The entries of a tuning file. FileFormatError, naming the file and the line, if it is none, is damaged
    or comes from another version."""
    where = f"tuning file {path}"
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise _refused(where, f"it cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise _refused(where, f"it has more than {MOST_BYTES} bytes")
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise _refused(where, f"it is not UTF-8 text ({error.reason} at byte {error.start})") from None
    head = _object(lines[0], f"{where}, line 1")
    wanted = {"format": FORMAT, "version": VERSION, "whit": WHIT}
    if head.get("format") != FORMAT:
        raise _refused(where, "it does not begin with the line of a tuning file")
    if head != wanted:
        raise _refused(where, f"it is of {_version_text(head)}, this is {_version_text(wanted)}")
    if lines[-1]:
        raise _refused(where, "its last line is cut off")
    return [entry_of(line, f"{where}, line {number}") for number, line in enumerate(lines[1:-1], 2)]


def _version_text(head: dict[str, Any]) -> str:
    return f"whit {str(head.get('whit'))[:40]}, format {str(head.get('version'))[:40]}"


def write_file(path: str, entries: Iterable[Entry]) -> int:
    """Write a tuning file (all of it or nothing); how many entries it has."""
    found = sorted(entries)
    head = json.dumps({"format": FORMAT, "version": VERSION, "whit": WHIT})
    try:
        lines = "".join([f"{line}\n" for line in [head, *map(dump, found)]])
        write_atomic(os.path.abspath(path), lines.encode())
    except OSError as error:
        raise FileFormatError(
            f"tuning file {path}",
            because=f"it cannot be written: {error.strerror}",
            fix="name a file in a folder that exists and can be written",
        ) from None
    return len(found)


# ---- the disk cache ----------------------------------------------------------------------------------------


def _place(kernel: str, target: str) -> str:
    """The name of an entry in the disk cache."""
    return f"{kernel}-{blake2b(f'{target}|{WHIT}|{VERSION}'.encode(), digest_size=8).hexdigest()}"


def load(ast: UOp, target: str) -> Entry | None:
    """What is known about a kernel on a kind of machine."""
    data = cache_get(TABLE, _place(kernel_key(ast), target))
    if data is not None:
        # an entry that is none counts as absent, like a damaged one
        with contextlib.suppress(FileFormatError, UnicodeDecodeError):
            return entry_of(data.decode(), "an entry of the disk cache")
    return None


def save(entry: Entry) -> None:
    """Remember an entry."""
    cache_put(TABLE, _place(entry.kernel, entry.target), dump(entry).encode())


def stored() -> list[Entry]:
    """Every entry of the disk cache that this version of whit can use."""
    folder = os.path.join(cache_dir(), TABLE)
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        data = cache_get(TABLE, name)
        with contextlib.suppress(FileFormatError, UnicodeDecodeError):
            entry = entry_of((data or b"").decode(), name)
            if name == _place(entry.kernel, entry.target):
                found.append(entry)
    return found


# ---- TUNED -------------------------------------------------------------------------------------------------

_tuned: dict[tuple[str, int, int], dict[tuple[str, str], str]] = {}


def tuned(ast: UOp, target: str) -> str | None:
    """The opts that the file TUNED has for a kernel; None without such a file or entry. FileFormatError for a
    file that is refused."""
    if not TUNED.value:
        return None
    path = os.path.abspath(TUNED.value)
    try:
        state = os.stat(path)
    except OSError as error:
        raise _refused(f"TUNED={TUNED.value}", f"it cannot be read: {error.strerror}") from None
    key = path, state.st_mtime_ns, state.st_size
    if key not in _tuned:
        entries = read_file(path)
        if entries and all(entry.target != target for entry in entries):
            warnings.warn(
                f"TUNED={TUNED.value}: none of its {len(entries)} kernels is for this machine ({target})",
                stacklevel=2,
            )
        _tuned[key] = {(entry.kernel, entry.target): entry.opts for entry in entries}
    return _tuned[key].get((kernel_key(ast), target))

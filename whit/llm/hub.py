"""Finding a model: a path, the name of a package that carries one, or a name on the Hugging Face hub.

    find_model("model.gguf")                     a file, or a folder with one
    find_model("smollm2")                        a file inside an installed package of that name
    find_model("owner/repository")               the hub: its Q4_K_M file, or else the next best
    find_model("owner/repository:Q8_0")          … another quantisation
    find_model("owner/repository/file.gguf")     … that file

Downloads go to the cache folder, show a bar, go on where an earlier one ended, and are checked by size and
SHA-256 before they get their name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from whit.helpers import ArgumentError, ContextVar, FileFormatError, WhitError, cache_dir, environment
from whit.nn.state import FileError

if TYPE_CHECKING:  # a model that is here already needs no network
    import http.client

HUB = ContextVar("WHIT_HUB", "https://huggingface.co", "Address of the hub that models are downloaded from.")

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "Q6_K", "BF16", "F16")
_CHUNK = 1 << 20


class HubError(WhitError, OSError):
    """The hub cannot be reached, or does not have what was asked for."""


def find_model(name: str | Path, *, download: bool = True) -> Path:
    """The GGUF file of a model (the first of a split one).

    Errors: ArgumentError if nothing has that name (with what there is), FileError for a folder without a
            model, HubError, FileFormatError if a download is damaged
    """
    text = str(name)
    path = Path(text).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return path
    if _looks_like_path(text):
        raise FileError(f"open {text}", because="there is no such file", fix="check the path")
    packaged = find_packaged(text)
    if packaged is not None:
        return packaged
    repository, quantisation, file = _parts(text)
    if repository is None:
        known = ", ".join(sorted(packaged_models())) or "none"
        raise ArgumentError(
            f"the model {text!r}",
            because="it is no file, no installed package has a model of that name, and it is no hub name",
            fix=f"give a path, a hub name such as owner/repository, or a packaged model ({known})",
        )
    return from_hub(repository, quantisation, file, download=download)


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or (text.endswith(".gguf") and text.count("/") < 2)


def _parts(text: str) -> tuple[str | None, str | None, str | None]:
    """owner/repository[:quantisation] or owner/repository/file -> the three parts."""
    head, _, quantisation = text.partition(":")
    pieces = head.split("/")
    if len(pieces) < 2 or not _REPOSITORY.fullmatch("/".join(pieces[:2])) or not _is_safe(head):
        return None, None, None
    file = "/".join(pieces[2:]) or None
    return "/".join(pieces[:2]), quantisation or None, file


def _is_safe(name: str) -> bool:
    """Whether a name of a file on the hub stays inside its folder here."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def _in_folder(folder: Path) -> Path:
    files = sorted(file for file in folder.glob("*.gguf") if _first_shard(file.name))
    if not files:
        raise FileError(f"find a model in {folder}", because="it has no .gguf file", fix="name the file")
    if len(files) > 1:
        raise FileError(
            f"find a model in {folder}",
            because="it has several: " + ", ".join(file.name for file in files[:10]),
            fix="name one of them",
        )
    return files[0]


def _first_shard(name: str) -> bool:
    match = _SHARD.search(name)
    return match is None or int(match[1]) == 1


# ---- packages ----------------------------------------------------------------------------------------------


def packaged_models() -> dict[str, Path]:
    """Models inside installed packages: name of the package -> its file (the first part of one in parts).

    Folders are looked into, since reading every package's list of files takes a second.
    """
    found: dict[str, Path] = {}
    for root in dict.fromkeys(sys.path):
        for pattern in ("*/*.gguf", "*/*/*.gguf", "*/*/*.gguf.part00"):
            for file in Path(root or ".").glob(pattern) if "packages" in Path(root).name else ():
                package = file.relative_to(root).parts[0]
                found.setdefault(re.sub("(-gguf)?(-part1)?$", "", _plain(package)), file)
    return found


def find_packaged(name: str) -> Path | None:
    """The file of the packaged model whose package or file has this name, or words of it; None if there is
    none. A model that comes in parts is put together in the cache folder once. ArgumentError if several
    fit."""
    wanted = _plain(name)
    models = packaged_models()
    names = {package: {package, _plain(file.name.split(".gguf")[0])} for package, file in models.items()}
    fits = [package for package in models if wanted in names[package]]
    fits = fits or [package for package in models if any(_near(wanted, known) for known in names[package])]
    if not fits:
        return None
    if len(fits) > 1:
        raise ArgumentError(
            f"the model {name!r}",
            because="several packages fit: " + ", ".join(sorted(fits)),
            fix="write more of it",
        )
    file = models[fits[0]]
    return _assembled(fits[0], file) if file.suffix == ".part00" else file


def find_encoder(name: str | Path) -> Path:
    """The folder of a sentence encoder: a path, or the name of an installed package that carries one.
    ArgumentError if there is neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    found: dict[str, Path] = {}
    for root in dict.fromkeys(sys.path):
        for file in Path(root).glob("*/*/modules.json") if "packages" in Path(root).name else ():
            found[_plain(file.relative_to(root).parts[0])] = file.parent
    wanted = _plain(str(name))
    fits = [package for package in found if package == wanted]
    fits = fits or [package for package in found if _near(wanted, package)]
    if len(fits) != 1:
        raise ArgumentError(
            f"the encoder {str(name)!r}",
            because="several packages fit"
            if fits
            else "it is no folder, and no installed package carries it",
            fix="give a folder, or one of: " + (", ".join(sorted(fits or found)) or "(none is installed)"),
        )
    return found[fits[0]]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _near(wanted: str, known: str) -> bool:
    """Whether words of `known` in a row begin with `wanted`."""
    return len(wanted) >= 3 and ("-" + known).find("-" + wanted) >= 0


def _assembled(package: str, first: Path) -> Path:
    """Parts `x.gguf.part00`, `part01`, … of sibling packages, joined into one file of the cache folder."""
    stem = first.name.removesuffix(".part00")
    target = Path(cache_dir()) / "models" / package / stem
    root = first.parents[2]
    parts: list[Path] = []
    while True:
        name = f"{stem}.part{len(parts):02d}"
        places = sorted(root.glob(f"*/{name}")) + sorted(root.glob(f"*/data/{name}"))
        if not places:
            break
        parts.append(places[0])
    size = sum(part.stat().st_size for part in parts)
    if target.exists() and target.stat().st_size == size:
        return target
    sums = [file for part in parts for file in part.parent.glob("SHA256SUMS")]
    sums += sorted(root.glob(f"{package.replace('-', '_')}*/data/SHA256SUMS"))
    wanted = _listed_sum(sums, stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target) as temporary:
        digest = hashlib.sha256()
        with temporary.open("wb") as out, _bar(f"joining {stem}", size, 0) as bar:
            for part in parts:
                with part.open("rb") as file:
                    while block := file.read(_CHUNK):
                        out.write(block)
                        digest.update(block)
                        bar.update(len(block))
        _verify(temporary, size, wanted, digest.hexdigest(), "install the package again")
        os.replace(temporary, target)
    return target


def _listed_sum(files: list[Path], name: str) -> str | None:
    for file in files:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            digest, _, listed = line.partition(" ")
            if listed.strip().lstrip("*") == name and re.fullmatch("[0-9a-f]{64}", digest):
                return digest
    return None


# ---- the hub -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remote:
    """A file of a repository."""

    name: str
    size: int
    sha256: str | None


def from_hub(
    repository: str, quantisation: str | None = None, file: str | None = None, *, download: bool = True
) -> Path:
    """The file (all of its parts) of a repository on the hub, from the cache if it is there."""
    folder = Path(cache_dir()) / "models" / repository.replace("/", "--")
    if file is None and (known := _kept(folder, quantisation)) is not None:
        return known
    if file is not None and _complete(folder, file):
        return folder / file
    if not download:
        raise HubError(f"the model {repository}", because="it is not here yet", fix="allow the download")
    chosen = choose(list_files(repository), repository, quantisation, file)
    from urllib.parse import quote

    for part in chosen:
        fetch(
            f"{HUB.value}/{repository}/resolve/main/{quote(part.name)}", folder / part.name, part
        )
    return folder / chosen[0].name


def _kept(folder: Path, quantisation: str | None) -> Path | None:
    """A file in the cache that fits, all of its parts there."""
    if not folder.is_dir():
        return None
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf") if _first_shard(path.name)]
    names = [name for name in names if _complete(folder, name)]
    if quantisation is not None:
        names = [name for name in names if _has(name, quantisation)]
    return folder / min(names, key=_rank) if names else None


def _complete(folder: Path, name: str) -> bool:
    return all((folder / shard).is_file() for shard in _shards(name))


def _shards(name: str) -> list[str]:
    """The names of all parts of a split file."""
    match = _SHARD.search(name)
    if match is None:
        return [name]
    stem = name[: match.start()]
    return [f"{stem}-{i:05d}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]


def _has(name: str, quantisation: str) -> bool:
    return (
        re.search(rf"(^|[^A-Z0-9]){re.escape(quantisation.upper())}([^A-Z0-9_]|$)", name.upper()) is not None
    )


def _rank(name: str) -> tuple[int, str]:
    return next((i for i, kind in enumerate(PREFERRED) if _has(name, kind)), len(PREFERRED)), name


def choose(files: list[Remote], repository: str, quantisation: str | None, file: str | None) -> list[Remote]:
    """The files to fetch: one model, all of its parts. HubError if there is none that fits."""
    models = {entry.name: entry for entry in files if entry.name.endswith(".gguf")}
    firsts = [name for name in models if _first_shard(name) and "mmproj" not in name]
    fits = [
        name
        for name in firsts
        if (name == file if file else quantisation is None or _has(name, quantisation))
    ]
    if not fits:
        what = file or quantisation or "a .gguf file"
        raise HubError(
            f"{what} of {repository}",
            because="it has " + (", ".join(sorted(firsts)[:20]) or "no .gguf file"),
            fix="name one of these" if firsts else "choose a repository with GGUF files",
        )
    chosen = _shards(min(fits, key=_rank))
    if missing := [name for name in chosen if name not in models]:
        raise HubError(
            f"{chosen[0]} of {repository}", because=f"{missing[0]} is missing", fix="choose another"
        )
    return [models[name] for name in chosen]


def list_files(repository: str) -> list[Remote]:
    """The files of a repository. HubError."""
    address = f"{HUB.value}/api/models/{repository}/tree/main?recursive=true"
    with _open(address, {}) as answer:
        data = answer.read(64 << 20)
    try:
        rows: Any = json.loads(data)
        files = [_remote(row) for row in rows if row.get("type") == "file"]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise HubError(
            f"list {repository}",
            because=f"the hub's answer is no list of files ({error})",
            fix="set WHIT_HUB",
        ) from None
    return [entry for entry in files if _is_safe(entry.name)]


def _remote(row: dict[str, Any]) -> Remote:
    large = row.get("lfs") or {}
    digest = large.get("oid") or large.get("sha256")
    valid = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    return Remote(str(row["path"]), int(large.get("size", row["size"])), digest if valid else None)


def _open(address: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    if not address.startswith(("http://", "https://")):
        raise HubError(f"open {address}", because="it is no web address", fix="set WHIT_HUB to one")
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(address, headers={"User-Agent": "whit", **headers})
    token = environment("HF_TOKEN")
    if token and address.startswith(HUB.value):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        reasons = {401: "it asks for a token", 403: "access is not granted", 404: "there is no such thing"}
        raise HubError(
            f"open {address}",
            because=f"the hub answered {error.code}: {reasons.get(error.code, error.reason)}",
            fix="check the name; set HF_TOKEN for models that need permission",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise HubError(
            f"open {address}",
            because=f"{getattr(error, 'reason', error)}",
            fix="check the network, or WHIT_HUB",
        ) from None
    return answer


def fetch(address: str, target: Path, remote: Remote, tries: int = 5) -> None:
    """Download a file: what an earlier try left is used, a broken connection is taken up again. HubError,
    FileFormatError if size or checksum are wrong (nothing is kept then)."""
    if target.is_file() and target.stat().st_size == remote.size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target) as temporary:
        for attempt in range(tries):
            try:
                _fetch_rest(address, temporary, remote)
                break
            except HubError:
                if attempt == tries - 1 or not temporary.exists():
                    raise
        _verify(temporary, remote.size, remote.sha256, _digest(temporary), "try again")
        os.replace(temporary, target)


def _fetch_rest(address: str, temporary: Path, remote: Remote) -> None:
    import http.client

    start = temporary.stat().st_size if temporary.exists() else 0
    if start > remote.size:
        temporary.unlink()
        start = 0
    if start == remote.size:
        return
    with _open(address, {"Range": f"bytes={start}-"} if start else {}) as answer:
        if start and answer.status != 206:  # the server sends all of it
            start = 0
        name = temporary.name.removesuffix(".part")
        with temporary.open("ab" if start else "wb") as file, _bar(name, remote.size, start) as bar:
            try:
                while block := answer.read(_CHUNK):
                    file.write(block)
                    bar.update(len(block))
                    start += len(block)
                    if start > remote.size:
                        break
            except (OSError, http.client.HTTPException) as error:
                raise HubError(
                    f"download {name}", because=str(error), fix="run it again: it goes on"
                ) from None
    if start < remote.size:
        raise HubError(f"download {name}", because="the connection broke", fix="run it again: it goes on")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _verify(path: Path, size: int, wanted: str | None, found: str, fix: str) -> None:
    """Refuse, and remove, a file that is not what it should be."""
    real = path.stat().st_size
    if real == size and wanted in (None, found):
        return
    path.unlink()
    why = (
        f"it has {real} bytes and not {size}"
        if real != size
        else "its SHA-256 is not the one that was announced"
    )
    raise FileFormatError(f"the file {path.name.removesuffix('.part')}", because=why, fix=fix)


@contextlib.contextmanager
def _exclusive(target: Path) -> Iterator[Path]:
    """The temporary name of a file, locked against other processes that want the same one."""
    import fcntl

    temporary = target.with_name(target.name + ".part")
    with open(target.with_name(target.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary


def _bar(name: str, total: int, start: int) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total, initial=start, desc=name, unit="B", unit_scale=True, unit_divisor=1024,
        disable=not sys.stderr.isatty(), leave=False,
    )  # fmt: skip

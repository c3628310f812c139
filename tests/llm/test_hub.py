"""Finding models by path and by package, and downloading them: from a hub that the test runs on loopback."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from whit.helpers import ArgumentError, Context, FileFormatError
from whit.llm.hub import HubError, find_encoder, find_model, find_packaged, packaged_models
from whit.nn.state import FileError

CONTENT = bytes(range(256)) * 20_000  # 5 MB


class Hub(ThreadingHTTPServer):
    """A hub with a few files, that breaks off, lies about sums, or ignores ranges when told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.break_after: int | None = None
        self.wrong_sum = self.no_ranges = False
        self.requests: list[tuple[str, str | None]] = []
        self.tokens: list[str | None] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.server
        hub.requests.append((self.path, self.headers["Range"]))
        hub.tokens.append(self.headers["Authorization"])
        if self.path.startswith("/api/models/me/model/tree/main"):
            self._send(200, json.dumps([self._row(name) for name in hub.files]).encode())
        elif self.path.startswith("/me/model/resolve/main/"):
            self._file(hub.files[self.path.removeprefix("/me/model/resolve/main/")])
        else:
            self._send(404, b"no")

    def _row(self, name: str) -> dict[str, Any]:
        data = self.server.files[name]
        digest = hashlib.sha256(data + (b"!" if self.server.wrong_sum else b"")).hexdigest()
        return {"type": "file", "path": name, "size": 134, "lfs": {"oid": digest, "size": len(data)}}

    def _file(self, data: bytes) -> None:
        start = 0
        if self.headers["Range"] and not self.server.no_ranges:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = len(data) if self.server.break_after is None else start + self.server.break_after
        self.wfile.write(data[start:stop])
        self.close_connection = True

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with Context(WHIT_HUB=server.address, WHIT_CACHE=str(tmp_path)):
        yield server
    server.shutdown()
    server.server_close()


def test_a_download_is_complete_and_kept(hub: Hub) -> None:
    hub.files = {"readme.md": b"x", "a-Q8_0.gguf": b"big", "a-Q4_K_M.gguf": CONTENT, "mmproj-a.gguf": b"eye"}
    path = find_model("me/model")
    assert path.name == "a-Q4_K_M.gguf" and path.read_bytes() == CONTENT
    count = len(hub.requests)
    assert (
        find_model("me/model") == path and len(hub.requests) == count
    )  # from the cache, without the network
    assert find_model("me/model:Q8_0").read_bytes() == b"big"
    assert find_model("me/model/a-Q8_0.gguf").read_bytes() == b"big"
    assert sorted(p.name for p in path.parent.iterdir() if p.suffix == ".gguf") == [
        "a-Q4_K_M.gguf",
        "a-Q8_0.gguf",
    ]


@pytest.mark.parametrize("no_ranges", [False, True])
def test_a_broken_download_goes_on(hub: Hub, no_ranges: bool) -> None:
    hub.files = {"a.gguf": CONTENT}
    hub.break_after = 2_000_000
    hub.no_ranges = no_ranges
    if no_ranges:
        with pytest.raises(HubError, match="the connection broke"):
            find_model("me/model")
        hub.break_after = None
        assert find_model("me/model").read_bytes() == CONTENT
        return
    assert find_model("me/model").read_bytes() == CONTENT
    assert [range for _, range in hub.requests][1:] == [None, "bytes=2000000-", "bytes=4000000-"]


def test_parts_of_a_split_file_come_together(hub: Hub) -> None:
    names = [f"x/m-Q4_0-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    hub.files = {name: name.encode() for name in names}
    path = find_model("me/model")
    assert path.name.endswith("-00001-of-00003.gguf")
    assert sorted(p.read_bytes() for p in path.parent.glob("*.gguf")) == [name.encode() for name in names]
    del hub.files[names[1]]
    (path.parent / names[1].removeprefix("x/")).unlink()
    with pytest.raises(HubError, match="is missing"):
        find_model("me/model")


def test_a_wrong_checksum_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.files, hub.wrong_sum = {"a.gguf": CONTENT}, True
    with pytest.raises(FileFormatError, match="SHA-256"):
        find_model("me/model")
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".gguf", ".part")]


def test_names_that_lead_outside_are_not_taken(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"../../evil.gguf": b"x", "/etc/evil.gguf": b"x", "..\\evil.gguf": b"x"}
    with pytest.raises(HubError, match=r"no \.gguf file"):
        find_model("me/model")
    for name in ("me/../x.gguf/a", "me/model/../../evil.gguf", "../model/x"):
        with pytest.raises((ArgumentError, FileError)):
            find_model(name)


def test_what_the_hub_lacks(hub: Hub) -> None:
    with pytest.raises(HubError, match="404"):
        find_model("me/other")
    hub.files = {"a-Q8_0.gguf": b"x"}
    with pytest.raises(HubError, match=r"it has a-Q8_0\.gguf"):
        find_model("me/model:Q2_K")
    with pytest.raises(HubError, match="not here yet"):
        find_model("me/model", download=False)


def test_the_token_goes_to_the_hub_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.files = {"a.gguf": b"x"}
    find_model("me/model")
    assert set(hub.tokens) == {"Bearer secret"}


def test_no_network(tmp_path: Path) -> None:
    with (
        Context(WHIT_HUB="http://127.0.0.1:9", WHIT_CACHE=str(tmp_path)),
        pytest.raises(HubError, match="refused"),
    ):
        find_model("me/model")


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "one.gguf"
    file.write_bytes(b"x")
    assert find_model(file) == file and find_model(tmp_path) == file
    (tmp_path / "two.gguf").write_bytes(b"x")
    with pytest.raises(FileError, match=r"several: one\.gguf, two\.gguf"):
        find_model(tmp_path)
    for name in ("./absent.gguf", "absent.gguf", str(tmp_path / "absent")):
        with pytest.raises(FileError, match="no such file"):
            find_model(name)
    with pytest.raises(ArgumentError, match="no installed package"):
        find_model("a model that nobody has")


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "site-packages"
    for name, data in {
        "nice_model/nice-1b.Q4_0.gguf": b"nice",
        "big_model_gguf_part1/data/big.gguf.part00": b"one",
        "big_model_gguf_part2/data/big.gguf.part01": b"two",
        "big_model_gguf/data/SHA256SUMS": hashlib.sha256(b"onetwo").hexdigest().encode() + b"  big.gguf\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    monkeypatch.setattr(sys, "path", [str(root)])
    assert set(packaged_models()) == {"nice-model", "big-model"}
    with Context(WHIT_CACHE=str(tmp_path / "cache")):
        assert find_model("Nice-1B").read_bytes() == b"nice"
        assert find_model("nice_model").read_bytes() == b"nice"
        joined = find_model("big")
        assert joined.read_bytes() == b"onetwo" and find_model("big-model") == joined
        with pytest.raises(ArgumentError, match="several packages fit"):
            find_packaged("model")
        joined.unlink()
        (root / "big_model_gguf/data/SHA256SUMS").write_text("0" * 64 + "  big.gguf\n")
        with pytest.raises(FileFormatError, match="SHA-256"):
            find_packaged("big")
        assert not joined.exists()


def test_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "site-packages"
    for name in ("all_minilm", "other_minilm"):
        (root / name / "model").mkdir(parents=True)
        (root / name / "model" / "modules.json").write_text("[]")
    monkeypatch.setattr(sys, "path", [str(root)])
    assert find_encoder("all-MiniLM") == root / "all_minilm" / "model"
    assert find_encoder("other") == root / "other_minilm" / "model"
    assert find_encoder(tmp_path) == tmp_path
    for name in ("minilm", "none"):
        with pytest.raises(ArgumentError, match="give a folder, or one of: all-minilm, other-minilm"):
            find_encoder(name)

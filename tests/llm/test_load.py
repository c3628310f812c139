"""Many clients at once on the loopback: texts equal those of a single client, errors are the expected ones,
and nothing stays behind. Two minutes with --slow, a few seconds else."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.llm.test_server import running
from tests.llm.tiny import ByteTokenizer, tiny_file
from whit.llm.engine import Engine
from whit.llm.model import Model

PROMPTS = [
    "a",
    "hello there",
    "the same beginning, then one",
    "the same beginning, then two",
    "x" * 70,
    "Ω and 😀",
]


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"model": "fake", "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}


class Clients:
    """Threads that send requests of all kinds until they are told to end."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address, self.seconds = address, seconds
        with httpx.Client(base_url=address, timeout=60) as client:
            self.expected = {prompt: self.text(client, prompt) for prompt in PROMPTS}
        self.failures: list[str] = []
        self.done = 0

    def text(self, client: httpx.Client, prompt: str) -> str:
        answer = client.post("/v1/completions", json=body(prompt))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def run(self, count: int) -> None:
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.address, timeout=60) as client:
            sent, until = 0, time.monotonic() + self.seconds
            while sent < 3 or time.monotonic() < until:
                sent += 1
                try:
                    rng.choice([self.whole, self.whole, self.stream, self.leave, self.wrong])(client, rng)
                    self.done += 1
                except Exception as error:
                    self.failures.append(repr(error))

    def whole(self, client: httpx.Client, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        assert self.text(client, prompt) == self.expected[prompt]

    def stream(self, client: httpx.Client, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        with client.stream("POST", "/v1/completions", json=body(prompt, stream=True)) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200 and lines[-1] == "data: [DONE]"

    def leave(self, client: httpx.Client, rng: random.Random) -> None:
        asked = body(rng.choice(PROMPTS), stream=True, max_tokens=100)
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            for _, _line in zip(range(rng.randint(0, 6)), answer.iter_lines()):
                pass

    def wrong(self, client: httpx.Client, rng: random.Random) -> None:
        given = rng.choice(
            [
                b"{",
                b"[]",
                b'{"model": "fake", "prompt": 3.5}',
                b'{"model": "no", "prompt": "x"}',
                b"\xff" * 50,
            ]
        )
        answer = client.post("/v1/completions", content=given)
        assert 400 <= answer.status_code < 500 and "error" in answer.json()


def load(clients: int, seconds: float) -> int:
    model = Model.load(tiny_file(), cache_dtype="float32")
    with Engine(model, ByteTokenizer(), slots=4, context=200, chunk=32) as engine:
        with running(engine) as address:  # type: ignore[arg-type]
            Clients(address, min(seconds, 15)).run(8)  # kernels are made, caches fill
            before = resident()
            crowd = Clients(address, seconds)
            crowd.run(clients)
            assert not crowd.failures, crowd.failures[:5]
            deadline = time.monotonic() + 10
            while engine.stats.busy and time.monotonic() < deadline:
                time.sleep(0.05)
        stats = engine.stats
        assert (stats.busy, stats.waiting) == (0, 0)
        assert resident() - before < 48 << 20
    return crowd.done


def test_a_few_clients() -> None:
    assert load(clients=6, seconds=2) >= 18


@pytest.mark.slow
def test_thirty_two_clients_for_two_minutes() -> None:
    assert load(clients=32, seconds=120) > 100

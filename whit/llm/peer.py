"""llama.cpp on the same file: its text with its logits, its perplexity, its speed.

Run by a Python that has the package `llama_cpp` (it needs nothing of whit):

    PYTHON peer.py '{"task": "greedy", "model": "m.gguf", "texts": ["Once"], "tokens": 8}'

prints JSON. Everything is llama.cpp's default (a cache of float16, flash attention as it chooses, repacked
weights, OpenMP), but for the number of threads and the context; "plain": true asks for a cache of float32 and
no flash attention, which adds up in float16.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import time
from typing import Any

STARTED = time.monotonic()


class Peer:
    """A model and a context of `context` positions."""

    def __init__(self, path: str, threads: int, context: int, plain: bool = False) -> None:
        self.c: Any = importlib.import_module("llama_cpp")
        self.c.llama_backend_init()
        self.model = self.c.llama_model_load_from_file(path.encode(), self.c.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {path}")
        self.vocab = self.c.llama_model_get_vocab(self.model)
        self.size = self.c.llama_vocab_n_tokens(self.vocab)
        self.greedy = self.c.llama_sampler_init_greedy()
        self.plain = plain
        self.context = self.new_context(threads, context)
        self.batch = self.c.llama_batch_init(max(context, 2048), 0, 1)

    def new_context(self, threads: int, context: int, streams: int = 1) -> Any:
        """A context with its own keys and values."""
        params = self.c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context * streams, streams
        params.n_threads = params.n_threads_batch = threads
        if self.plain:
            params.flash_attn_type = self.c.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.type_k = params.type_v = self.c.GGML_TYPE_F32
        made = self.c.llama_init_from_model(self.model, params)
        if not made:
            raise SystemExit("llama.cpp makes no context")
        return made

    def clear(self) -> None:
        """Forget all texts."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def read(self, rows: list[tuple[int, int, int]], logits: str = "last") -> None:
        """Read (token, position, sequence) of every row; logits of "all" of them, or of the "last"."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = logits == "all" or i == len(rows) - 1
        if status := self.c.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode: {status}")

    def text(self, tokens: list[int], first: int = 0, sequence: int = 0, logits: str = "last") -> None:
        """Read tokens of one sequence from position `first` on."""
        self.read([(token, first + i, sequence) for i, token in enumerate(tokens)], logits)

    def logits(self, row: int = -1) -> Any:
        """The logits of a row of the last pass (NumPy float32, vocabulary)."""
        import numpy as np

        return np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, row), (self.size,))

    def next(self, row: int = -1) -> int:
        """The likeliest token after a row of the last pass."""
        return int(self.c.llama_sampler_sample(self.greedy, self.context, row))

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with the one that begins texts if the model has it."""
        data = text.encode()
        room = (self.c.llama_token * (len(data) + 16))()
        count = self.c.llama_tokenize(self.vocab, data, len(data), room, len(room), True, True)
        return list(room[:count])

    def about(self) -> dict[str, str]:
        """Which build this is, and what it uses of the processor."""
        return {
            "llama_cpp_python": self.c.__version__,
            "llama.cpp": self.c.llama_version().decode(),
            "system": self.c.llama_print_system_info().decode().strip(),
        }


def greedy(task: dict[str, Any]) -> dict[str, Any]:
    """The likeliest tokens after each text, with the two largest logits of each step.

    {"texts", "tokens"} -> {"about", "runs": [{"text", "prompt", "tokens", "second", "logits": [[…, …], …]}]}
    """
    import numpy as np

    peer = Peer(task["model"], task["threads"], task["context"], task.get("plain", False))
    runs = []
    for text in task["texts"]:
        prompt = peer.tokens(text)
        run: dict[str, Any] = {"text": text, "prompt": prompt, "tokens": [], "second": [], "logits": []}
        peer.clear()
        peer.text(prompt)
        for place in range(len(prompt), len(prompt) + task["tokens"]):
            logits = peer.logits()
            second, first = (int(i) for i in np.argsort(logits, kind="stable")[-2:])
            run["tokens"].append(first)
            run["second"].append(second)
            run["logits"].append([round(float(logits[i]), 4) for i in (first, second)])
            peer.text([first], place)
        runs.append(run)
    return {"about": peer.about(), "runs": runs}


def perplexity(task: dict[str, Any]) -> dict[str, Any]:
    """The mean of -log p over the second half of each window: {"ids", "window", "bos"} -> {"losses", …}.

    bos: replaces the first token of each window (null: nothing does).
    """
    import numpy as np

    window, ids = task["window"], task["ids"]
    peer = Peer(task["model"], task["threads"], window, task.get("plain", False))
    losses = []
    for begin in range(0, len(ids) - window + 1, window):
        piece = ids[begin : begin + window]
        peer.clear()
        peer.text(piece if task["bos"] is None else [task["bos"], *piece[1:]], logits="all")
        total = 0.0
        for place in range(window // 2, window - 1):
            row = peer.logits(place).astype(np.float64)
            total += math.log(np.exp(row - row.max()).sum()) + row.max() - row[piece[place + 1]]
        losses.append(total / (window - 1 - window // 2))
    return {"about": peer.about(), "losses": losses, "perplexity": math.exp(statistics.fmean(losses))}


def figures(task: dict[str, Any]) -> dict[str, Any]:
    """How fast it is: {"first", "prompts", "tokens", "stream_prompts", "stream_tokens"} -> seconds and rates.

    What is measured is what `whit.llm.bench.figures` measures.
    """
    importlib.import_module("llama_cpp")
    out: dict[str, Any] = {"interpreter_seconds": time.monotonic() - task["begun"], "base": peak("VmRSS")}
    begun = time.monotonic()
    peer = Peer(task["model"], task["threads"], task["context"])
    peer.text(task["first"])
    peer.next()
    ended = time.monotonic()
    out["first_token"] = ended - begun
    reading, writing = [], []
    for prompt in task["prompts"]:
        peer.clear()
        start = time.perf_counter()
        peer.text(prompt)
        token = peer.next()
        read = time.perf_counter()
        for place in range(len(prompt), len(prompt) + task["tokens"] - 1):
            peer.text([token], place)
            token = peer.next()
        reading.append(len(prompt) / (read - start))
        if task["tokens"] > 1:
            writing.append((task["tokens"] - 1) / (time.perf_counter() - read))
    out |= {"prefill": reading, "decode": writing, "peak": peak()}
    if task["stream_prompts"]:
        peer.c.llama_free(peer.context)
        out["streams"] = streams(peer, task)
        out["peak_streams"] = peak()
    return out | {"about": peer.about()}


def streams(peer: Peer, task: dict[str, Any]) -> float:
    """Tokens a second of all streams together, while all of them are being written."""
    prompts, count = task["stream_prompts"], task["stream_tokens"]
    peer.context = peer.new_context(task["threads"], task["context"], len(prompts))
    last = []
    for number, prompt in enumerate(prompts):
        peer.text(prompt, 0, number)
        last.append(peer.next())
    rates = []
    half = max(1, count // 2)  # two halves: the first pass of a batch of this size prepares its graph
    for start in (0, half):
        begun = time.perf_counter()
        for step in range(start, start + half):
            peer.read([(t, len(prompts[n]) + step, n) for n, t in enumerate(last)], "all")
            last = [peer.next(n) for n in range(len(last))]
        rates.append(half * len(prompts) / (time.perf_counter() - begun))
    return float(max(rates))


def peak(what: str = "VmHWM") -> int:
    """The most memory that this process ever had, in bytes (0 where the system does not say)."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))
    except OSError:
        return 0


if __name__ == "__main__":
    asked = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())
    tasks = {"greedy": greedy, "perplexity": perplexity, "figures": figures}
    print(json.dumps(tasks[asked["task"]](asked)))

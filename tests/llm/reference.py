"""whit beside llama.cpp on real models: greedy text, logits on llama.cpp's own text, perplexity.

    python -m tests.llm.reference MODEL.gguf [KIND]            # compare with the figures in data/
    python -m tests.llm.reference MODEL.gguf [KIND] --make PYTHON     # let llama.cpp write them anew

PYTHON is one that has llama_cpp (`whit/llm/peer.py`). `--read` reads each text in one pass (the kernels that
read prompts) and not token by token (those that write). What the kinds are for: llama.cpp rounds activations
to 8 bits, and flash attention adds up in float16. Whatever differs by more than a rounding moves some of the
8-bit numbers, and these move logits by some 0.2 (root mean square) and 1.3 at most, whether it is flash
attention that is turned off, a frequency of rope that is changed by 1e-5, or the rounding itself.

    default   the file, all else as llama.cpp chooses
    plain     the file, no flash attention, keys and values in float32: what rounding activations alone does
    exact     as plain, with all weights as float32, and so nothing rounded: what whit must equal
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from whit.llm import peer
from whit.llm.generate import read_prompt
from whit.llm.model import Model
from whit.llm.perplexity import perplexity
from whit.llm.quantize import quantize
from whit.llm.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
WINDOW, TEXT_TOKENS, STEPS = 512, 4096, 64
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at a lower temperature on a mountain because",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "To make bread you need flour,",
    "In 1969, the first humans",
    "The theory of evolution by natural selection says that",
    "Dear Ms Jensen,\n\nThank you for your letter of",
    "A prime number is",
    "SELECT name, age FROM people WHERE",
    "La capitale de l'Italie est",
    "1, 1, 2, 3, 5, 8, 13,",
    "The old clock on the wall had stopped, and nobody",
    "Question: Why is the sky blue?\nAnswer:",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\n",
    "The heart pumps blood through",
    "| city | country |\n| --- | --- |\n| Paris | France |\n|",
    "She opened the door and saw",
    "An electron has a negative charge, while a proton has",
]


KINDS = "default", "plain", "exact"


def data_of(model: Model, kind: str = "default") -> dict[str, Any]:
    """A model's figures."""
    data: dict[str, Any] = json.loads(file_of(model, kind).read_text("utf-8"))
    if kind != "default":  # the text stands there
        data["perplexity"] |= {k: data_of(model)["perplexity"][k] for k in ("ids", "bos")}
    return data


def file_of(model: Model, kind: str) -> Path:
    """Where they lie."""
    return DATA / f"llamacpp_{model.config.arch.name}_{kind}.json"


# ---- compare -------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """What was found. Gaps: how far llama.cpp's first token is above its second, and above whit's first, and
    how far whit's first is above llama.cpp's first."""

    prompts: int = 0
    steps: int = 0
    equal: int = 0  # prompts of which all tokens are
    worst: float = 0.0  # difference of a logit
    squares: float = 0.0
    parted: list[dict[str, Any]] = field(default_factory=list)  # first step of each prompt that differs
    others: int = 0  # steps after it, on llama.cpp's text, where the likeliest token differs

    def lines(self) -> Iterator[str]:
        """For people."""
        mean = math.sqrt(self.squares / max(1, 2 * self.steps))
        yield f"prompts with equal text   {self.equal} of {self.prompts} ({self.steps} steps in all)"
        yield f"difference of logits      at most {self.worst:.4f}, root mean square {mean:.4f}"
        for one in self.parted:
            yield (
                f"  parts at step {one['step']:>2}: llama.cpp {one['theirs']} ahead of {one['ours']} by "
                f"{one['their_gap']}, whit the other way by {one['our_gap']}: {one['text']!r}"
            )
        yield f"later steps that differ   {self.others}"


def compare(
    model: Model, runs: Sequence[dict[str, Any]], steps: int | None = None, whole: bool = False
) -> Comparison:
    """The likeliest tokens and their logits at each step of llama.cpp's text."""
    found = Comparison(len(runs))
    cache = model.new_cache(1, 256)
    for run in runs:
        before = len(found.parted)
        for step, logits in enumerate(forced(model, cache, run, steps, whole)):
            pair = run["tokens"][step], run["second"][step]
            off = [abs(float(logits[t]) - want) for t, want in zip(pair, run["logits"][step])]
            found.worst = max(found.worst, *off)
            found.squares += sum(o * o for o in off)
            found.steps += 1
            ours = int(logits.argmax())
            if ours == pair[0]:
                continue
            if len(found.parted) > before:
                found.others += 1
                continue
            their_gap = run["logits"][step][0] - run["logits"][step][1]
            found.parted.append(
                {
                    "text": run["text"],
                    "step": step,
                    "theirs": pair[0],
                    "ours": ours,
                    # llama.cpp keeps two logits: a third token is further behind than the second
                    "their_gap": f"{'' if ours == pair[1] else 'more than '}{their_gap:.4f}",
                    "their_gap_value": their_gap,
                    "our_gap": round(float(logits[ours] - logits[pair[0]]), 4),
                }
            )
        found.equal += len(found.parted) == before
    return found


def forced(
    model: Model, cache: Any, run: dict[str, Any], steps: int | None, whole: bool
) -> Iterator[Any]:
    """whit's logits (vocabulary) at each step of a run."""
    prompt, tokens = run["prompt"], run["tokens"][:steps]
    if whole:
        logits = model.forward([prompt + tokens[:-1]], [0], cache, every=True)[0].numpy()
        yield from logits[len(prompt) - 1 :]
        return
    yield read_prompt(model, prompt, cache)[0].numpy()
    for place, token in enumerate(tokens[:-1], len(prompt)):
        yield model.forward([[token]], [place], cache)[0].numpy()


def text_of(data: dict[str, Any]) -> list[int]:
    """The tokens of the long text, with the token that begins texts at the start of each window."""
    ids, bos = list(data["perplexity"]["ids"]), data["perplexity"]["bos"]
    if bos is not None:
        ids[::WINDOW] = [bos] * len(ids[::WINDOW])
    return ids


def perplexity_ratio(model: Model, data: dict[str, Any], windows: int | None = None) -> tuple[float, float]:
    """whit's and llama.cpp's perplexity over the first windows of the text."""
    ids = text_of(data)[: None if windows is None else windows * WINDOW]
    losses = data["perplexity"]["losses"][:windows]
    return perplexity(model, ids, window=WINDOW), math.exp(float(np.mean(losses)))


# ---- let llama.cpp say ---------------------------------------------------------------------------------


def make(path: Path, python: str, threads: int, kind: str) -> None:
    """Write the figures of a model."""
    model = Model.load(path)
    ids, bos, digest = long_text(model)
    with TemporaryDirectory() as folder:
        used = path.resolve()
        if kind == "exact":
            used = Path(folder) / "exact.gguf"
            quantize(path, used, "F32")
        common = {"model": str(used), "threads": threads, "context": 256, "plain": kind != "default"}
        greedy = ask(python, common | {"task": "greedy", "texts": TEXTS, "tokens": STEPS})
        loss = ask(python, common | {"task": "perplexity", "ids": ids, "window": WINDOW, "bos": bos})
    data = {
        "provenance": {
            "what": f"llama.cpp: {STEPS} greedy tokens after each text, their logits and the second largest; "
            f"mean -log p over the second half of windows of {WINDOW} tokens of docs/design.md and map.md "
            f"(the first {TEXT_TOKENS} tokens; bos replaces the first of a window)",
            "kind": kind,
            "model": path.resolve().name,
            "sha256": sha256(path.read_bytes()).hexdigest(),
            "text_sha256": digest,
            "threads": threads,
            **greedy["about"],
        },
        "perplexity": {"losses": loss["losses"], "perplexity": loss["perplexity"]},
        "runs": greedy["runs"],
    }
    if kind == "default":
        data["perplexity"] |= {"ids": ids, "bos": bos}
    shown = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    starts = "perplexity", "ids", "losses", "runs", "prompt", "tokens", "second", "logits"
    for key in (*[f'"{name}":' for name in starts], '{"text"'):
        shown = shown.replace(key, "\n" + key)
    file_of(model, kind).write_text(shown + "\n", "utf-8")


def long_text(model: Model) -> tuple[list[int], int | None, str]:
    """Tokens of whit's documentation, as it was when the default's figures were made; the token that begins
    texts; a digest of the text."""
    with suppress(FileNotFoundError):
        data = data_of(model)
        return data["perplexity"]["ids"], data["perplexity"]["bos"], data["provenance"]["text_sha256"]
    tokenizer = Tokenizer.from_gguf(model.gguf)
    text = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("design.md", "map.md"))
    ids = tokenizer.encode(text, special=False, bos=False)[:TEXT_TOKENS]
    assert len(ids) == TEXT_TOKENS, "the text is too short"
    bos = tokenizer.bos_id if tokenizer.vocabulary.add_bos else None
    return ids, bos, sha256(text.encode()).hexdigest()


def ask(python: str, task: dict[str, Any]) -> dict[str, Any]:
    """A task of `whit/llm/peer.py`, run by another Python."""
    done = subprocess.run(
        [python, peer.__file__], input=json.dumps(task), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    arguments = argparse.ArgumentParser(description="whit beside llama.cpp on a real model")
    arguments.add_argument("model", type=Path)
    arguments.add_argument("kind", nargs="?", choices=KINDS, default="default")
    arguments.add_argument("--make", metavar="PYTHON", help="a Python with llama_cpp: write its figures anew")
    arguments.add_argument("--threads", type=int, default=1, help="of llama.cpp (--make)")
    arguments.add_argument("--prompts", type=int, default=len(TEXTS), metavar="N", help="the first N only")
    arguments.add_argument("--steps", type=int, default=STEPS, metavar="N", help="tokens of each")
    windows = TEXT_TOKENS // WINDOW
    arguments.add_argument("--windows", type=int, default=windows, metavar="N", help="of the long text")
    arguments.add_argument("--activations", default="float32", help="of whit: float32 or int8")
    arguments.add_argument("--read", action="store_true", help="read each text in one pass")
    options = arguments.parse_args()
    if options.make:
        make(options.model, options.make, options.threads, options.kind)
        return
    cache = "float16" if options.kind == "default" else "float32"
    model = Model.load(options.model, cache_dtype=cache, activations=options.activations)
    data = data_of(model, options.kind)
    start = time.perf_counter()
    for line in compare(model, data["runs"][: options.prompts], options.steps, options.read).lines():
        print(line)
    if options.windows:
        ours, theirs = perplexity_ratio(model, data, options.windows)
        print(f"perplexity                whit {ours:.4f}, llama.cpp {theirs:.4f}, ratio {ours / theirs:.5f}")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

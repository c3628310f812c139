"""How fast a model is here: load to first token, reading, writing, several streams, memory; beside llama.cpp
if it is installed, and beside what the memory's bandwidth allows.

    report = measure(Plan("smollm2.gguf"), peer_python="venv/bin/python")

Every measurement is a process of its own, whit's and the peer's in turns; medians over the rounds are
reported. Both get the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whit.helpers import ArgumentError, Context, WhitError, cpu_threads, human_bytes
from whit.llm import peer

if TYPE_CHECKING:
    from whit.llm.engine import Engine, Request
    from whit.llm.model import Model

FIRST = 8  # tokens of the prompt that the time to the first token is taken of
STREAM_PROMPT = 64  # tokens of the prompt of each stream, or fewer if the others have fewer
RATIOS = {  # figure: whether more is better
    "load_to_first_token_seconds": False,
    "cold_to_first_token_seconds": False,
    "prefill_tokens_per_second": True,
    "decode_tokens_per_second": True,
    "streams_tokens_per_second": True,
    "peak_memory_bytes": False,
}
SHOWN: list[tuple[str, str, Callable[[Any], str]]] = [
    ("load_to_first_token_seconds", "load to first token, s", "{:.3f}".format),
    ("cold_to_first_token_seconds", "the same without caches, s", "{:.3f}".format),
    ("interpreter_seconds", "start of Python (in whit's load), s", "{:.3f}".format),
    ("first_prompt_tokens_per_second", "reading, first prompt, tokens/s", "{:.1f}".format),
    ("prefill_tokens_per_second", "reading, tokens/s", "{:.1f}".format),
    ("decode_tokens_per_second", "writing, tokens/s", "{:.1f}".format),
    ("share_of_read_limit", "  share of what memory allows", "{:.2f}".format),
    ("streams_tokens_per_second", "writing, all streams, tokens/s", "{:.1f}".format),
    ("peak_memory_bytes", "peak memory", human_bytes),
    ("interpreter_bytes", "  Python's share", human_bytes),
    ("peak_memory_streams_bytes", "peak memory with streams", human_bytes),
]


@dataclass(frozen=True)
class Plan:
    """What to measure. `model` is a path; `context`: positions of a text (default: what is needed)."""

    model: str
    prompt: int = 512
    tokens: int = 64
    streams: int = 8
    rounds: int = 3  # processes of each
    repeat: int = 2  # prompts that a process reads, after one that does not count
    threads: int | None = None
    context: int | None = None
    cold: bool = False
    cache_type: str = "float16"
    activations: str = "float32"
    memory: int | None = None
    speculate: str | None = None

    @property
    def positions(self) -> int:
        """The context that is asked of both."""
        return self.context or 1 << (self.prompt + self.tokens - 1).bit_length()


class BenchError(WhitError, RuntimeError):
    """A process that measures failed."""


# ---- in turns ----------------------------------------------------------------------------------------------


def measure(
    plan: Plan, peer_python: str | None = None, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Run everything. {"model", …, "whit": figures, "llama.cpp": figures, "ratios": …}; the last two only
    with a `peer_python`, a Python that has llama_cpp.

    Errors: ArgumentError for a plan that the model's context does not hold, BenchError if a process fails,
            what loading the model raises
    """
    about = _weights(plan)
    size = about.pop("vocabulary")
    programs = {"whit": [sys.executable, "-m", "whit.llm.bench"]}
    if peer_python is not None:
        programs["llama.cpp"] = [peer_python, peer.__file__]
    task = _task(plan, size)
    progress("kernels are compiled")
    _run(programs["whit"], task)
    progress("memory's bandwidth is measured")
    limit = _run([sys.executable, "-m", "whit.engine.probe", "--json"])["read"]
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for number in range(plan.rounds):
        for name, program in programs.items():
            progress(f"round {number + 1} of {plan.rounds}: {name}")
            samples[name].append(_run(program, task))
    report = about | {"read_limit_bytes_per_second": limit}
    for name, each in samples.items():
        report[name] = _summary(each, about["bytes_per_token"], limit)
    if plan.cold:
        for name, program in programs.items():
            progress(f"without caches: {name}")
            report[name] |= _cold(plan, program, task)
    if peer_python is not None:
        report["ratios"] = _ratios(report["whit"], report["llama.cpp"])
    return report


def peer_is_there(python: str) -> bool:
    """Whether a Python has llama_cpp."""
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode == 0
    return False


def _weights(plan: Plan) -> dict[str, Any]:
    """What is measured, and how many bytes each token reads: weights once, keys and values so far."""
    from whit.llm.model import Model

    model = Model.load(plan.model)
    if plan.prompt + plan.tokens > min(plan.positions, model.context):
        raise ArgumentError(
            f"{plan.prompt} + {plan.tokens} tokens",
            because=f"the context holds {min(plan.positions, model.context)}",
            fix="choose a longer --context, or fewer tokens",
        )
    return {
        "model": os.path.basename(plan.model).removesuffix(".gguf"),
        "prompt_tokens": plan.prompt,
        "generated_tokens": plan.tokens,
        "streams": plan.streams,
        "rounds": plan.rounds,
        "threads": plan.threads or cpu_threads(),
        "context": plan.positions,
        "activations": plan.activations,
        "bytes_per_token": bytes_per_token(model, plan.prompt + plan.tokens // 2),
        "vocabulary": model.vocab_size,
    }


def bytes_per_token(model: Model, position: int) -> int:
    """The bytes that one token at this position reads at least: all weights but the embedding, of which it
    reads one row (all of it where it is the output as well), and keys and values in the layers' windows."""
    config, gguf = model.config, model.gguf
    total = 0
    for name, entry in gguf.tensors.items():
        rows = name.startswith(("token_embd", "position_embd")) and (
            "output.weight" in gguf.tensors or name.startswith("position_embd")
        )
        total += entry.nbytes // entry.shape[0] if rows else entry.nbytes
    width = config.kv_heads * (config.head_dim + config.value_dim) * model.cache_dtype.itemsize
    for layer in range(config.layers):
        seen = min(position, config.window) if config.window and config.local(layer) else position
        total += seen * width
    return total


def _task(plan: Plan, size: int) -> dict[str, Any]:
    """What both programs are asked (`options` and `settings` are whit's). Texts differ from the first token
    on, for beginnings are remembered."""

    def text(number: int, count: int) -> list[int]:
        return [(number * 7919 + 1000 + i * i * 31) % size for i in range(count)]

    return {
        "task": "figures",
        "model": os.path.abspath(plan.model),
        "threads": plan.threads or cpu_threads(),
        "context": plan.positions,
        "first": text(0, FIRST),
        "prompts": [text(1 + n, plan.prompt) for n in range(plan.repeat + 1)],
        "tokens": plan.tokens,
        "stream_prompts": [text(100 + n, min(plan.prompt, STREAM_PROMPT)) for n in range(plan.streams)]
        if plan.streams > 1
        else [],
        "stream_tokens": plan.tokens,
        "options": {
            "cache_dtype": plan.cache_type,
            "activations": plan.activations,
            "memory_limit": plan.memory,
            "speculate": plan.speculate,
        },
        "settings": {},
    }


def _run(program: Sequence[str], task: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of a process, told when it was begun."""
    asked = None if task is None else json.dumps(task | {"begun": time.monotonic()})
    done = subprocess.run(program, input=asked, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(
            f"measure with {program[0]}",
            because=(done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1],
            fix=f"run {' '.join(program)} by hand to see more",
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _summary(samples: list[dict[str, Any]], bytes_per_token: int, limit: float) -> dict[str, Any]:
    """Medians. Of the prompts of a process the first does not count: it is reported as `first_prompt`."""

    def median(key: str) -> float:
        return float(statistics.median(s[key] for s in samples))

    def rate(key: str) -> float:
        return float(statistics.median(r for s in samples for r in s[key][1:]))

    out: dict[str, Any] = {
        "load_to_first_token_seconds": round(median("first_token"), 3),
        "interpreter_seconds": round(median("interpreter_seconds"), 3),
        "first_prompt_tokens_per_second": round(statistics.median(s["prefill"][0] for s in samples), 1),
        "prefill_tokens_per_second": round(rate("prefill"), 1),
    }
    if samples[0]["decode"]:
        decode = rate("decode")
        out["decode_tokens_per_second"] = round(decode, 2)
        out["share_of_read_limit"] = round(decode * bytes_per_token / limit, 3)
    out |= {"peak_memory_bytes": int(median("peak")), "interpreter_bytes": int(median("base"))}
    if "streams" in samples[0]:
        out["streams_tokens_per_second"] = round(median("streams"), 2)
        out["peak_memory_streams_bytes"] = int(median("peak_streams"))
    return out | {"about": samples[0]["about"], "samples": samples}


def _ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """whit's share of the peer's seconds and bytes, and how many times its rate."""
    out = {
        key: round(ours[key] / theirs[key], 3)
        for key in RATIOS
        if theirs.get(key) and ours.get(key) is not None
    }
    if theirs["interpreter_bytes"]:  # llama.cpp needs no Python: the harder comparison
        alone = theirs["peak_memory_bytes"] - theirs["interpreter_bytes"]
        out["peak_memory_bytes_without_its_interpreter"] = round(ours["peak_memory_bytes"] / alone, 3)
    return out


def _cold(plan: Plan, program: Sequence[str], task: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first token with no kernel compiled before, and the file not in memory if the system
    lets go of it."""
    with tempfile.TemporaryDirectory() as folder:
        alone = {"prompts": [], "stream_prompts": [], "settings": {"WHIT_CACHE": folder}}
        dropped = drop_from_memory(plan.model)
        seconds = _run(program, task | alone)["first_token"]
    return {"cold_to_first_token_seconds": round(seconds, 3), "file_was_dropped": dropped}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    names = [name for name in ("whit", "llama.cpp") if name in report]
    yield (
        f"{report['model']}: {report['prompt_tokens']} tokens read, {report['generated_tokens']} written, "
        f"{report['threads']} threads, context {report['context']}, activations {report['activations']}, "
        f"{report['rounds']} rounds"
    )
    yield f"{'':<40}" + "".join(f"{name:>12}" for name in [*names, *["ratio"] * ("ratios" in report)])
    for key, label, shown in SHOWN:
        cells = [shown(report[name][key]) if key in report[name] else "" for name in names]
        if any(cells):
            ratio = report.get("ratios", {}).get(key)
            cells.append("" if ratio is None else f"{ratio:.2f}")
            yield f"{label:<40}" + "".join(f"{cell:>12}" for cell in cells)
    yield (
        f"a token reads {human_bytes(report['bytes_per_token'])}; memory gives "
        f"{report['read_limit_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    if "llama.cpp" in report:
        yield ", ".join(f"{key} {value}" for key, value in report["llama.cpp"]["about"].items())
    if not all(report[name].get("file_was_dropped", True) for name in names):
        yield "the file stayed in memory: this system does not let go of it, or does not tell"


def drop_from_memory(path: str) -> bool:
    """Ask the system to forget a file's pages. Whether the first of them is out of memory then."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except (OSError, AttributeError):
            return False  # not to be found out here
    return False


# ---- one process of whit -----------------------------------------------------------------------------------


def figures(task: dict[str, Any]) -> dict[str, Any]:
    """What `whit.llm.peer.figures` measures, on whit's engine. The time to the first token begins with the
    process."""
    from whit.llm.load import load

    out: dict[str, Any] = {"interpreter_seconds": time.monotonic() - task["begun"]}
    out["base"] = peer.peak("VmRSS")
    with Context(NUM_CPU_THREADS=task["threads"], **task["settings"]):
        loaded = load(task["model"], context=task["context"], slots=1, **task["options"])
        with loaded.engine as engine:
            list(_submit(engine, task["first"], 1))
            out["first_token"] = time.monotonic() - task["begun"]
            out |= {"prefill": [], "decode": []}
            for prompt in task["prompts"]:
                request = _submit(engine, prompt, task["tokens"])
                times = _times(request)
                out["prefill"].append(len(prompt) / (times[0] - request.created))
                if len(times) > 1:
                    out["decode"].append((len(times) - 1) / (times[-1] - times[0]))
            out["peak"] = peer.peak()
        if task["stream_prompts"]:
            with load(
                task["model"], context=task["context"], slots=len(task["stream_prompts"]), **task["options"]
            ).engine as engine:
                out["streams"] = max(_streams(engine, task, number) for number in range(2))
            out["peak_streams"] = peer.peak()
    from whit.helpers import VERSION

    return out | {"about": {"whit": VERSION}}


def _submit(engine: Engine, prompt: list[int], tokens: int) -> Request:
    from whit.llm.sampling import SamplingParams

    return engine.submit(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_end=True))


def _times(request: Request) -> list[float]:
    """When each token came."""
    return [time.monotonic() for event in request if event.token is not None]


def _streams(engine: Engine, task: dict[str, Any], number: int) -> float:
    """Tokens a second of all streams together, while all of them are being written."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [[*prompt[:-1], prompt[-1] ^ number] for prompt in task["stream_prompts"]]
    requests = [_submit(engine, prompt, task["stream_tokens"]) for prompt in prompts]
    with ThreadPoolExecutor(len(requests)) as pool:
        times = list(pool.map(_times, requests))
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    written = sum(begin < at <= end for t in times for at in t)
    return written / (end - begin) if written else 0.0


if __name__ == "__main__":
    print(json.dumps(figures(json.loads(sys.stdin.read()))))

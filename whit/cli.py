"""The program `whit`: language models from the command line. `whit --help` lists the commands.

Every command imports what it needs when it runs; errors are told in one line, without a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whit.helpers import DEBUG, VERSION, ArgumentError, Context, WhitError, human_bytes

if TYPE_CHECKING:
    from whit.llm.load import Loaded
    from whit.llm.sampling import SamplingParams

MODEL_HELP = (
    "a .gguf file or its folder, a model of an installed package (smollm2), or a name on the hub: "
    "owner/repository, owner/repository:Q4_K_M, owner/repository/file.gguf"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. The exit status: 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    options = parsed(arguments)
    try:
        with Context(**({"NUM_CPU_THREADS": options.threads} if getattr(options, "threads", None) else {})):
            status: int = options.run(options)
        return status
    except WhitError as error:
        if DEBUG.value:
            raise
        return _fail(error.asked, error.because, error.fix)
    except ModuleNotFoundError as error:
        if DEBUG.value or (error.name or "").startswith("whit"):
            raise
        return _fail(f"import {error.name}", "it is not installed", "pip install 'whit[llm]'")
    except BrokenPipeError:  # the reader of our output had enough
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _fail(asked: str, because: str, fix: str) -> int:
    print(f"whit: {asked}" + (f": {because}" if because else ""), file=sys.stderr)
    if fix:
        print(f"to fix: {fix}", file=sys.stderr)
    return 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. A text that may be left out may follow options; argparse wants it beside MODEL."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    late = getattr(options, "late", None)
    if len(rest) == 1 and late and not rest[0].startswith("-") and getattr(options, late) in (None, "-"):
        setattr(options, late, rest[0])
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


# ---- what can be said --------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="whit", description="Language models on kernels that whit generates.")
    top.add_argument("--version", action="version", version=f"whit {VERSION}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    chat = _command(commands, "chat", run_chat, "talk with a model")
    _model_options(chat)
    _sampling_options(chat, temperature=0.7)
    chat.add_argument("--system", metavar="TEXT", help="instructions that the conversation begins with")
    chat.add_argument("prompt", nargs="?", help="ask this, print the answer, and end")
    chat.set_defaults(late="prompt")

    generate = _command(commands, "generate", run_generate, "continue a text")
    _model_options(generate)
    _sampling_options(generate, temperature=0.0)
    generate.add_argument("prompt", nargs="?", default="-", help="the text; - reads it from standard input")
    generate.set_defaults(late="prompt")
    generate.add_argument("--json-schema", metavar="FILE", help="the output satisfies this JSON schema")
    generate.add_argument("--ignore-end", action="store_true", help="go on after the end of the text")

    serve = _command(commands, "serve", run_serve, "answer OpenAI's API, and chat in a browser")
    _model_options(serve)
    _serve_options(serve)

    bench = _command(commands, "bench-llm", run_bench, "measure a model, beside llama.cpp if it is installed")
    _model_options(bench)
    _bench_options(bench)

    quantize = _command(commands, "quantize", run_quantize, "write a smaller GGUF file")
    quantize.add_argument("source", help="a GGUF file with F32, F16 or BF16 weights (others are decoded)")
    quantize.add_argument("target", help="the file to write")
    quantize.add_argument(
        "type", help="such as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K_M, Q6_K, MXFP4; a wrong one lists all"
    )

    tokenize = _command(commands, "tokenize", run_tokenize, "show the tokens of a text")
    tokenize.add_argument("model", help=MODEL_HELP)
    tokenize.add_argument("text", nargs="?", default="-", help="the text; - reads it from standard input")
    tokenize.set_defaults(late="text")
    tokenize.add_argument("--ids", action="store_true", help="numbers only, on one line")
    tokenize.add_argument("--no-bos", action="store_true", help="without the token that begins a text")
    tokenize.add_argument("--decode", action="store_true", help="the text is numbers: show what they say")

    inspect = _command(commands, "inspect", run_inspect, "show what a GGUF or safetensors file holds")
    inspect.add_argument("file", help=f"{MODEL_HELP}; or a .safetensors file")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    return top


def _command(commands: Any, name: str, run: Any, what: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=what, description=_sentence(what))
    command.set_defaults(run=run)
    return command


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_count.__name__ = "number of at least 1"  # argparse names the type when a value is wrong


def _size(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    power = units.get(text[-1:].upper(), 0)
    return int(float(text[:-1] if power else text) * (1 << power))


_size.__name__ = "size such as 500M or 2G"


def _model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help=MODEL_HELP)
    group = command.add_argument_group("engine")
    group.add_argument("--context", type=_count, metavar="N", help="positions of a conversation")
    group.add_argument(
        "--cache-type",
        default="float16",
        metavar="TYPE",
        help="of keys and values: float16, bfloat16, float32, int8",
    )
    group.add_argument(
        "--activations",
        default="float32",
        metavar="TYPE",
        help="what meets weights in blocks: float32, or int8 (faster, less exact)",
    )
    group.add_argument("--memory", type=_size, metavar="SIZE", help="limit for keys and values, such as 2G")
    group.add_argument("--threads", type=_count, metavar="N", help="threads of the CPU")
    group.add_argument(
        "--speculate", metavar="WHAT", help='guess ahead: "ngram", or a smaller model of the same vocabulary'
    )


def _sampling_options(command: argparse.ArgumentParser, temperature: float) -> None:
    group = command.add_argument_group("sampling")
    add = group.add_argument
    add(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0: the likeliest ({temperature})",
    )
    add("--top-k", type=int, default=0, metavar="K", help="choose from the K likeliest tokens")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="… from the likeliest that hold this probability",
    )
    add(
        "--min-p", type=float, default=0.0, metavar="P", help="… from those this likely, beside the likeliest"
    )
    add("--repetition-penalty", type=float, default=1.0, metavar="F", help="make what was said less likely")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--max-tokens", type=_count, metavar="N", help="stop after so many")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may come again")
    add("--stats", action="store_true", help="tell how fast it was")


def _bench_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("measurement")
    add = group.add_argument
    add("--prompt", type=_count, default=512, metavar="N", help="tokens to read (512)")
    add("--tokens", type=_count, default=64, metavar="N", help="tokens to write (64)")
    add("--streams", type=_count, default=8, metavar="N", help="requests at once (8; 1: none are measured)")
    add("--rounds", type=_count, default=3, metavar="N", help="processes of each; medians are told (3)")
    add("--repeat", type=_count, default=2, metavar="N", help="prompts of a process, after a first one (2)")
    add("--cold", action="store_true", help="also with no compiled kernels, and the file not in memory")
    add("--peer", choices=("llama.cpp",), help="measure it in turns with whit, or fail if it is not there")
    add("--peer-python", metavar="PATH", help="a Python that has llama_cpp (this one if it does)")
    add("--json", action="store_true", help="print JSON, with every sample")


def _serve_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("--port", type=int, default=8080, help="port (8080); 0 takes a free one")
    add("--name", help="what clients call the model (its file's name)")
    add("--api-key", action="append", default=[], metavar="KEY", help="clients must send it; may come again")
    add("--api-key-file", metavar="FILE", help="keys, one a line")
    add("--slots", type=_count, default=4, metavar="N", help="requests that are written at once (4)")
    add("--max-waiting", type=_count, default=256, metavar="N", help="requests that may wait (256)")
    add("--max-tokens", type=_count, metavar="N", help="the most that a request may write")
    add("--max-body", type=_size, default=8 << 20, metavar="SIZE", help="of a request (8M)")
    add("--embeddings", metavar="NAME", help="a sentence encoder (folder or package) for /v1/embeddings")
    add("--embeddings-name", metavar="NAME", help="what clients call it")
    add(
        "--images",
        choices=("refuse", "note"),
        default="refuse",
        help="note: tell the model that there was one",
    )
    add("--cors", action="append", default=[], metavar="ORIGIN", help="sites whose pages may ask; * for all")
    add("--allow-host", action="append", default=[], metavar="NAME", help="another name of this server")
    add("--grace", type=float, default=10.0, metavar="S", help="seconds that answers get at the end (10)")
    add("--no-warm-up", action="store_true", help="answer at once; first requests wait for their kernels")
    add("--prefixes", metavar="FILE", help="keep known beginnings of prompts in this file between runs")
    add("--log-level", default="warning", choices=("error", "warning", "info", "debug"))


# ---- commands that write text ------------------------------------------------------------------------------


def _loaded(options: argparse.Namespace, **more: Any) -> Loaded:
    from whit.llm.load import load

    show = (lambda text: print(text, file=sys.stderr)) if sys.stderr.isatty() else (lambda text: None)
    return load(
        options.model,
        context=options.context,
        cache_dtype=options.cache_type,
        activations=options.activations,
        memory_limit=options.memory,
        speculate=options.speculate,
        progress=show,
        **more,
    )


def _params(options: argparse.Namespace, **more: Any) -> SamplingParams:
    from whit.llm.sampling import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
        **more,
    )


def run_chat(options: argparse.Namespace) -> int:
    """`whit chat`: a conversation, or one question."""
    params = _params(options)
    loaded = _loaded(options)
    with loaded.engine:
        talk = Talk(loaded, params, options.system, options.stats)
        if options.prompt is not None:
            talk.ask(sys.stdin.read() if options.prompt == "-" else options.prompt)
            return 0
        if sys.stdin.isatty():
            print(
                f"{loaded.name}. /help lists commands; Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr
            )
        for line in _lines(sys.stdin.isatty()):
            if line.strip() in ("/quit", "/exit"):
                break
            if line.strip():
                talk.take(line)
    return 0


def _lines(terminal: bool) -> Iterator[str]:
    """Lines that a person types, with editing and history; a line that ends with \\ goes on in the next."""
    if not terminal:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() its editing)
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input(". ")
            yield line
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:  # throws the line away
            print(file=sys.stderr)


COMMANDS = """/reset          begin again
/system TEXT    begin again with these instructions
/again          answer the last question once more
/save FILE      write the conversation as JSON
/stats          tell the speed of answers, or no longer
/quit           end"""


class Talk:
    """A conversation on the terminal."""

    def __init__(self, loaded: Loaded, params: SamplingParams, system: str | None, stats: bool) -> None:
        self.loaded, self.params, self.stats = loaded, params, stats
        self.messages: list[dict[str, Any]] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget everything but the instructions."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def take(self, line: str) -> None:
        """A line: a command, or a question. Errors are told and end nothing."""
        word, _, rest = line.strip().partition(" ")
        try:
            if not word.startswith("/"):
                self.ask(line)
            elif not self.command(word, rest.strip()):
                print(COMMANDS, file=sys.stderr)
        except WhitError as error:
            _fail(error.asked, error.because, error.fix)
        except OSError as error:
            _fail(line.strip(), str(error), "name another file")

    def command(self, word: str, rest: str) -> bool:
        """Do what a command says; False if there is none of that name."""
        if word == "/reset":
            self.begin(self.system)
        elif word == "/system":
            self.begin(rest or None)
        elif word == "/again":
            asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
            if asked:
                text = self.messages[asked[-1]]["content"]
                del self.messages[asked[-1] :]
                self.ask(text)
        elif word == "/save":
            Path(rest).expanduser().write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        elif word == "/stats":
            self.stats = not self.stats
        else:
            return False
        return True

    def ask(self, text: str) -> None:
        """Ask, and print the answer while it comes. Ctrl-C stops it; what was said stays said."""
        self.messages.append({"role": "user", "content": text})
        try:
            request = self.loaded.engine.submit(self.loaded.prompt(self.messages), self.params)
        except WhitError:
            self.messages.pop()
            raise
        said = []
        try:
            for event in request:
                said.append(event.text)
                _write(event.text)
        except KeyboardInterrupt:
            request.cancel()
            said += [event.text for event in request]
        print()
        self.messages.append({"role": "assistant", "content": "".join(said)})
        if self.stats:
            _tell(self.loaded)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(loaded: Loaded) -> None:
    stats = loaded.engine.stats
    read = stats.prompt_tokens / max(stats.prefill_seconds, 1e-9)
    wrote = stats.generated_tokens / max(stats.decode_seconds, 1e-9)
    print(
        f"[{stats.prompt_tokens} tokens read at {read:.0f}/s, {stats.cached_tokens} known; "
        f"{stats.generated_tokens} written at {wrote:.1f}/s]",
        file=sys.stderr,
    )


def run_generate(options: argparse.Namespace) -> int:
    """`whit generate`: a text goes on."""
    _params(options)  # wrong numbers are told before the model is loaded
    schema = _schema(options.json_schema) if options.json_schema else None
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    loaded = _loaded(options)
    with loaded.engine:
        more = {"grammar": loaded.grammar(schema)} if schema is not None else {}
        tokens = loaded.tokenizer.encode(prompt)
        request = loaded.engine.submit(tokens, _params(options, ignore_end=options.ignore_end, **more))
        for event in request:
            _write(event.text)
        print()
        if options.stats:
            _tell(loaded)
    return 0


def _schema(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--json-schema {path}", because=str(error), fix="name a file of JSON") from None


# ---- the server --------------------------------------------------------------------------------------------


def run_serve(options: argparse.Namespace) -> int:
    """`whit serve`."""
    from whit.llm.server import Limits, listen, serve

    keys = [*options.api_key, *_keys(options.api_key_file)]
    try:
        listener = listen(options.host, options.port)
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"listen on {options.host}:{options.port}",
            because=str(error),
            fix="choose another --host or --port",
        ) from None
    with listener:
        more = _encoder(options)
        loaded = _loaded(options, slots=options.slots, max_waiting=options.max_waiting)
        if options.prefixes and Path(options.prefixes).exists():
            loaded.engine.load_prefixes(options.prefixes)
        if not options.no_warm_up:
            _warm_up(loaded)
        service = loaded.service(options.name, images=options.images, max_tokens=options.max_tokens, **more)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"whit: {service.name} at http://{shown}:{port}  (OpenAI API: http://{shown}:{port}/v1)",
            flush=True,
        )
        if not keys and not _is_local(host):
            print("whit: anyone who reaches this port may use it; --api-key asks for a key", file=sys.stderr)
        save = (lambda: loaded.engine.save_prefixes(options.prefixes)) if options.prefixes else None
        serve(
            service,
            listener,
            keys=keys,
            limits=Limits(body=options.max_body, grace=options.grace),
            cors=options.cors,
            hosts=_hosts(host, options.host, options.allow_host, bool(keys)),
            log_level=options.log_level,
            at_end=save,
        )
    return 0


def _warm_up(loaded: Loaded) -> None:
    began = time.monotonic()
    loaded.engine.warm_up()
    print(f"whit: kernels ready after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _is_local(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _hosts(address: str, named: str, more: list[str], keys: bool) -> list[str]:
    """Names that the server goes by. On this machine only, and without a key, a page of another site could
    reach it by giving its own name this address: then only these names are answered."""
    if keys or not _is_local(address) or "*" in more:
        return []
    return ["localhost", "127.0.0.1", "[::1]", named.lower(), address, *(name.lower() for name in more)]


def _keys(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--api-key-file {path}", because=str(error), fix="name a file of keys") from None
    found = [key for key in keys if key and not key.startswith("#")]
    if not found:
        raise ArgumentError(f"--api-key-file {path}", because="it has no key", fix="write one key a line")
    return found


def _encoder(options: argparse.Namespace) -> dict[str, Any]:
    if options.embeddings is None:
        return {}
    from whit.llm.embed import SentenceEncoder
    from whit.llm.hub import find_encoder

    folder = find_encoder(options.embeddings)
    name = folder.resolve().name if Path(options.embeddings).is_dir() else options.embeddings
    return {"encoder": SentenceEncoder.load(folder), "encoder_name": options.embeddings_name or name}


# ---- the others --------------------------------------------------------------------------------------------


def run_bench(options: argparse.Namespace) -> int:
    """`whit bench-llm`."""
    from whit.llm.bench import Plan, lines, measure, peer_is_there
    from whit.llm.hub import find_model

    taken = {name: value for name, value in vars(options).items() if name in Plan.__dataclass_fields__}
    plan = Plan(**taken | {"model": str(find_model(options.model))})
    python = options.peer_python or sys.executable
    found = peer_is_there(python)
    if not found and (options.peer or options.peer_python):
        raise ArgumentError(
            f"measure llama.cpp with {python}",
            because="it has no llama_cpp",
            fix="pip install llama-cpp-python there, or name another Python by --peer-python",
        )
    show = (lambda text: print(text, file=sys.stderr)) if sys.stderr.isatty() else (lambda text: None)
    report = measure(plan, python if found else None, show)
    if options.json:
        print(json.dumps(report))
        return 0
    for line in lines(report):
        print(line)
    return 0


def run_quantize(options: argparse.Namespace) -> int:
    """`whit quantize`."""
    from whit.llm.quantize import quantize

    def progress(name: str, number: int, count: int) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{number + 1} of {count}: {name}", end="", file=sys.stderr, flush=True)

    before, after = quantize(options.source, options.target, options.type, progress=progress)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(f"{options.target}: {human_bytes(after)}, from {human_bytes(before)}")
    return 0


def run_tokenize(options: argparse.Namespace) -> int:
    """`whit tokenize`."""
    from whit.llm.hub import find_model
    from whit.llm.tokenizer import Tokenizer
    from whit.nn.gguf import open_gguf

    text = sys.stdin.read() if options.text == "-" else options.text
    tokenizer = Tokenizer.from_gguf(open_gguf(find_model(options.model)))
    if options.decode:
        print(tokenizer.decode(_numbers(text), special=True))
        return 0
    tokens = tokenizer.encode(text, bos=False if options.no_bos else None)
    if options.ids:
        print(*tokens)
        return 0
    for token in tokens:
        print(f"{token:>8}  {tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r}")
    print(f"{len(tokens)} tokens")
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ArgumentError(
            f"--decode {text[:60]!r}", because="it takes token numbers", fix="write numbers and blanks"
        ) from None


def run_inspect(options: argparse.Namespace) -> int:
    """`whit inspect`."""
    is_safetensors = str(options.file).endswith(".safetensors")
    about = _inspect_safetensors(options.file) if is_safetensors else _inspect_gguf(options.file)
    if options.json:
        print(json.dumps(about, ensure_ascii=False, indent=1))
        return 0
    for key, value in about["metadata"].items():
        print(f"{key:<44} {_short(value)}")
    sizes: dict[str, list[int]] = {}
    for tensor in about["tensors"]:
        sizes.setdefault(tensor["type"], []).append(tensor["bytes"])
        if options.tensors:
            print(f"{tensor['name']:<44} {tensor['type']:<8} {tensor['shape']}")
    for kind, each in sorted(sizes.items(), key=lambda entry: -sum(entry[1])):
        print(f"{len(each):>5} tensors {kind:<10} {human_bytes(sum(each)):>12}")
    total = sum(map(sum, sizes.values()))
    print(f"{len(about['tensors']):>5} tensors {'in all':<10} {human_bytes(total):>12}")
    return 0


def _inspect_gguf(name: str) -> dict[str, Any]:
    from whit.llm.hub import find_model
    from whit.nn.gguf import open_gguf

    gguf = open_gguf(find_model(name))
    tensors = [
        {"name": t.name, "type": t.type.name, "shape": list(t.shape), "bytes": t.nbytes, "offset": t.offset}
        for t in gguf.tensors.values()
    ]
    return {"metadata": {key: _plain(value) for key, value in gguf.metadata.items()}, "tensors": tensors}


def _inspect_safetensors(path: str) -> dict[str, Any]:
    from whit.nn.state import safe_load, safe_load_metadata

    tensors = [
        {"name": name, "type": str(t.dtype), "shape": list(t.shape), "bytes": t.dtype.itemsize * t.numel()}
        for name, t in safe_load(path).items()
    ]
    return {"metadata": dict(safe_load_metadata(path)), "tensors": tensors}


def _plain(value: Any, most: int = 8) -> Any:
    """A value that JSON can hold; of long arrays the beginning, and how long they are."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    items: Iterable[Any] = value[:most]
    shown = [_plain(item) for item in items]
    return shown if len(value) <= most else {"length": len(value), "first": shown}


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{_short(value['first'])[:-1]}, … ({value['length']})]"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:80]}… ({len(text)} characters)"


if __name__ == "__main__":
    sys.exit(main())

"""A model from its name to something that answers: file, tokenizer, chat template, engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whit.helpers import ArgumentError
from whit.llm.chat import ChatTemplate
from whit.llm.engine import Engine
from whit.llm.hub import find_model
from whit.llm.model import Model
from whit.llm.tokenizer import Decoder, Tokenizer
from whit.llm.tools import OutputParser, format_of

if TYPE_CHECKING:
    from whit.llm.api.service import Parser, Piece, Service
    from whit.llm.grammar import Grammars

CONTEXT = 8192  # positions that a slot gets unless told otherwise: what a model was trained for may not fit


class ShownTokenizer:
    """A tokenizer whose streams show the control tokens that a parser of the output needs to see."""

    def __init__(self, tokenizer: Tokenizer, markers: frozenset[str]) -> None:
        self.tokenizer, self.markers = tokenizer, markers

    @property
    def end_ids(self) -> frozenset[int]:
        return self.tokenizer.end_ids

    def stream(self) -> Decoder:
        """A decoder."""
        return self.tokenizer.stream(keep=self.markers)


@dataclass
class Loaded:
    """A model that is ready, with what belongs to it."""

    path: Path
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    engine: Engine

    @property
    def name(self) -> str:
        """What to call it: the file's name without its end."""
        return self.path.name.removesuffix(".gguf")

    @property
    def format(self) -> str:
        """How it writes calls of tools and reasoning."""
        return format_of(self.template)

    @property
    def bos(self) -> int | None:
        """The token that prompts begin with."""
        return self.tokenizer.bos_id if self.tokenizer.vocabulary.add_bos else None

    @cached_property
    def grammars(self) -> Grammars:
        """Makes grammars for this vocabulary."""
        from whit.llm.grammar import Grammars

        return Grammars(self.tokenizer, self.model.vocab_size)

    def grammar(self, schema: Any) -> Any:
        """The grammar of a JSON schema; True stands for any object. ArgumentError."""
        return self.grammars.json_object() if schema is True else self.grammars.json_schema(schema)

    def prompt(self, messages: list[dict[str, Any]], **extra: Any) -> list[int]:
        """The tokens of a conversation. ArgumentError if the template refuses it."""
        tokens = self.tokenizer.encode(self.template.render(messages, **extra), special=True, bos=False)
        return tokens if self.bos is None or tokens[:1] == [self.bos] else [self.bos, *tokens]

    def parser(self, tools: list[dict[str, Any]], thinking: bool) -> Parser:
        """A parser of one answer."""
        return Pieces(OutputParser(self.format, tools=tools, thinking=thinking))

    def service(self, name: str | None = None, **options: Any) -> Service:
        """The model as a server needs it; `options` are those of `Service`."""
        from whit.llm.api.service import Service

        return Service(
            self.engine,
            self.tokenizer,
            name=name or self.name,
            created=int(self.path.stat().st_mtime),
            template=self.template,
            parser=self.parser,
            bos=self.bos,
            grammar=self.grammar,
            **options,
        )


class Pieces:
    """An `OutputParser` that speaks of pieces, as the endpoints do."""

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser

    def push(self, text: str) -> list[Piece]:
        """What is certain after some more text."""
        return self._pieces(self.parser.push(text))

    def finish(self) -> list[Piece]:
        """The rest."""
        return self._pieces(self.parser.finish())

    def _pieces(self, deltas: list[Any]) -> list[Piece]:
        from whit.llm.api.service import Piece

        pieces: list[Piece] = []
        for delta in deltas:
            if delta.reasoning_content:
                pieces.append(Piece("reasoning", delta.reasoning_content))
            if delta.content:
                pieces.append(Piece("content", delta.content))
            if (call := delta.tool_call) is not None:
                pieces.append(Piece("call", call.arguments, call.name, call.id))
        return pieces


def load(
    name: str | Path,
    *,
    context: int | None = None,
    slots: int = 1,
    cache_dtype: str = "float16",
    activations: str = "float32",
    memory_limit: int | None = None,
    speculate: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Loaded:
    """Find, open and start a model. The caller closes the engine.

    name: as `whit.llm.hub.find_model` takes it. context: positions of a slot (default: what the model was
    trained for, 8192 at most). cache_dtype, activations: as Model.load has them. speculate: "ngram", or the
    name of a smaller model. options: those of `Engine`.
    Errors: what find_model, Model.load, Tokenizer and Engine raise
    """
    path = find_model(name)
    progress(f"loading {path.name}")
    model = Model.load(path, cache_dtype=cache_dtype, activations=activations)
    tokenizer = Tokenizer.from_gguf(model.gguf)
    if tokenizer.vocab_size > model.vocab_size:
        raise ArgumentError(
            f"load {path}",
            because=f"its vocabulary has {tokenizer.vocab_size} tokens, and its weights {model.vocab_size}",
            fix="convert the model again",
        )
    template = ChatTemplate.from_gguf(model.gguf, tokenizer)
    shown = ShownTokenizer(tokenizer, OutputParser(format_of(template)).markers)
    draft: Model | str | None = speculate
    if speculate not in (None, "ngram"):
        draft = Model.load(find_model(str(speculate)), cache_dtype=cache_dtype, activations=activations)
    engine = Engine(
        model,
        shown,
        slots=slots,
        context=min(model.context, CONTEXT) if context is None else context,
        memory_limit=memory_limit,
        speculate=draft,
        **options,
    )
    return Loaded(path, model, tokenizer, template, engine)


def describe(metadata: Mapping[str, Any]) -> str:
    """A line about a model from its metadata.

    >>> describe({"general.name": "Tiny", "general.architecture": "llama", "llama.block_count": 2})
    'Tiny (llama, 2 blocks)'
    """
    kind = str(metadata.get("general.architecture", "?"))
    blocks = metadata.get(f"{kind}.block_count")
    return f"{metadata.get('general.name', 'a model')} ({kind}{f', {blocks} blocks' if blocks else ''})"

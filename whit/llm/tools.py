"""A model's output taken apart while it streams: content, reasoning and calls of tools.

    parser = OutputParser(format_of(template), tools=tools)
    for piece in stream: deltas += parser.push(piece)
    deltas += parser.finish()

Any way of cutting the text gives the same result. Text leaves as soon as no mark can begin in it; a call
leaves when it is whole. What looks like a call and is none is content, with its tags.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whit.helpers import ArgumentError
from whit.llm.calls import (
    Call,
    JsonEnd,
    Reader,
    brace_calls,
    code_call,
    deepseek_calls,
    json_calls,
    json_lines,
    make,
    mistral_calls,
    python_calls,
    schemas_of,
    tagged_calls,
    xml_calls,
)
from whit.llm.chat import ChatTemplate

Kind = Literal["content", "reasoning"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON text."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What came next: some content, some reasoning, or a call."""

    content: str = ""
    reasoning_content: str = ""
    tool_call: ToolCall | None = None


@dataclass(frozen=True)
class Block:
    """A stretch between two marks. close "": it lasts to the end of the output. json: it ends where the
    JSON value does that is its body (after a name, perhaps)."""

    open: str
    close: str
    reader: Reader | None = None  # None: reasoning
    json: bool = False
    known: bool = False  # the calls count only if the tools have their names
    keep: bool = False  # the opening mark belongs to the body


@dataclass(frozen=True)
class Format:
    """How a family of models marks calls and reasoning. bare: JSON at the very beginning may be a call."""

    name: str
    blocks: tuple[Block, ...] = ()
    bare: bool = False
    harmony: bool = False


_THINK = (Block("<think>", "</think>"),)
_TAGS = Block("<tool_call>", "</tool_call>", tagged_calls)
_XML = Block("<function=", "</function>", xml_calls, keep=True)

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("none", _THINK),
        Format("hermes", (*_THINK, _TAGS)),
        Format("function_xml", (*_THINK, _TAGS, _XML)),
        Format("llama3", (*_THINK, Block("<|python_tag|>", "", code_call), _XML), bare=True),
        Format("mistral", (
            *_THINK, Block("[THINK]", "[/THINK]"), Block("[TOOL_CALLS]", "", mistral_calls, json=True),
        )),
        Format("gemma", (
            *_THINK, Block("<|channel>thought\n", "<channel|>"),
            Block("<|tool_call>", "<tool_call|>", brace_calls),
            Block("<start_function_call>", "<end_function_call>", brace_calls),
            Block("```tool_code\n", "```", python_calls),
            Block("```tool_call\n", "```", json_lines), Block("```json\n", "```", json_calls, known=True),
        ), bare=True),
        Format("deepseek", (
            *_THINK, Block("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", deepseek_calls),
        )),
        Format("harmony", harmony=True),
    )
}  # fmt: skip

# what a template shows of its family; the first row that fits
_TELLING = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<|tool_call>",), "gemma"),
    (("<start_function_call>",), "gemma"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁calls▁begin｜>",), "deepseek"),
    (("<function=",), "function_xml"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3"),
    (("<|start_header_id|>", "parameters"), "llama3"),
)


def format_of(source: Any) -> str:
    """The name of the format (in `FORMATS`) in which the model of a template answers.

    source: a ChatTemplate, the text of one, or an open GGUF file. Templates that know no tools are asked for
    "hermes", as `ChatTemplate.render` does.

    >>> format_of("{{ '<tool_call>' }}")
    'hermes'
    """
    metadata = getattr(source, "metadata", None)
    if metadata is not None:
        source = "".join(str(metadata.get("tokenizer.chat_template" + end, "")) for end in ("", ".tool_use"))
    elif isinstance(source, ChatTemplate):
        source = source.source + (source.tool_source or "")
    for marks, name in _TELLING:
        if all(mark in source for mark in marks):
            return name
    return "hermes"


def new_id() -> str:
    """A name for a call, of nine letters and digits after "call_"."""
    return "call_" + "".join(
        secrets.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") for _ in range(9)
    )


class OutputParser:
    """Takes the text of one answer apart.

    format: a name in `FORMATS`. tools: the tools of the request; without any, nothing is a call.
    thinking: the prompt has opened a reasoning block already (`whit.llm.chat.thinking_open`).
    reasoning: False leaves reasoning blocks in the content.

    Show the control tokens in `markers` when decoding, `tokenizer.stream(keep=parser.markers)`: calls are
    made of them. Errors: ArgumentError for an unknown format.
    """

    def __init__(
        self,
        format: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        reasoning: bool = True,
        ids: Callable[[], str] = new_id,
    ) -> None:
        if format not in FORMATS:
            raise ArgumentError(f"format {str(format)[:40]!r}", because="there is none of that name",
                                fix="use one of " + ", ".join(FORMATS))  # fmt: skip
        self.format = FORMATS[format]
        self._schemas = schemas_of(tools)
        self._blocks = [b for b in self.format.blocks if (reasoning if b.reader is None else bool(tools))]
        self._out = _Out(ids, reasoning)
        self._machine: _Machine = (
            _Harmony(self._out, bool(tools)) if self.format.harmony
            else _Tagged(self._blocks, self._out, self._schemas, thinking, self.format.bare and bool(tools))
        )  # fmt: skip

    @property
    def markers(self) -> frozenset[str]:
        """Texts of control tokens that the parser needs to see."""
        if self.format.harmony:
            return frozenset(_HARMONY)
        marks = {mark.strip() for block in self.format.blocks for mark in (block.open, block.close) if mark}
        return frozenset(marks | {"[ARGS]", "[CALL_ID]", '<|"|>', "<escape>", "<|channel>", "<｜tool▁sep｜>",
                                  "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"})  # fmt: skip

    @property
    def called(self) -> bool:
        """Whether there has been a call."""
        return self._out.calls > 0

    def push(self, text: str) -> list[Delta]:
        """Take further text; give what is certain now."""
        self._machine.push(text)
        return self._out.take()

    def finish(self) -> list[Delta]:
        """The end of the output: give the rest."""
        self._machine.finish()
        self._out.finish()
        return self._out.take()


class _Out:
    """Collects deltas. White space around calls and reasoning is not content."""

    def __init__(self, ids: Callable[[], str], reasoning: bool) -> None:
        self.ids, self.reasoning, self.calls = ids, reasoning, 0
        self.deltas: list[Delta] = []
        self.space = {"content": "", "reasoning": ""}  # seen, and not known yet to have text behind it
        self.fresh = {"content": False, "reasoning": True}  # white space at the beginning is to be left out

    def text(self, kind: Kind, text: str) -> None:
        """Some text. Blanks at its end wait for what comes."""
        if self.fresh[kind]:
            text = text.lstrip()
        if not text:
            return
        self.fresh[kind] = False
        text = self.space[kind] + text
        body = text.rstrip()
        self.space[kind] = text[len(body) :]
        if body:
            self.deltas.append(Delta(content=body) if kind == "content" else Delta(reasoning_content=body))

    def mark(self) -> None:
        """A reasoning block or a call begins or ends here."""
        self.space = {"content": "", "reasoning": ""}
        self.fresh = {"content": True, "reasoning": True}

    def call(self, call: Call) -> None:
        """A whole call."""
        self.mark()
        self.deltas.append(Delta(tool_call=ToolCall(self.calls, self.ids(), call.name, call.arguments)))
        self.calls += 1

    def finish(self) -> None:
        """White space at the end of content stays."""
        if self.space["content"]:
            self.deltas.append(Delta(content=self.space["content"]))
        self.mark()

    def take(self) -> list[Delta]:
        """What has come since."""
        found, self.deltas = self.deltas, []
        return found


class _Machine:
    """Reads text that comes in pieces."""

    def push(self, text: str) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


def first_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str]:
    """The first mark in a text and its place, of several at one place the longest; (n, "") if there is none
    and text up to n is free of them, however it goes on."""
    best, found = len(text), ""
    for mark in marks:
        at = text.find(mark, start, best + len(mark))
        if at >= 0 and (at < best or (at == best and len(mark) > len(found))):
            best, found = at, mark
    for mark in marks:  # one that has only begun, in front of what was found or longer at the same place
        for size in range(min(len(mark) - 1, len(text) - start), 0, -1):
            at = len(text) - size
            if at > best or (at == best and found and not mark.startswith(found)):
                break
            if text.endswith(mark[:size]):
                best, found = at, ""
                break
    return best, found


class _Tagged(_Machine):
    """Formats in which marks open and close blocks."""

    def __init__(
        self,
        blocks: list[Block],
        out: _Out,
        schemas: Mapping[str, Mapping[str, Any]],
        thinking: bool,
        bare: bool,
    ) -> None:
        self.blocks, self.out, self.schemas = blocks, out, schemas
        self.buffer = ""
        self.seen = 0  # of the buffer, in a block: where to look for its end
        self.block = next((b for b in blocks if b.reader is None), None) if thinking else None
        self.reopened = self.block is not None
        self.json: JsonEnd | None = None
        self.bare = bare and self.block is None  # nothing but white space has come yet

    def push(self, text: str) -> None:
        self.buffer += text
        while self.step():
            pass

    def step(self) -> bool:
        """Go on by one mark; False if more text is needed."""
        if self.bare:
            return self.step_bare()
        if self.block is None:
            return self.step_text()
        if self.block.reader is None:
            return self.step_reasoning(self.block)
        return self.step_call(self.block)

    def step_text(self) -> bool:
        at, mark = first_mark(self.buffer, [block.open for block in self.blocks])
        self.out.text("content", self.buffer[:at])
        self.buffer = self.buffer[at:]
        if not mark:
            return False
        self.block = next(block for block in self.blocks if block.open == mark)
        self.seen, self.json = len(mark), None
        if self.block.reader is None:
            self.out.mark()
            self.buffer = self.buffer[len(mark) :]
        return True

    def step_reasoning(self, block: Block) -> bool:
        if self.reopened:  # the prompt has opened the block, and the model may do so again
            rest = self.buffer.lstrip()
            if len(rest) < len(block.open) and block.open.startswith(rest):
                return False
            self.buffer, self.reopened = rest.removeprefix(block.open), False
        at, mark = first_mark(self.buffer, [block.close])
        self.out.text("reasoning", self.buffer[:at])
        self.buffer = self.buffer[at + len(mark) :]
        if not mark:
            return False
        self.out.mark()
        self.block = None
        return True

    def step_call(self, block: Block) -> bool:
        """Look for the block's end, then read it."""
        if not block.close and not block.json:
            return False
        end, size = (
            self.json_end(block)
            if block.json
            else (self.buffer.find(block.close, self.seen), len(block.close))
        )
        if end < 0:
            self.seen = (
                max(self.seen, len(self.buffer) - len(block.close) + 1) if not block.json else self.seen
            )
            return False
        if not self.read(block, end, size):
            if not block.json and _quoted(self.body(block, end)):
                self.seen = end + size  # the mark stands in a text of the arguments
                return True
            self.reject(end + size)
        return True

    def json_end(self, block: Block) -> tuple[int, int]:
        start = next((n for n in range(len(block.open), len(self.buffer)) if self.buffer[n] == "{"), -1)
        square = self.buffer.find("[", len(block.open))
        if square >= 0 and not self.buffer[len(block.open) : square].strip():
            start = square
        if start < 0:
            return -1, 0
        self.json = self.json or JsonEnd()
        end = self.json.find(self.buffer[start:])
        return (start + end, 0) if end >= 0 else (-1, 0)

    def body(self, block: Block, end: int) -> str:
        return (block.open if block.keep else "") + self.buffer[len(block.open) : end]

    def read(self, block: Block, end: int, size: int) -> bool:
        """Read the calls of a whole block and leave it; False if it has none."""
        assert block.reader is not None, "a block of calls has a reader"
        calls = block.reader(self.body(block, end), self.schemas)
        if calls is None or (block.known and any(call.name not in self.schemas for call in calls)):
            return False
        for call in calls:
            self.out.call(call)
        self.buffer, self.block = self.buffer[end + size :], None
        return True

    def reject(self, end: int) -> None:
        """The block is content."""
        self.out.text("content", self.buffer[:end])
        self.buffer, self.block = self.buffer[end:], None

    def step_bare(self) -> bool:
        """At the very beginning: JSON of a call without any mark, or something else."""
        # between calls there may be more than blanks
        start = len(self.buffer) - len(self.buffer.lstrip(" \t\r\n;," if self.out.calls else None))
        if start == len(self.buffer):
            return False
        if self.buffer[start] not in "{[":
            self.bare = False
            return True
        self.json = self.json or JsonEnd()
        end = self.json.find(self.buffer[start:])
        if end < 0:
            return False
        self.read_bare(start, start + end)
        return True

    def read_bare(self, start: int, end: int) -> None:
        calls = json_calls(self.buffer[start:end], self.schemas) or python_calls(
            self.buffer[start:end], self.schemas
        )
        self.json = None
        if calls is None or any(call.name not in self.schemas for call in calls):
            self.bare = False
            return
        for call in calls:
            self.out.call(call)
        self.buffer = self.buffer[end:]

    def finish(self) -> None:
        """Blocks that were never closed are read as far as they came."""
        if self.block is not None and self.block.reader is not None:
            if not self.read(self.block, len(self.buffer), 0):
                self.again()
        elif self.block is None:
            self.out.text("content", self.buffer)
            self.buffer = ""
        else:
            self.out.text("reasoning", self.buffer)
            self.buffer = ""

    def again(self) -> None:
        """An open block that is no call: its mark is content, and what follows is read anew."""
        assert self.block is not None, "a block is open"
        size = len(self.block.open)
        self.out.text("content", self.buffer[:size])
        rest, self.buffer, self.block = self.buffer[size:], "", None
        self.push(rest)
        self.finish()


def _quoted(body: str) -> bool:
    """Whether JSON ends inside of a text, so that a closing mark there is none."""
    scan = JsonEnd()
    start = body.find("{")
    return start >= 0 and scan.find(body[start:]) < 0 and scan.quoted


# ---- harmony -----------------------------------------------------------------------------------------------

_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


@dataclass
class _Harmony(_Machine):
    """gpt-oss: messages with a header (channel, recipient) and a body.

    `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json <|message|>{…}<|call|>`
    """

    out: _Out
    tools: bool
    buffer: str = ""
    raw: str = ""  # of a call: everything since its header began
    header: str = ""
    place: Literal["start", "header", "body"] = "start"
    recipient: str = field(default="")
    kind: Kind = "content"

    def push(self, text: str) -> None:
        self.buffer += text
        while True:
            at, mark = first_mark(self.buffer, _HARMONY)
            self.text(self.buffer[:at])
            self.buffer = self.buffer[at + len(mark) :]
            if not mark:
                return
            self.mark(mark)

    def text(self, text: str) -> None:
        if self.place == "header":
            self.header += text
        elif self.recipient:
            self.raw += text
        elif self.place == "body":
            self.out.text(self.kind, text)
        else:  # a message without a header: plain content, as soon as none can begin
            self.header += text
            start = self.header.lstrip()
            known = any(w.startswith(start) or start.startswith(w) for w in ("assistant", "to="))
            if "\n" in start or not known:
                self.flush_start()
                self.place = "body"
                self.kind = "content"

    def flush_start(self) -> None:
        self.out.text("content", self.header)
        self.header = ""

    def mark(self, mark: str) -> None:
        if mark == "<|message|>":
            self.open_body()
        elif mark in ("<|end|>", "<|call|>", "<|return|>"):
            self.close()
        elif mark == "<|start|>":
            self.close()
            self.place = "header"
        else:
            if self.place == "body":
                self.close()
            self.place = "header"
            self.header += mark

    def open_body(self) -> None:
        words = self.header.replace("<|constrain|>", " ").replace("<|channel|>", " <|channel|>").split()
        channel = next(
            (word[len("<|channel|>") :] for word in words if word.startswith("<|channel|>")), "final"
        )
        to = next((word[len("to=") :] for word in words if word.startswith("to=")), "")
        self.recipient = to if self.tools else ""
        self.raw = self.header + "<|message|>" if self.recipient else ""
        self.kind = "reasoning" if channel == "analysis" and self.out.reasoning else "content"
        self.size = len(self.raw)
        self.out.mark()
        self.header, self.place = "", "body"

    def close(self) -> None:
        """The end of a message."""
        if self.recipient:
            call = make(self.recipient.removeprefix("functions."), self.raw[self.size :])
            if call is None:
                self.out.text("content", self.raw)
            else:
                self.out.call(call)
        elif self.place == "start":
            self.flush_start()
        elif self.place == "body":
            self.out.mark()
        self.recipient, self.raw, self.header, self.place = "", "", "", "start"

    size: int = 0

    def finish(self) -> None:
        self.text(self.buffer)
        self.buffer = ""
        if self.place == "header" and self.header:
            self.out.text("content", self.header)
            self.header = ""
        self.close()

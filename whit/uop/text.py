"""The text form of the IR: `show` prints any graph as readable SSA text, `parse` reads it back to the same
object.

    %0 = param float32; slot=0 size=32          # %name = op dtype operands; argument
    %1 = range index 32; uid=0 axis=LOOP        # constants stand inline: an int is an index, true a bool
    %2 = index float32 %0 %1
    %3 = mul float32 %2 0.5                     # and 0.5 a float32; others say it: 1:int32, nan:float16
    …
A program in execution order is a block, indented inside its loops:

    %0 = linear {
      %1 = param float32; slot=0 size=32
      %2 = range index 32; uid=0 axis=LOOP
        %3 = load float32 %1 %2
      …
    }
The dtype void and the argument None are left out. `#` starts a comment. The last line is the root.
"""
from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from whit.helpers import DTypeError, IRError
from whit.uop.args import (
    BufferArg,
    CallArg,
    LocalArg,
    ParamArg,
    RangeArg,
    ReduceArg,
    ScanArg,
    SpecialArg,
    StageArg,
    VarArg,
)
from whit.uop.dtype import DType, dtype_of_name, dtypes
from whit.uop.ops import AxisType, Op, Ops, all_ops
from whit.uop.uop import UOp, arg_fields, show_shape

C = TypeVar("C", bound=type)

# ---- classes that may stand in arguments -------------------------------------------------------------------

_ARG_CLASSES: dict[str, type] = {}  # NamedTuples, dataclasses and enums by name
_ARG_OF_OP: dict[Op, type] = {}  # the class whose fields stand bare after the semicolon
_MAX_NESTING = 50


def arg_class(*ops: Op) -> Callable[[C], C]:
    """Class decorator: makes a frozen dataclass or an enum printable and parsable inside arguments. For the
    ops named here the fields stand bare (`uid=0 axis=LOOP`), elsewhere as `Name(field=value)`.

    >>> from typing import NamedTuple
    >>> @arg_class()
    ... class Tag(NamedTuple):
    ...     text: str
    >>> show(UOp(Ops.SINK, arg=Tag("a b")))
    '%0 = sink; Tag(text="a b")'
    """
    def register(cls: C) -> C:
        _ARG_CLASSES[cls.__name__] = cls
        for op in ops:
            _ARG_OF_OP[op] = cls
        return cls
    return register


for _op, _cls in ((Ops.BUFFER, BufferArg), (Ops.PARAM, ParamArg), (Ops.VAR, VarArg), (Ops.RANGE, RangeArg),
                  (Ops.REDUCE, ReduceArg), (Ops.STAGE, StageArg), (Ops.SPECIAL, SpecialArg),
                  (Ops.LOCAL, LocalArg), (Ops.SCAN, ScanArg)):
    arg_class(_op)(_cls)
arg_class()(AxisType)
arg_class()(CallArg)

# ---- printing ----------------------------------------------------------------------------------------------


def show(root: UOp) -> str:
    """The graph below `root` as text, one line a node, sources first. Names depend on the graph only.

    >>> from whit.uop import UOp, dtypes
    >>> print(show(UOp.variable("n", 1, 8) * 4 + 1))
    %0 = var index; name="n" min=1 max=8
    %1 = mul index %0 4
    %2 = add index %1 1
    """
    return _Printer().run(root)


class _Printer:
    def __init__(self) -> None:
        self.names: dict[UOp, str] = {}
        self.lines: list[str] = []

    def run(self, root: UOp) -> str:
        order = _order(root)
        if root.op is Ops.LINEAR and _is_block(root, order):
            members = frozenset(root.src)
            for node in order[:-1]:
                if node not in members and not _is_inline(node):
                    self.lines.append(self.define(node))
            self.block(root)
        else:
            for node in order:
                if node is root or not _is_inline(node):
                    self.lines.append(self.define(node))
        return "\n".join(self.lines)

    def block(self, root: UOp) -> None:
        """A LINEAR with its instructions indented inside."""
        name = f"%{len(self.names)}"
        self.names[root] = name
        self.lines.append(f"{name} = linear{_dtype_text(root)}{self.argument(root)} {{")
        depth = 1
        for node in root.src:
            if node.op is Ops.ENDIF or (node.op is Ops.END and node.src and node.src[0].op is Ops.RANGE):
                depth = max(1, depth - 1)
            known = node in self.names or _is_inline(node)
            self.lines.append("  " * depth + (self.operand(node) if known else self.define(node)))
            if node.op in (Ops.RANGE, Ops.IF):
                depth += 1
        self.lines.append("}")

    def define(self, node: UOp) -> str:
        """The line that gives a node its name."""
        parts = [node.op.name.lower() + _dtype_text(node), *[self.operand(source) for source in node.src]]
        name = self.names[node] = f"%{len(self.names)}"
        shaped = node.shape and node.op not in (Ops.BUFFER, Ops.PARAM)
        comment = f"  # {show_shape(node.shape)}" if shaped else ""
        return f"{name} = {' '.join(parts)}{self.argument(node)}{comment}"

    def operand(self, node: UOp) -> str:
        if node in self.names:
            return self.names[node]
        arg = node.arg
        return self.value(arg) + ("" if node.dtype is _IMPLIED.get(type(arg)) else f":{node.dtype.name}")

    def argument(self, node: UOp) -> str:
        arg = node.arg
        if arg is None:
            return ""
        if type(arg) is _ARG_OF_OP.get(node.op):
            return "; " + " ".join(self.fields(arg))
        return "; " + self.value(arg)

    def fields(self, arg: Any) -> list[str]:
        """name=value of each field of a dataclass; an enum's member stands bare where typed so."""
        result = []
        for name, kind in arg_fields(type(arg)).items():
            value = getattr(arg, name)
            bare = isinstance(value, enum.Enum) and kind == type(value).__name__
            result.append(f"{name}={value.name if bare else self.value(value)}")
        return result

    def value(self, value: Any) -> str:
        if value is None:
            return "none"
        if value is True or value is False:
            return str(value).lower()
        if isinstance(value, UOp):
            return self.names[value] if value in self.names else f"const({self.operand(value)})"
        if isinstance(value, Op):
            return value.name.lower()
        if isinstance(value, DType):
            return f"dtypes.{value.name}"
        if isinstance(value, tuple) and type(value) is tuple:
            items = [self.value(item) for item in value]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if isinstance(value, str):
            return json.dumps(value)
        name = type(value).__name__
        if _ARG_CLASSES.get(name) is type(value):
            if isinstance(value, enum.Enum):
                return f"{name}.{value.name}"
            return f"{name}({', '.join(self.fields(value))})"
        if type(value) in (int, float):
            return repr(value)
        return f"opaque({json.dumps(repr(value))})"  # shown for people; parse refuses it


def _dtype_text(node: UOp) -> str:
    return "" if node.dtype is dtypes.void else f" {node.dtype.name}"


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _is_inline(node: UOp) -> bool:
    """Constants stand where they are used."""
    return node.op is Ops.CONST and not node.src and (
        _is_number(node.arg) or (type(node.arg) is tuple and all(_is_number(item) for item in node.arg)))


def _nodes_in(arg: Any) -> Iterator[UOp]:
    """The UOps in an argument, also inside dataclasses."""
    if isinstance(arg, UOp):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _nodes_in(item)
    elif _ARG_CLASSES.get(type(arg).__name__) is type(arg) and not isinstance(arg, enum.Enum):
        for name in arg_fields(type(arg)):
            yield from _nodes_in(getattr(arg, name))


def _order(root: UOp) -> list[UOp]:
    """All nodes below root, those inside arguments too, each after what it needs."""
    done: dict[UOp, None] = {}
    stack: list[tuple[UOp, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done[node] = None
            continue
        stack.append((node, True))
        for source in reversed([*_nodes_in(node.arg), *node.src]):
            if source not in done:
                stack.append((source, False))
    return list(done)


def _is_block(root: UOp, order: list[UOp]) -> bool:
    """Whether a LINEAR can be printed in execution order: no operand follows its user, and no node outside of
    the list needs one inside."""
    members = frozenset(root.src)

    def needed(node: UOp) -> list[UOp]:
        return [s for s in (*node.src, *_nodes_in(node.arg)) if s in members and not _is_inline(s)]

    if any(node not in members and needed(node) for node in order[:-1]):
        return False
    seen: set[UOp] = set()
    for node in root.src:
        if any(source not in seen for source in needed(node)):
            return False
        seen.add(node)
    return not any(node in members and not _is_inline(node) for node in _nodes_in(root.arg))


# ---- parsing -----------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"""\s*(?:
    (?P<comment>\#.*) | (?P<name>%[0-9A-Za-z_]+) |
    (?P<float>-?(?:\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|inf\b|nan\b)) | (?P<int>-?\d+) |
    (?P<string>"(?:[^"\\\x00-\x1f]|\\.)*") | (?P<word>[A-Za-z_][A-Za-z_0-9.]*) |
    (?P<mark>[=;:,(){}]))""",
                    re.VERBOSE | re.ASCII)
_IMPLIED = {bool: dtypes.bool, int: dtypes.index, float: dtypes.float32}  # of constants that do not say
_OPS = {op.name.lower(): op for op in all_ops()}


def parse(text: str) -> UOp:
    """The node of the text's last line; `parse(show(u)) is u`. Raises IRError with the line, the text at
    fault and what was expected there.

    >>> from whit.uop import UOp, dtypes
    >>> parse('%n = var index; name="n" min=1 max=8').vmax
    8
    """
    nodes: dict[str, UOp] = {}
    last: UOp | None = None
    block: tuple[_Line, str, DType, Any] | None = None
    members: list[UOp] = []
    for number, content in enumerate(text.split("\n"), 1):
        line = _Line(number, content, nodes)
        if not line.tokens:
            continue
        if block is not None and line.peek() == "}":
            line.take()
            line.end()
            last = block[0].build(Ops.LINEAR, block[2], tuple(members), block[3])
            nodes[block[1]] = last
            block, members = None, []
        elif block is not None and not line.defines():
            members.append(line.operand())
            line.end()
        else:
            name, opened, last = line.definition(block is None)
            if opened is not None:
                block = (line, name, *opened)
            elif last is not None:
                nodes[name] = last
                if block is not None:
                    members.append(last)
    if block is not None:
        block[0].fail("this block is not closed", "a line with }")
    if last is None:
        raise IRError("parse", because="the text holds no node",
                      fix="write at least one line, such as: %0 = const float32; 1.0")
    return last


class _Line:
    """One line as tokens (kind, text), and the grammar's productions over them."""

    def __init__(self, number: int, text: str, nodes: dict[str, UOp]) -> None:
        self.number, self.text, self.nodes = number, text, nodes
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        self.depth = 0
        position, length = 0, len(text.rstrip())
        while position < length:
            match = _TOKEN.match(text, position)
            if match is None:
                self.fail(f"cannot read {text[position:].strip()[:20]!r}",
                          "a name, an op, a number, a string or one of = ; : , ( ) { }")
            position = match.end()
            kind = match.lastgroup
            assert kind is not None, "every alternative of the token pattern is named"
            if kind != "comment":
                self.tokens.append((kind, match.group(kind)))

    def fail(self, problem: str, expected: str) -> NoReturn:
        raise IRError(f"line {self.number}: {self.text.strip()[:200]}", because=problem[:300],
                      fix=f"expected {expected}")

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else ""

    def take(self, kind: str = "", expected: str = "") -> str:
        """The next token, which must be of that kind (or be that mark)."""
        found, token = self.kind(), self.peek()
        if found == "end" or (kind and kind != found and (found != "mark" or kind != token)):
            self.fail(f"{token!r} stands here" if token else "the line ends here", expected or repr(kind))
        self.at += 1
        return token

    def end(self) -> None:
        if self.at < len(self.tokens):
            self.fail(f"{self.peek()!r} follows", "the end of the line")

    def defines(self) -> bool:
        return self.kind() == "name" and self.peek(1) == "="

    def definition(self, may_open: bool) -> tuple[str, tuple[DType, Any] | None, UOp | None]:
        """`%name = op dtype operands; argument`: its name, and the (dtype, argument) of the block that it
        opens, or its node."""
        name = self.take("name", "%name = op dtype operands; argument")
        self.take("=", "= after the name")
        if name in self.nodes:
            self.fail(f"{name} is defined twice", "a name that no earlier line uses")
        word = self.take("word", "an op in lower case")
        op = _OPS.get(word)
        if op is None:
            self.fail(f"there is no op {word!r}", "an op of the table (python -m whit.uop lists them)")
        dtype = dtypes.void
        if self.kind() == "word" and self.peek() not in ("true", "false"):
            dtype = self.dtype(self.take())
        src: list[UOp] = []
        while self.kind() != "end" and self.peek() not in (";", "{"):
            src.append(self.operand())
        arg = None
        if self.peek() == ";":
            self.take()
            cls = _ARG_OF_OP.get(op)
            bare = cls is not None and self.kind() == "word" and self.peek(1) == "="
            arg = self.fields(cls, "") if cls is not None and bare else self.value()
        if self.peek() == "{" and op is Ops.LINEAR and not src and may_open:
            self.take()
            self.end()
            return name, (dtype, arg), None
        self.end()
        return name, None, self.build(op, dtype, tuple(src), arg)

    def build(self, op: Op, dtype: DType, src: tuple[UOp, ...], arg: Any) -> UOp:
        if op.arity is not None and len(src) != op.arity:
            self.fail(f"{op.name.lower()} has {len(src)} operands", f"{op.arity}")
        try:
            return UOp(op, dtype, src, arg)
        except Exception as error:  # shape rules meet arguments of any kind here
            self.fail(f"the node cannot be made: {error}",
                      f"operands and an argument that suit {op.name.lower()}: {op.doc}")

    def dtype(self, name: str) -> DType:
        try:
            return dtype_of_name(name)
        except DTypeError:
            self.fail(f"there is no dtype {name!r}", "a dtype, such as float32 or int8x4")

    def operand(self) -> UOp:
        """A name, or a constant with its dtype."""
        if self.kind() == "name":
            return self.node()
        if self.kind() not in ("int", "float") and self.peek() not in ("true", "false", "("):
            self.take("operand", "a name such as %0, or a constant such as 1, 0.5, true, 3:int8")
        value = self.value()
        if not (_is_number(value) or (isinstance(value, tuple) and all(_is_number(item) for item in value))):
            self.fail(f"{value!r} is no constant", "a number, true, false, or a tuple of them")
        if self.peek() == ":":
            self.take()
            dtype = self.dtype(self.take("word", "a dtype after the colon"))
        elif isinstance(value, tuple):
            self.fail("a tuple needs a dtype", "one, as in (1.0, 2.0):float32x2")
        else:
            dtype = _IMPLIED[type(value)]
        return self.build(Ops.CONST, dtype, (), value)

    def node(self) -> UOp:
        name = self.take("name")
        if name not in self.nodes:
            self.fail(f"{name} is not defined above", "a name that an earlier line defines")
        return self.nodes[name]

    def fields(self, cls: type, close: str) -> Any:
        """field=value pairs of a dataclass, separated by commas when there is a closing mark."""
        types = arg_fields(cls)
        given: dict[str, Any] = {}
        while self.kind() == "word":
            name = self.take()
            if name not in types or name in given:
                self.fail(f"{cls.__name__} takes no {name!r} here", "each once: " + ", ".join(types))
            self.take("=", f"= after {name}")
            choices = _ARG_CLASSES.get(str(types[name]))
            bare = self.kind() == "word" and "." not in self.peek()
            if bare and choices is not None and issubclass(choices, enum.Enum):
                given[name] = self.member(choices, self.take())
            else:
                given[name] = self.value()
            if close:
                if self.peek() != ",":
                    break
                self.take()
        if close:
            self.take(close, "a comma or " + close)
        try:
            return cls(**given)
        except Exception as error:  # wrong or missing fields
            self.fail(f"{cls.__name__} cannot be made: {error}", "fields " + ", ".join(types))

    def member(self, choices: type[enum.Enum], name: str) -> enum.Enum:
        if name not in choices.__members__:
            self.fail(f"{choices.__name__} has no {name!r}", "one of " + ", ".join(choices.__members__))
        return choices[name]

    def value(self) -> Any:
        """Anything that an argument may hold."""
        kind, token = self.kind(), self.peek()
        if kind == "name":
            return self.node()
        if kind == "mark" and token == "(":
            return self.items()
        if kind not in ("int", "float", "string", "word"):
            self.take("value", "a value: a number, string, name, tuple, op, dtype or Class(field=value)")
        self.take()
        if kind in ("int", "float", "string"):
            try:
                return int(token) if kind == "int" else float(token) if kind == "float" else json.loads(token)
            except ValueError as error:
                self.fail(str(error), f"a valid {kind}")
        return self.word(token)

    def word(self, token: str) -> Any:
        if token in ("true", "false", "none"):
            return {"true": True, "false": False, "none": None}[token]
        if token == "const" and self.peek() == "(":  # a constant node inside an argument
            self.take()
            node = self.operand()
            self.take(")", "a closing parenthesis")
            return node
        if token in _OPS:
            return _OPS[token]
        head, _, rest = token.partition(".")
        if head == "dtypes":
            return self.dtype(rest)
        cls = _ARG_CLASSES.get(head)
        if cls is None:
            self.fail(f"{token!r} means nothing here",
                      "a value; classes known: " + ", ".join(sorted(_ARG_CLASSES)))
        if issubclass(cls, enum.Enum):
            return self.member(cls, rest)
        self.take("(", f"( after {head}")
        self.deeper()
        result = self.fields(cls, ")")
        self.depth -= 1
        return result

    def items(self) -> tuple[Any, ...]:
        self.take("(")
        self.deeper()
        result: list[Any] = []
        while self.peek() != ")":
            result.append(self.value())
            if self.peek() != ",":
                break
            self.take()
        self.take(")", "a comma or )")
        self.depth -= 1
        return tuple(result)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > _MAX_NESTING:
            self.fail("parentheses are nested too deep", f"at most {_MAX_NESTING} levels")

"""Output that follows a grammar: at each step, the tokens that may come next.

`Grammars` belongs to a tokenizer and makes a `Grammar` of a JSON schema, a regular expression, a Lark grammar
or a list of choices (parsing by `llguidance`); `SamplingParams(grammar=…)` takes it. Every request has a
`Matcher` of its own, whose mask is applied to the logits on the device.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from whit.helpers import ArgumentError, WhitError
from whit.llm.vocabulary import CONTROL, UNKNOWN

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 1 << 20  # characters of a grammar
# between the parts of JSON: without a bound, small models write spaces for ever
_JSON = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}


class GrammarError(WhitError, RuntimeError):
    """A grammar that became too complex while text was made, or a token that it does not allow."""


class Vocabulary(Protocol):
    """What grammars ask of a tokenizer."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, id: int) -> bytes: ...


class Grammars:
    """Makes grammars for a tokenizer. vocab_size: of the model's logits, if it is more than the tokenizer's.

    Its methods may be called from any thread; they raise ArgumentError for what is no valid grammar.
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.size = max(tokenizer.vocab_size, vocab_size or 0)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def json_schema(self, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that the schema accepts."""
        from llguidance import LLMatcher

        what = "a JSON schema"
        if not isinstance(schema, (Mapping, bool)):
            raise _refused(what, "a schema is an object or a boolean")
        try:
            text = json.dumps(schema, allow_nan=False)
            # a schema that asks for nothing is given as an object too
            given = text if isinstance(schema, Mapping) else "{}"
            compiled = LLMatcher.grammar_from_json_schema(given, overrides=_JSON)  # type: ignore[arg-type]
        except (ValueError, TypeError, RecursionError) as error:
            raise _refused(what, str(error)) from None
        if schema is False:
            raise _refused(what, "nothing satisfies false")
        return self._checked(compiled, what)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        from llguidance import LLMatcher

        return self._checked(LLMatcher.grammar_from_regex(pattern), "a regular expression")

    def lark(self, text: str) -> Grammar:
        """Text of a Lark grammar, whose rule is `start`."""
        from llguidance import LLMatcher

        return self._checked(LLMatcher.grammar_from_lark(text), "a Lark grammar")

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of a few texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise _refused("a choice", "it takes at least one text, and none that is empty")
        return self.lark("start: " + " | ".join(json.dumps(text) for text in texts))

    def _checked(self, text: str, what: str) -> Grammar:
        from llguidance import LLMatcher

        if len(text) > LONGEST:
            raise _refused(what, f"its text is longer than {LONGEST} characters")
        vocabulary = self._tokens()
        wrong, messages = LLMatcher.validate_grammar_with_warnings(text, vocabulary)
        if wrong:
            raise _refused(what, messages[0] if messages else "it is not valid")
        return Grammar(vocabulary, text)

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._vocabulary is None:
                ends = sorted(self.tokenizer.end_ids)
                if not ends:
                    raise _refused("a grammar", "the model has no token that ends a text")
                wrapped = TokenizerWrapper(_Tokens(self.tokenizer, self.size, ends[0]))
                self._vocabulary = LLTokenizer(wrapped, n_vocab=self.size, eos_token=ends)
            return self._vocabulary


class _Tokens:
    """The vocabulary as llguidance wants to see it."""

    def __init__(self, tokenizer: Vocabulary, size: int, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        known = min(size, tokenizer.vocab_size)
        # control tokens have a name, which a string in JSON could hold, but they are no text: never allowed
        kinds = getattr(getattr(tokenizer, "vocabulary", None), "kinds", ())
        hidden = {id for id, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)}
        self.tokens = [b"" if id in hidden else tokenizer.token_bytes(id) for id in range(known)]
        self.tokens += [b""] * (size - known)
        self.special_token_ids = sorted(tokenizer.end_ids)
        self._numbers = {text: id for id, text in reversed(list(enumerate(self.tokens))) if text}
        self._longest = max(map(len, self.tokens), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Longest matches: used for advice only, never for what is allowed."""
        ids, at = [], 0
        while at < len(text):
            for length in range(min(self._longest, len(text) - at), 0, -1):
                id = self._numbers.get(text[at : at + length])
                if id is not None:
                    ids.append(id)
                    break
            at += length
        return ids


class Grammar:
    """A checked grammar; `matcher` starts a text."""

    def __init__(self, vocabulary: LLTokenizer, text: str) -> None:
        self.vocabulary, self.text = vocabulary, text

    def matcher(self) -> Matcher:
        """A new text."""
        return Matcher(self)


class Matcher:
    """Where a text stands in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        from llguidance import LLMatcher

        self.size = grammar.vocabulary.vocab_size
        self._matcher: LLMatcher = LLMatcher(grammar.vocabulary, grammar.text, log_level=0)
        self._check()

    def mask(self) -> np.ndarray[Any, Any]:
        """Which tokens may come next: int32 words, bit t % 32 of word t // 32 belongs to token t."""
        import numpy as np

        words = np.zeros((self.size + 31) // 32, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    def accept(self, token: int) -> None:
        """A token was written. GrammarError if the mask did not have it."""
        self._matcher.consume_token(token)
        self._check()

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could follow, one after the other."""
        return int(self._matcher.validate_tokens(list(tokens)))

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                "follow the grammar",
                because=self._matcher.get_error().splitlines()[0],
                fix="use a simpler grammar",
            )


def _refused(what: str, because: str) -> ArgumentError:
    return ArgumentError(
        what, because=because.strip().splitlines()[0][:500], fix=f"correct {what.split(' ', 1)[1]}"
    )

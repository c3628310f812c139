"""Text to token ids and back, as a GGUF file says.

    Tokenizer.from_gguf(open_gguf(path)).encode("Hello world")

Special tokens are cut out first, longest first; what lies between goes to the algorithm of the vocabulary:

    "llama"          SentencePiece BPE by scores, with bytes for what has no token     whit.llm.merges
    "gpt2", "gemma4" BPE by a list of merges, on words cut by patterns                 tokenizers,
    whit.llm.pretokenize "bert"           WordPiece
    tokenizers "t5"             SentencePiece unigram
    tokenizers, whit.llm.unigram
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any

from whit.helpers import ArgumentError
from whit.llm.merges import ScoreMerger
from whit.llm.pretokenize import TRIPLES, TRIPLES_ALONE, cuts_of, pre_tokenizer, triples
from whit.llm.texts import SPACE
from whit.llm.vocabulary import BYTE, CONTROL, UNKNOWN, USER, Vocabulary, read_vocabulary, refuse

if TYPE_CHECKING:
    from whit.nn.gguf import GGUF

Encoder = Callable[[str], list[int]]


class Tokenizer:
    """A tokenizer for one vocabulary. Building one reads it; the tables for encoding are made at the first
    use. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        if vocabulary.model == "gpt2":
            cuts_of(vocabulary.pre)  # a name that is not known is refused now

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Tokenizer:
        """The tokenizer of an open GGUF file. FileFormatError if its vocabulary is missing, damaged or of an
        unknown kind."""
        return cls(read_vocabulary(gguf.metadata))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The same from metadata alone: `tokenizer.ggml.*` keys, arrays as any sequences.

        >>> words = ["<unk>", "<s>", "</s>", "▁", "h", "i", "hi", "▁hi"]
        >>> tokenizer = Tokenizer.from_metadata({
        ...     "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words,
        ...     "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -1.0, -2.0],
        ...     "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1]})
        >>> tokenizer.encode("hi hi")
        [1, 7, 7]
        >>> tokenizer.decode([1, 7, 7])
        'hi hi'
        """
        return cls(read_vocabulary(metadata))

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocabulary.model}, {self.vocab_size} tokens)"

    # ---- the vocabulary

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos

    @property
    def eos_id(self) -> int | None:
        return self.vocabulary.eos

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens at which a model's turn ends."""
        return self.vocabulary.ends

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled so in the file, None if there is none."""
        return self.vocabulary.ids.get(text)

    def token_bytes(self, number: int) -> bytes:
        """What a token stands for: the bytes of its text, of control tokens their name.

        Errors: ArgumentError for an id outside of the vocabulary.
        """
        vocabulary = self.vocabulary
        if not 0 <= number < len(vocabulary):
            raise ArgumentError(
                f"token {number}",
                because=f"the vocabulary has ids 0 to {len(vocabulary) - 1}",
                fix="use one of them",
            )
        text, kind = vocabulary.tokens[number], vocabulary.kinds[number]
        if kind in (CONTROL, UNKNOWN, USER):
            return text.encode("utf-8", "replace")
        if kind == BYTE and len(text) == 6 and text.startswith("<0x"):
            return bytes.fromhex(text[3:5])
        if self._spelled_bytes:
            return b"".join(_BYTE_OF.get(char, char.encode("utf-8", "replace")) for char in text)
        return text.replace(SPACE, " ").encode("utf-8", "replace")

    @cached_property
    def _spelled_bytes(self) -> bool:
        return self.vocabulary.model == "gpt2" and not cuts_of(self.vocabulary.pre).raw

    # ---- text to ids

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        """The ids of a text.

        special: names of control tokens in the text become these tokens; False where the text is not trusted.
        bos: None adds BOS, EOS and separators as the file wants it, but no second BOS; True adds BOS in any
        case; False adds nothing.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"encode({repr(text)[:60]})", because="it is no text", fix="pass str")
        vocabulary = self.vocabulary
        found: list[int] = []
        after_special = True
        for part in self._split(_clean(text), special):
            if isinstance(part, int):
                found.append(part)
            else:
                found += self._encoder(self._escaped(part, after_special))
            after_special = isinstance(part, int)
        if bos is False:
            return found
        wanted = vocabulary.add_bos if bos is None else True
        if wanted and vocabulary.bos is not None and not (bos is None and found[:1] == [vocabulary.bos]):
            found.insert(0, vocabulary.bos)
        if bos is None:
            if vocabulary.add_sep and vocabulary.separator is not None:
                found.append(vocabulary.separator)
            if vocabulary.add_eos and vocabulary.eos is not None:
                found.append(vocabulary.eos)
        return found

    def _escaped(self, text: str, first: bool) -> str:
        """A piece of text with its spaces as "llama" vocabularies spell them."""
        vocabulary = self.vocabulary
        if vocabulary.model != "llama":
            return text
        if vocabulary.remove_extra_whitespaces:
            text = " ".join(word for word in text.split(" ") if word)
        if vocabulary.add_space_prefix and first and text:
            text = " " + text
        return text.replace(" ", SPACE)

    def _split(self, text: str, special: bool) -> Iterable[int | str]:
        """Special tokens and the text between them."""
        return self._specials.split(text, special) if text else ()

    @cached_property
    def _specials(self) -> _Specials:
        return _Specials(self.vocabulary)

    @cached_property
    def _encoder(self) -> Encoder:
        return _ENCODERS[self.vocabulary.model](self.vocabulary)

    # ---- ids to text

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of some ids. Bytes that are no UTF-8 become U+FFFD.

        special: show control tokens by their names; else they are left out.
        """
        decoder = self.stream(special=special)
        text = "".join(decoder.push(number) for number in ids) + decoder.flush()
        vocabulary = self.vocabulary
        led = vocabulary.model == "bert" or (vocabulary.add_space_prefix and not vocabulary.space_as_suffix)
        return text.removeprefix(" ") if led else text

    def stream(self, *, special: bool = False, keep: Container[str] = ()) -> Decoder:
        """A decoder that takes ids one by one. keep: control tokens that are shown although special is
        False."""
        return Decoder(self, special, keep)


class Decoder:
    """Turns ids into text one by one. Characters whose bytes are spread over tokens come out when they are
    whole."""

    def __init__(self, tokenizer: Tokenizer, special: bool, keep: Container[str]) -> None:
        self._tokenizer, self._special, self._keep = tokenizer, special, keep
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        """The text that a further token completes, "" if it completes none."""
        vocabulary = self._tokenizer.vocabulary
        body = self._tokenizer.token_bytes(number)
        hidden = not self._special and vocabulary.kinds[number] in (CONTROL, UNKNOWN)
        if hidden and vocabulary.tokens[number] not in self._keep:
            return ""
        return self._utf8.decode(body)

    def flush(self) -> str:
        """The rest: bytes that never became a character, as U+FFFD."""
        return self._utf8.decode(b"", True)


def _clean(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates become U+FFFD, pairs of them the characters they mean."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# ---- special tokens ----------------------------------------------------------------------------------------


class _Specials:
    """Finds special tokens in text: of those that overlap, the longest wins, then the leftmost."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.right_strip = vocabulary.right_strip
        users, controls = vocabulary.of_kind(USER), vocabulary.of_kind(CONTROL, UNKNOWN)
        self.tokens = vocabulary.texts(users + controls)
        self.kinds = vocabulary.kinds
        self.groups = {False: _groups(self.tokens, users), True: _groups(self.tokens, users + controls)}

    def _occurring(self, text: str, special: bool) -> list[int]:
        """The tokens that occur in a text, longest first."""
        groups = self.groups[special]
        found = [n for prefix in groups if prefix in text for n in groups[prefix] if self.tokens[n] in text]
        return sorted(found, key=lambda n: (-len(self.tokens[n].encode()), n))

    def split(self, text: str, special: bool) -> Iterable[int | str]:
        """Ids and the text between them, in order."""
        marks: list[tuple[int, int, int]] = []
        taken = bytearray(len(text))
        for number in self._occurring(text, special):
            name = self.tokens[number]
            at = text.find(name)
            while at >= 0:
                last = taken.rfind(1, at, at + len(name))
                if last < 0:
                    taken[at : at + len(name)] = b"\1" * len(name)
                    marks.append((at, at + len(name), number))
                    at = text.find(name, at + len(name))
                else:  # no place up to the end of what is in its way is free
                    free = taken.find(0, last + 1)
                    at = text.find(name, free) if free >= 0 else -1
        done = 0
        for start, end, number in sorted(marks):
            if start > done:
                yield text[done:start]
            yield number
            done = max(done, end)
            if self.right_strip and self.kinds[number] == CONTROL and self.tokens[number] not in _KEEPS_SPACE:
                while done < len(text) and text[done] in " \t\n\v\f\r":
                    done += 1
        if done < len(text):
            yield text[done:]


_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
_PREFIX = 4  # characters by which tokens are grouped


def _groups(texts: dict[int, str], numbers: list[int]) -> dict[str, list[int]]:
    """Tokens by their beginnings: a text that lacks one is not searched for any of its group."""
    found: dict[str, list[int]] = {}
    for number in numbers:
        if texts[number]:
            found.setdefault(texts[number][:_PREFIX], []).append(number)
    return found


# ---- algorithms --------------------------------------------------------------------------------------------


def _spelling() -> dict[str, bytes]:
    """How byte-level BPE spells each byte as one visible character: Latin ones as themselves, others from
    U+0100 on in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): bytes([byte]) for byte in visible}
    return table | {chr(256 + n): bytes([byte]) for n, byte in enumerate(hidden)}


_BYTE_OF = _spelling()


def _merge_pairs(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges as pairs, without those that lead to no token."""
    ids, merges = vocabulary.ids, vocabulary.merges
    if {merge.count(" ") for merge in merges} == {1}:
        parts = " ".join(merges).split(" ")
        firsts, seconds = parts[::2], parts[1::2]
    else:  # a space may be part of a text
        cuts = [merge.find(" ", 1) for merge in merges]
        firsts = [merge[:cut] for merge, cut in zip(merges, cuts)]
        seconds = [merge[cut + 1 :] for merge, cut in zip(merges, cuts)]
    pairs = list(zip(firsts, seconds))
    if all(map(ids.__contains__, chain(firsts, seconds, map(add, firsts, seconds)))):
        return pairs
    return [(a, b) for a, b in pairs if a in ids and b in ids and a + b in ids]


def _bpe(vocabulary: Vocabulary) -> Encoder:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models

    cuts, size = cuts_of(vocabulary.pre), len(vocabulary)
    # bytes that have no token are left out, and what stood on their two sides does not merge
    absent = [] if cuts.raw else [char for char in _BYTE_OF if char not in vocabulary.ids]
    table = vocabulary.ids | {char: size + n for n, char in enumerate(absent)}
    engine = Engine(
        models.BPE(table, _merge_pairs(vocabulary), ignore_merges=cuts.whole, byte_fallback=cuts.raw)
    )
    engine.pre_tokenizer = pre_tokenizer(cuts)

    def encode(text: str) -> list[int]:
        if cuts.raw:
            text = text.replace(" ", SPACE)
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        return [number for number in ids if number < size] if absent else ids

    alone = TRIPLES_ALONE in cuts.patterns
    if not alone and TRIPLES not in cuts.patterns:
        return encode
    return lambda text: [number for piece in triples(text, alone) for number in encode(piece)]


def _by_scores(vocabulary: Vocabulary) -> Encoder:
    return ScoreMerger(vocabulary).encode


def _wordpiece(vocabulary: Vocabulary) -> Encoder:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, normalizers, pre_tokenizers

    if vocabulary.unknown is None:
        raise refuse("tokenizer.ggml.unknown_token_id", "a 'bert' vocabulary needs one")
    unknown = vocabulary.tokens[vocabulary.unknown]
    table = {"[\0]": vocabulary.unknown}
    for number, text in enumerate(vocabulary.tokens):
        if vocabulary.kinds[number] not in (CONTROL, UNKNOWN) and text != unknown:
            table[text[1:] if text.startswith(SPACE) else "##" + text] = number
    engine = Engine(models.WordPiece(table, unk_token="[\0]", max_input_chars_per_word=100))
    engine.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=vocabulary.strip_accents,
        lowercase=vocabulary.lowercase,
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(text: str) -> list[int]:
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _unigram(vocabulary: Vocabulary) -> Encoder:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models

    from whit.llm.unigram import normalizer

    assert vocabulary.scores is not None, "read_vocabulary checks that"
    if vocabulary.unknown is None:
        raise refuse("tokenizer.ggml.unknown_token_id", "a 't5' vocabulary needs one")
    pieces = []
    for number, (text, score, kind) in enumerate(
        zip(vocabulary.tokens, vocabulary.scores.tolist(), vocabulary.kinds.tolist())
    ):
        if kind in (CONTROL, UNKNOWN, BYTE) and not (kind == BYTE and vocabulary.byte_ids):
            pieces.append((f"\0{number}", 0.0))  # no text has it
        else:
            pieces.append((text, 0.0 if kind == USER else score))
    engine = Engine(models.Unigram(pieces, vocabulary.unknown, bool(vocabulary.byte_ids)))
    normalize = normalizer(vocabulary)

    def encode(text: str) -> list[int]:
        ids: list[int] = engine.encode(normalize(text), add_special_tokens=False).ids
        return ids

    return encode


_ENCODERS: dict[str, Callable[[Vocabulary], Encoder]] = {
    "llama": _by_scores, "gpt2": _bpe, "gemma4": _bpe, "bert": _wordpiece, "t5": _unigram,
}  # fmt: skip

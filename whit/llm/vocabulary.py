"""The vocabulary of a GGUF file: tokens, what kind each is, scores, merges, the special ids and the rules
that say when they are added. Everything is checked here, so that the tokenizers need not.

Keys are those of `tokenizer.ggml.*`; defaults are those that llama.cpp takes where a file says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from whit.helpers import FileFormatError
from whit.llm.texts import Texts, all_texts, find_texts, texts_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# kinds of tokens, as GGUF numbers them
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MODELS = ("llama", "gpt2", "bert", "t5", "gemma4")
MOST_TOKENS = 1 << 24

# what a model of each kind takes when its file is silent
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0, "add_bos": True, "add_space_prefix": True},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "unknown": 100, "separator": 102, "padding": 0, "add_bos": True, "add_sep": True},
    "t5": {"eos": 1, "unknown": 2, "padding": 0, "add_eos": True},
    "gemma4": {"add_bos": True},
}

# texts that end a turn in one family of models or another, whatever kind their files give them
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
# and texts that do so only where they are control tokens: others use them as words
_CONTROL_ENDS = frozenset({"</s>", "<eos>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>", "<reponame>"})
# control tokens that a reader of the output wants to see: they carry its structure
_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})


def refuse(asked: str, because: str) -> FileFormatError:
    """The error for a vocabulary that cannot be used."""
    return FileFormatError(asked, because=because, fix="convert the model again, or use another file")


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer is made of. `tokens[id]` is the text as the file spells it.

    kinds: one of NORMAL … BYTE a token. scores: for "llama" and "t5", else None. merges: "a b" texts for
    "gpt2".
    """

    model: str
    tokens: Sequence[str]
    kinds: NDArray[np.int32]
    scores: NDArray[np.float32] | None = None
    merges: list[str] = field(default_factory=list)
    pre: str = "default"
    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    separator: int | None = None
    padding: int | None = None
    ends: frozenset[int] = frozenset()
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    add_space_prefix: bool = False
    space_as_suffix: bool = False
    remove_extra_whitespaces: bool = False
    lowercase: bool = True
    strip_accents: bool = True
    charsmap: bytes = b""
    right_strip: bool = False  # white space after a control token belongs to it (Phi-3)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """From text to id; of equal texts, the last."""
        return dict(zip(self.tokens, range(len(self.tokens))))

    def of_kind(self, *kinds: int) -> list[int]:
        """The ids of all tokens of some kinds."""
        import numpy as np

        found: list[int] = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return found

    def texts(self, numbers: list[int]) -> dict[int, str]:
        """The texts of some tokens."""
        tokens = self.tokens
        texts = tokens.many(numbers) if isinstance(tokens, Texts) else [tokens[number] for number in numbers]
        return dict(zip(numbers, texts))

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """The tokens <0x00> … <0xFF> by their byte."""
        found = {}
        for number, text in self.texts(self.of_kind(BYTE)).items():
            if len(text) == 6 and text.startswith("<0x") and text[3:5].isalnum():
                found[int(text[3:5], 16)] = number
        return found

    def text(self, number: int | None) -> str:
        """The text of a token, "" for None: what templates know it by."""
        return "" if number is None else self.tokens[number]


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that a file's metadata describes.

    Errors: FileFormatError for one that is missing, damaged, or of a kind that whit does not know.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in MODELS:
        raise refuse(f"tokenizer.ggml.model = {str(model)[:60]!r}", f"whit knows {', '.join(MODELS)}")
    # a merger by scores looks at few tokens; the other models need a table of all
    tokens = _texts(metadata, "tokens")
    tokens = tokens if model == "llama" else all_texts(tokens)
    if not 1 <= len(tokens) <= MOST_TOKENS:
        raise refuse("tokenizer.ggml.tokens", f"it has {len(tokens)} entries")
    pre = str(metadata.get("tokenizer.ggml.pre", "default")) if model == "gpt2" else model
    merges = all_texts(_texts(metadata, "merges")) if model in ("gpt2", "gemma4") else []
    known = find_texts(tokens, _ENDS | _CONTROL_ENDS | _SHOWN)
    kinds = _kinds(metadata, known, len(tokens))
    numbers = {name: _special(metadata, name, model, len(tokens)) for name in _IDS}
    lower = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    return Vocabulary(
        model=model, tokens=tokens, kinds=kinds, scores=_scores(metadata, model, len(tokens)),
        merges=merges, pre=pre,
        bos=numbers["bos"], eos=numbers["eos"], unknown=numbers["unknown"],
        separator=numbers["separator"], padding=numbers["padding"],
        ends=_ends(known, kinds, (numbers["eos"], numbers["eot"], numbers["eom"])),
        add_bos=_add_bos(metadata, model, pre), add_eos=_flag(metadata, "add_eos_token", "add_eos", model),
        add_sep=_flag(metadata, "add_sep_token", "add_sep", model),
        add_space_prefix=_flag(metadata, "add_space_prefix", "add_space_prefix", model),
        space_as_suffix=bool(metadata.get("tokenizer.ggml.treat_whitespace_as_suffix", False)),
        remove_extra_whitespaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        lowercase=lower, strip_accents=bool(metadata.get("tokenizer.ggml.normalizer.strip_accents", lower)),
        charsmap=_charsmap(metadata),
        right_strip=any(name in str(metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3")),
    )  # fmt: skip


_IDS = {
    "bos": ("bos_token_id",), "eos": ("eos_token_id",), "eot": ("eot_token_id",), "eom": ("eom_token_id",),
    "unknown": ("unknown_token_id",), "separator": ("seperator_token_id", "separator_token_id"),
    "padding": ("padding_token_id",),
}  # fmt: skip


def _special(metadata: Mapping[str, Any], name: str, model: str, count: int) -> int | None:
    """The id of a special token. One outside of the vocabulary is as good as none."""
    for key in _IDS[name]:
        value = metadata.get("tokenizer.ggml." + key)
        if isinstance(value, int) and 0 <= value < count:
            return value
    default = _DEFAULTS[model].get(name)
    return default if isinstance(default, int) and default < count else None


def _flag(metadata: Mapping[str, Any], key: str, name: str, model: str) -> bool:
    return bool(metadata.get("tokenizer.ggml." + key, _DEFAULTS[model].get(name, False)))


def _add_bos(metadata: Mapping[str, Any], model: str, pre: str) -> bool:
    from whit.llm.pretokenize import BOS_FIRST

    default = _DEFAULTS[model].get("add_bos", pre in BOS_FIRST)
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default)) or model == "gemma4"


def _array(metadata: Mapping[str, Any], name: str) -> Sequence[Any] | None:
    value = metadata.get("tokenizer.ggml." + name)
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise refuse(f"tokenizer.ggml.{name}", f"it is no array but {type(value).__name__}")
    return value


def _texts(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    found = _array(metadata, name)
    if found is None:
        raise refuse(f"tokenizer.ggml.{name}", "the file does not have it")
    if getattr(found, "kind", "string") != "string" or (len(found) and not isinstance(found[0], str)):
        raise refuse(f"tokenizer.ggml.{name}", "its elements are no texts")
    return texts_of(found)


def _numbers(metadata: Mapping[str, Any], name: str, count: int, dtype: str) -> NDArray[Any] | None:
    import numpy as np

    found = _array(metadata, name)
    if found is None:
        return None
    kind = getattr(found, "kind", "")
    if kind in ("string", "array") or (len(found) and not isinstance(found[0], (int, float))):
        raise refuse(f"tokenizer.ggml.{name}", "its elements are no numbers")
    if len(found) < count:
        raise refuse(f"tokenizer.ggml.{name}", f"it has {len(found)} entries for {count} tokens")
    values = found.numpy() if hasattr(found, "numpy") else np.array(found)
    return np.asarray(values[:count]).astype(dtype)


def _kinds(metadata: Mapping[str, Any], known: dict[str, int], count: int) -> NDArray[np.int32]:
    """The kinds of all tokens, put right where files are known to be wrong."""
    import numpy as np

    found = _numbers(metadata, "token_type", count, "int32")
    kinds = np.full(count, NORMAL, np.int32) if found is None else found
    for text, number in known.items():
        if text in _ENDS and kinds[number] in (NORMAL, USER):
            kinds[number] = CONTROL
        elif text in _SHOWN:
            kinds[number] = USER
    return kinds


def _ends(known: dict[str, int], kinds: NDArray[np.int32], given: tuple[int | None, ...]) -> frozenset[int]:
    """The ids at which generation ends: those that the file names and those known by their text."""
    texts = {
        text for text in known if text in _ENDS or (text in _CONTROL_ENDS and kinds[known[text]] == CONTROL)
    }
    if "<|end|>" in texts and texts & {"<|call|>", "<|calls|>"} and texts & {"<|return|>", "<|flush|>"}:
        texts.discard("<|end|>")  # it ends a message there, and another one may follow
    if "</s>" in texts and "<|tool_response>" in texts:
        texts.discard("</s>")
    return frozenset({known[text] for text in texts} | {number for number in given if number is not None})


def _scores(metadata: Mapping[str, Any], model: str, count: int) -> NDArray[np.float32] | None:
    import numpy as np

    found = _numbers(metadata, "scores", count, "float32")
    if model not in ("llama", "t5"):
        return None
    if found is None:
        raise refuse("tokenizer.ggml.scores", f"a {model!r} vocabulary needs them")
    if np.isnan(found).any():
        raise refuse("tokenizer.ggml.scores", "some are no numbers")
    return found


def _charsmap(metadata: Mapping[str, Any]) -> bytes:
    found = _array(metadata, "precompiled_charsmap")
    if found is None or not len(found):
        return b""
    if getattr(found, "kind", "u8") not in ("u8", "i8"):
        raise refuse("tokenizer.ggml.precompiled_charsmap", "it is no array of bytes")
    return bytes(found.data) if hasattr(found, "data") else bytes(number & 255 for number in found)

"""How byte-level BPE vocabularies cut text into words before merging: one row for each name that
`tokenizer.ggml.pre` may have.

A row is a sequence of cuts. Each cut takes the pieces that the one before left, and makes pieces of what its
pattern matches and of what lies between the matches. Patterns are in Oniguruma's syntax, as `tokenizers`
reads them; those of tokenizers that their authors published are those, elsewhere what models were converted
with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whit.helpers import FileFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

# ---- parts of patterns -------------------------------------------------------------------------------------

_SUFFIX = "'s|'t|'re|'ve|'m|'ll|'d"  # of English words
_ANY_CASE = f"(?i:{_SUFFIX})"
_SPACE = r"\s+(?!\S)|\s+"  # a run gives its last character to the word that follows
_LINES = r"\s*[\r\n]+|" + _SPACE
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _gpt(
    digits: str, word: str = _WORD, marks: str = _MARKS, suffix: str = _ANY_CASE + "|", rest: str = _LINES
) -> str:
    """The family of GPT-4's pattern: suffixes, words, digits, marks, white space."""
    return f"{suffix}{word}|{digits}|{marks}|{rest}"


def _cased(digits: str, suffix: str = f"{_ANY_CASE}?", marks: str = _MARKS_SLASH, but: str = "") -> str:
    """The family of GPT-4o's: words begin with capitals or are capitals. `but`: what letters shall not be."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{digits}|{marks}|{_LINES}"


GPT2 = rf"{_SUFFIX}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACE}"
LLAMA3 = _gpt(r"\p{N}{1,3}")
QWEN2 = _gpt(r"\p{N}")
GPT4O = _cased(r"\p{N}{1,3}")
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_WORDS3 = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK3 = rf"{_WORDS3}[\r\n]*|{_LINES}"
_SPARK = rf"{_WORDS3}|[\r\n]|{_SPACE}"
_WIDE = r"[一-龥ࠀ-一가-퟿]+"
_ALPHABETS = (  # DeepSeek's list of the letters that have case
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIA = "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_LINE_RUNS = r"[^\n]+|[\n]+"

# digits in groups of three counted from the last, which no pattern finds in linear time
TRIPLES = "TRIPLES"
TRIPLES_ALONE = "TRIPLES_ALONE"  # only where no letter follows them


@dataclass(frozen=True)
class Cuts:
    """The cuts of one family. raw: words are UTF-8 with "▁" for spaces instead of bytes spelled as letters.
    whole: a word that is a token is taken as it is, whatever the merges would make of it."""

    patterns: tuple[str, ...]
    whole: bool = False
    raw: bool = False


# family: (names, cuts)
_TABLE: tuple[tuple[str, Cuts], ...] = (
    ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
     "jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling", Cuts((GPT2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", Cuts((r"\p{N}", GPT2))),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     Cuts((LLAMA3,), whole=True)),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Cuts((LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", Cuts((QWEN2,))),
    ("qwen35",
     Cuts((_gpt(r"\p{N}", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),))),
    ("ufakzeka", Cuts((_gpt(r"\p{N}", suffix=""),))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", Cuts((GPT4O,))),
    ("tekken", Cuts((_cased(r"\p{N}", suffix=""),), whole=True)),
    ("tiny_aya cohere2moe", Cuts((TRIPLES_ALONE, GPT4O))),
    ("kimi-k2", Cuts((r"[\p{Han}]+|" + _cased(r"\p{N}{1,3}", marks=_MARKS, but=r"&&[^\p{Han}]"),))),
    ("deepseek-llm",
     Cuts((r"[\r\n]", rf"\s?[{_ALPHABETS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _WIDE, r"\p{N}+"))),
    ("deepseek-coder", Cuts((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Cuts((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    ("spark2_5", Cuts((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}"))),
    ("youtu",
     Cuts((r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK, _cased(r"\p{N}")), whole=True)),
    ("afmoe", Cuts((TRIPLES, r"\p{N}{1,3}", _ASIA, _DEEPSEEK3))),
    ("falcon", Cuts((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", Cuts((r" ?[^(\s|.,!?…。，、।۔،)]+",))),
    ("viking", Cuts((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))),
    ("jais-2", Cuts((_gpt(r"\p{N}{1,3}", rest=r"\s*[\r\n]+|" + _SPACES),))),
    ("chameleon",
     Cuts((r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
           r"[\p{P}!-/:-@\[-`{-~]", GPT2))),
    ("superbpe", Cuts((r"\p{N}+", TRIPLES))),
    ("bailingmoe bailingmoe2 llada-moe",
     Cuts((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|{_SPACE}",))),
    ("seed-coder", Cuts((_gpt(r"\p{N}", marks=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    ("laguna", Cuts((_LINE_RUNS, QWEN2))),
    ("exaone-moe",
     Cuts((rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
           rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACE}",))),
    ("minicpm5", Cuts((r"\p{N}{1,3}", _gpt(r"\p{N}+")), whole=True)),
    ("gemma4 granite-embed-multi-311m sarvam-moe", Cuts((_LINE_RUNS,), raw=True)),
    ("default", Cuts((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)  # fmt: skip

CUTS = {name: cuts for names, cuts in _TABLE for name in names.split()}
CUTS["granite-embed-multi-97m"] = Cuts((GPT4O,), whole=True)

# names whose models begin with BOS where the file does not say
BOS_FIRST = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "jina-v5-nano", "tekken", "chameleon"}
)  # fmt: skip


def cuts_of(pre: str) -> Cuts:
    """The cuts for a name. FileFormatError for one that whit does not know: any guess would give a model
    other tokens than it was trained on."""
    found = CUTS.get(pre)
    if found is None:
        raise FileFormatError(
            f"tokenizer.ggml.pre = {pre[:60]!r}",
            because="whit does not know how this tokenizer cuts words",
            fix=f"use a model with one of: {', '.join(sorted(CUTS))}",
        )
    return found


def pre_tokenizer(cuts: Cuts) -> Any:
    """The cuts as `tokenizers` wants them; `triples` has to be applied before, if they ask for it."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in cuts.patterns
        if not pattern.startswith(TRIPLES)
    ]
    if not cuts.raw:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


_DIGITS = re.compile(r"\d+")


def triples(text: str, alone: bool = False) -> Iterator[str]:
    """Cut at runs of digits, and these into groups of three counted from the last. alone: leave those that
    letters follow.

    >>> list(triples("in 1234567 days"))
    ['in ', '1', '234', '567', ' days']
    """
    done = 0
    for run in _DIGITS.finditer(text):
        start, end = run.span()
        if alone and text[end : end + 1].replace("_", "a").isalnum():
            continue
        if start > done:
            yield text[done:start]
        first = start + ((end - start) % 3 or 3)
        yield text[start:first]
        yield from (text[at : at + 3] for at in range(first, end, 3))
        done = end
    if done < len(text):
        yield text[done:]

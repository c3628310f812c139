"""10,000 texts on which tokenizers are compared: random Unicode, code, white space, emoji, special tokens."""

from __future__ import annotations

import random

CODE = [
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) {\n\t\ts += a[i];\n}\n",
    "SELECT * FROM t WHERE a='b';",
    '<html><body class="x">&amp;</body></html>',
    "let x: Vec<u8> = vec![0xFF, 0b1010];",
    "if (a && b || !c) return;",
    "https://example.org/a?b=c&d=%20#e",
    'print(f"{x:>10.3f}")',
    "\\alpha_{i}^{2} + \\frac{1}{2}",
    "foo_bar.baz->qux()",
    "#include <stdio.h>\r\n",
    '{"key": [1, 2.5e-3, null, true]}',
    "x = y ?? z;\n\n\n    // done",
    "I'll don't we've HE'S 'tis",
]
WORDS = [
    "the",
    " of",
    " Hello",
    "World",
    " naïve",
    "café",
    " 3.14159",
    " 1234567",
    "über",
    " Straße",
    "данные",
    " привет",
    " 日本語",
    "中文字符",
    "한국어",
    " العربية",
    "עברית",
    " ไทย",
    "हिन्दी",
    " ελληνικά",
    "Việt",
    " İstanbul",
    "ǅ",
    "ﬁ",
    "①",
    "½",
    "²",
    "x́",
]
SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\t\t",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
    "\u2028",
    "\x0b",
    "\x85",
    " " * 17,
    "\n" * 5,
    " " * 40,
    "\n" * 40,
]
EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "❤️", "☃", "🫠", "™", "♻", "1️⃣", "🧑🏿‍🚀"]
MARKS = [
    "!",
    "...",
    "?!",
    "--",
    "'s",
    "'",
    '"',
    "(",
    ")]",
    "$",
    "€",
    "+=",
    "=>",
    "<",
    ">",
    "<=",
    "@",
    "#",
    "%",
    "^",
    "&",
    "*",
    "`",
    "~",
    "|",
    "\\",
    "/",
    "。",
    "，",
    "！",
    "“",
    "”",
    "—",
    "…",
    "·",
    "▁",
    "▁▁",
    "Ġ",
    "<0x41>",
    "</s>",
    "<s>",
    "<unk>",
    "[UNK]",
]


def _random(rng: random.Random) -> str:
    low, high = rng.choice(
        [
            (0x20, 0x7E),
            (0x80, 0x24F),
            (0x250, 0x1FFF),
            (0x2000, 0x2BFF),
            (0x3000, 0x9FFF),
            (0xAC00, 0xD7A3),
            (0xE000, 0xFFFD),
            (0x10000, 0x1FFFF),
            (0x20000, 0x2FA1F),
            (0, 0x1F),
            (0, 0x10FFFF),
        ]
    )
    chars = [rng.randint(low, high) for _ in range(rng.randint(1, 12))]
    return "".join(chr(c) for c in chars if c and not 0xD800 <= c < 0xE000)


def texts(count: int = 10_000, seed: int = 20261130) -> list[str]:
    """The first `count` of them; none holds a NUL, at which C would end it."""
    rng = random.Random(seed)
    parts = (CODE, WORDS, WORDS, SPACES, EMOJI, MARKS, None, None)
    found = []
    for _ in range(count):
        only = rng.choice((parts, parts, [rng.choice(parts)]))
        chosen = [rng.choice(only) for _ in range(rng.randint(1, 14))]
        found.append("".join(_random(rng) if kind is None else rng.choice(kind) for kind in chosen))
    return found

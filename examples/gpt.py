"""Train a character-level GPT on a text and let it write.

    python examples/gpt.py                             # Python's own reference manual
    python examples/gpt.py --text my.txt --steps 2000 --layers 6 --dim 384

Architecture: pre-norm transformer (Radford et al. 2019), learned positions, tied embedding.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from tqdm import tqdm

from whit import Tensor, TinyJit, nn
from whit.helpers import Context
from whit.nn.optim import AdamW
from whit.nn.state import get_parameters


class Block:
    """Attention and a feed-forward network, each on normalised input and added to the residual. (B, T, C) ->
    (B, T, C)."""

    def __init__(self, dim: int, heads: int) -> None:
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def __call__(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        split = (
            self.qkv(self.norm1(x))
            .reshape(batch, time, 3, self.heads, dim // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = split[0], split[1], split[2]  # (B, H, T, C/H)
        mixed = q.scaled_dot_product_attention(k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return x + self.down(self.up(self.norm2(x)).gelu())


class GPT:
    """Tokens (B, T) -> logits (B, T, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, dim: int, heads: int, layers: int) -> None:
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.tokens.weight = (Tensor.randn(vocabulary, dim) * 0.02).realize()
        self.positions.weight = (Tensor.randn(context, dim) * 0.02).realize()
        self.blocks = [Block(dim, heads) for _ in range(layers)]
        self.norm = nn.LayerNorm(dim)

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(Tensor.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def read_text(path: str | None) -> str:
    """The text of --text, or the reference manual that comes with Python (half a megabyte of prose)."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    text = read_text(args.text)
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    data = [number[letter] for letter in text]
    print(f"{len(data)} characters, {len(letters)} different")
    Tensor.manual_seed(args.seed)
    model = GPT(len(letters), args.context, args.dim, args.heads, args.layers)
    optimizer = AdamW(get_parameters(model), lr=args.lr)
    corpus = Tensor(data).realize()
    draw = random.Random(args.seed)

    @TinyJit
    def step(starts: Tensor) -> Tensor:
        optimizer.zero_grad()
        window = corpus[starts.reshape(-1, 1) + Tensor.arange(args.context + 1).reshape(1, -1)]  # (B, T + 1)
        loss = model(window[:, :-1]).sparse_categorical_crossentropy(window[:, 1:]).backward()
        optimizer.step()
        return loss

    begin = time.perf_counter()
    with Context(TRAINING=1), tqdm(total=args.steps, unit="step", disable=None) as bar:
        for count in range(args.steps):
            loss = step(Tensor([draw.randrange(len(data) - args.context - 1) for _ in range(args.batch)]))
            bar.update()
            if count % 20 == 0 or count == args.steps - 1:
                value = float(loss.item())
                bar.set_postfix(loss=f"{value:.3f}")
    print(f"loss {value:.3f} after {args.steps} steps in {time.perf_counter() - begin:.1f} s")
    print(write(model, letters, args))


def write(model: GPT, letters: list[str], args: argparse.Namespace) -> str:
    """Sample characters one by one; the context slides along."""

    @TinyJit
    def choose(window: Tensor, last: Tensor) -> Tensor:
        logits = model(window)[0, last] / args.temperature  # (vocabulary,)
        return (logits - (-(Tensor.rand(len(letters)) + 1e-9).log()).log()).argmax()  # Gumbel's trick

    tokens = [letters.index("\n") if "\n" in letters else 0]
    for _ in range(args.sample):
        window = tokens[-args.context :]
        padded = window + [0] * (args.context - len(window))
        tokens.append(int(choose(Tensor([padded]), Tensor(len(window) - 1)).item()))
    return "".join(letters[t] for t in tokens)


if __name__ == "__main__":
    main()

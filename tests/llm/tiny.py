"""A tiny random model in a file, and a tokenizer whose tokens are bytes: what the engine's tests run on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from whit.llm.model import Model
from whit.nn.gguf import write_gguf

END = 256
VOCAB = 260


def tiny_file(seed: int = 0, *, context: int = 512, layers: int = 2) -> Path:
    """A llama of 32 numbers a token, written to a temporary folder."""
    rng = np.random.default_rng(seed)
    dim, heads, kv_heads, size, hidden = 32, 4, 2, 8, 48
    shapes = {"token_embd.weight": (VOCAB, dim), "output.weight": (VOCAB, dim), "output_norm.weight": (dim,)}
    for n in range(layers):
        shapes |= {
            f"blk.{n}.attn_norm.weight": (dim,),
            f"blk.{n}.attn_q.weight": (heads * size, dim),
            f"blk.{n}.attn_k.weight": (kv_heads * size, dim),
            f"blk.{n}.attn_v.weight": (kv_heads * size, dim),
            f"blk.{n}.attn_output.weight": (dim, heads * size),
            f"blk.{n}.ffn_norm.weight": (dim,),
            f"blk.{n}.ffn_gate.weight": (hidden, dim),
            f"blk.{n}.ffn_up.weight": (hidden, dim),
            f"blk.{n}.ffn_down.weight": (dim, hidden),
        }
    tensors = {
        name: (np.ones(shape) if "norm" in name else rng.standard_normal(shape) * 0.3).astype(np.float32)
        for name, shape in shapes.items()
    }
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": context,
        "llama.embedding_length": dim,
        "llama.feed_forward_length": hidden,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": size,
        "llama.vocab_size": VOCAB,
    }
    path = Path(mkdtemp()) / "tiny.gguf"
    write_gguf(path, metadata, tensors)
    return path


@cache
def tiny_model(seed: int = 0) -> Model:
    return Model.load(tiny_file(seed))


class ByteDecoder:
    """Bytes to text, whole characters at a time."""

    def __init__(self) -> None:
        self.held = b""

    def push(self, id: int) -> str:
        self.held += ByteTokenizer().token_bytes(id)
        for size in range(len(self.held), max(len(self.held) - 4, -1), -1):
            try:
                text = self.held[:size].decode()
            except UnicodeDecodeError:
                continue
            self.held = self.held[size:]
            return text
        return self.flush()

    def flush(self) -> str:
        text, self.held = self.held.decode(errors="replace"), b""
        return text


class ByteTokenizer:
    """Token n is byte n; END ends a text."""

    end_ids = frozenset([END])
    vocab_size = VOCAB

    def stream(self) -> ByteDecoder:
        return ByteDecoder()

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

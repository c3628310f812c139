"""Every row of the table: what is measured, against whom, and the figure to reach."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.timing import PATIENCE


@dataclass(frozen=True)
class Goal:
    """`peers`: compared with the best of them ("limit" is the machine's own). `time` False: whit is to be at
    least `value` times as fast; True: to take at most `value` times as long (or as much). No peers: `value`
    is the greatest figure itself."""

    peers: tuple[str, ...]
    value: float
    time: bool = False


@dataclass(frozen=True)
class Row:
    """`work`: a function of bench.kernels, models or algorithms with `arguments`, raced in a worker process;
    else `program`: one of bench.programs, or `code`: a line whose process is timed as a whole (less a bare
    interpreter's life if `less_bare`). `cache` "cold": the disk caches are empty. `unit`: s or bytes.
    `patience`: seconds that one contender of a race may use."""

    name: str
    goals: tuple[Goal, ...]
    work: str = ""
    arguments: tuple[int | str | bool, ...] = ()
    program: str = ""
    code: str = ""
    cache: str = "warm"
    less_bare: bool = False
    rounds: int = 15
    patience: float = PATIENCE
    group: str = ""
    unit: str = "s"


FIRST = "from {0} import Tensor; assert (Tensor([1, 2, 3]) + 1).tolist() == [2, 3, 4]"
ARRAYS = ("numpy", "torch", "jax")
FUSERS = ("torch", "torch.compile", "jax")
LARGE = (Goal(ARRAYS, 1.0), Goal(("limit",), 0.75))
NEAR = (Goal(ARRAYS, 0.9),)
STREAM = (Goal(FUSERS, 1.0), Goal(("limit",), 0.9))
SQUARE = (4096, 4096)


def product(m: int, k: int, n: int, goals: tuple[Goal, ...], layout: str = "nn") -> Row:
    size = str(m) if m == k == n else f"{m}x{k}x{n}"
    suffix = {"nn": "", "nt": " nt", "tn": " tn"}[layout]
    return Row(f"matmul {size}{suffix}", goals, "matmul", (m, k, n, layout), group="products")


PRODUCTS = [
    *[product(n, n, n, LARGE, layout) for n in (512, 1024, 2048) for layout in ("nn", "nt", "tn")],
    *[product(n, n, n, NEAR) for n in (509, 1021)],
    product(8, 4096, 4096, NEAR),
    product(64, 576, 1536, NEAR),
    Row(
        "matmul 1024 float16", (Goal(("torch",), 1.5),), "matmul_narrow", (1024, "float16"), group="products"
    ),
    Row(
        "matmul 1024 bfloat16",
        (Goal(("torch",), 1.5),),
        "matmul_narrow",
        (1024, "bfloat16"),
        group="products",
    ),
    Row("matmul 1024 int8", (Goal(("torch",), 1.5),), "matmul_int8", (1024,), group="products"),
    Row("matrix x vector 4096", (Goal(("limit",), 0.95),), "matvec", (4096,), group="products"),
]
TORCH = (Goal(("torch",), 1.0),)
CONVOLUTIONS = [
    Row("conv 3x3 64->64 at 56, batch 8", TORCH, "conv", (8, 64, 56, 64, 3), group="conv"),
    Row("conv 7x7 stride 2 3->64 at 224, batch 8", TORCH, "conv", (8, 3, 224, 64, 7, 2), group="conv"),
    Row("conv depthwise 3x3 128 at 56, batch 8", TORCH, "conv", (8, 128, 56, 128, 3, 1, 128), group="conv"),
    Row("conv 1x1 64->256 at 56, batch 8", TORCH, "conv", (8, 64, 56, 256, 1), group="conv"),
]
STREAMS = [
    Row("elementwise chain 16M", STREAM, "chain", SQUARE, group="memory"),
    Row("sum 16M", STREAM, "total", SQUARE, group="memory"),
    Row("softmax 4096x4096", STREAM, "softmax", SQUARE, group="memory"),
    Row("layer norm 4096x4096", STREAM, "layer_norm", SQUARE, group="memory"),
    Row("RMS norm 4096x4096", STREAM, "rms_norm", SQUARE, group="memory"),
]
ATTENTION = [
    Row(
        "attention causal 8x1024x64", (Goal(("torch",), 1.2),), "attention", (8, 1024, 64), group="attention"
    ),
    Row(
        "attention causal 8x1024x64, gradients too",
        (Goal(("torch",), 1.2),),
        "attention",
        (8, 1024, 64, True),
        group="attention",
    ),
]
MODEL = (Goal(("torch",), 1.2), Goal(("torch.compile",), 1.0))
MODELS = [
    Row("ResNet-18 inference, batch 1", MODEL, "resnet18", (1,)),
    Row("ResNet-18 inference, batch 8", MODEL, "resnet18", (8,)),
    Row("MNIST training step, batch 128", MODEL, "mnist_step", (128,)),
    Row("MNIST training step, batch 512", MODEL, "mnist_step", (512,)),
    Row("GPT training step, 8x256", MODEL, "gpt_step"),
]


def within(value: float, *peers: str) -> tuple[Goal, ...]:
    return tuple(Goal((peer,), value, time=True) for peer in peers)


START = [
    Row("import, over bare Python", within(0.2, "tinygrad"), code="import {0}", less_bare=True, rounds=9),
    Row("first result, cold cache", within(0.3, "tinygrad"), code=FIRST, cache="cold", rounds=5),
    Row("first result, warm cache", within(0.15, "tinygrad"), code=FIRST, rounds=7),
    Row("un-jitted small op", within(0.15, "tinygrad"), program="small_op", rounds=3),
    Row(
        "TinyJit replay per tiny kernel",
        (Goal(("torch",), 0.3, time=True), Goal((), 1e-6, time=True)),
        program="replay",
        rounds=3,
    ),
]
COMPILE = [
    Row(
        "transformer block, schedule + compile, cold", within(0.2, "tinygrad"), program="block", cache="cold"
    ),
    Row("transformer block, schedule + compile, warm", within(0.05, "tinygrad"), program="block"),
    Row("ResNet-18, schedule + compile, cold", within(0.15, "tinygrad"), program="resnet", cache="cold"),
    Row("ResNet-18, schedule + compile, warm", within(0.02, "tinygrad"), program="resnet"),
    Row(
        "GPT training step, first step, cold",
        within(0.25, "tinygrad") + within(0.5, "torch.compile"),
        program="gpt_first",
        cache="cold",
    ),
    Row("GPT training step, peak memory", within(1.0, "torch"), program="gpt_memory", unit="bytes"),
]
COLD = (Goal((), 2.0, time=True),)
ALGORITHMS = [
    Row("sort 100,000 float32", within(5.0, "numpy"), "ordered", (100_000,)),
    Row("topk(8) of 151,936", within(3.0, "torch"), "greatest", (151_936, 8)),
    Row("cumsum 1,000,000", within(3.0, "numpy"), "running_sum", (1_000_000,)),
    Row("gradient of 4,096 of 50,000 rows", within(3.0, "torch"), "embedding_gradient", (50_000, 64, 4096)),
    Row("svd 64x64", within(10.0, "numpy"), "singular", (64,)),
    Row("LSTM forward and backward, 100 steps", within(2.0, "torch"), "recurrent", (100, 32, 128, 256)),
    Row("sort 100,000 float32, first, cold", COLD, program="sort_first", cache="cold", rounds=1),
    Row("topk(8) of 151,936, first, cold", COLD, program="topk_first", cache="cold", rounds=1),
    Row("LSTM, first step, cold", COLD, program="lstm_first", cache="cold", rounds=1),
]
ROWS = [
    *PRODUCTS,
    *CONVOLUTIONS,
    *STREAMS,
    *ATTENTION,
    *[replace(row, group="models", patience=6.0) for row in MODELS],
    *[replace(row, group="algorithms") for row in ALGORITHMS],
    *[replace(row, group="start") for row in START],
    *[replace(row, group="compile", rounds=1) for row in COMPILE],
]


def matching(words: list[str]) -> list[Row]:
    """The rows whose name or group contains one of the words; all without words.

    >>> [row.name for row in matching(["int8"])]
    ['matmul 1024 int8']
    """
    return [row for row in ROWS if not words or any(word in row.name or word == row.group for word in words)]

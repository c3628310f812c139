"""The models, once for frameworks that look like tinygrad (whit and tinygrad itself) and once for torch, with
equal names of the parameters; and the work of the model rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.kernels import Work, replayed
from bench.peers import compiled, load

STAGES = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))  # channels in, out, stride of ResNet-18
VOCABULARY, CONTEXT, DIM, HEADS, LAYERS, BATCH = 65, 256, 384, 6, 6, 8


# ---- for whit and tinygrad ---------------------------------------------------------------------------------


class Residual:
    """Two 3x3 convolutions and the input added (He et al. 2015), by the layers of `nn`."""

    def __init__(self, nn: Any, inside: int, outside: int, stride: int) -> None:
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm(outside), nn.BatchNorm(outside)
        self.downsample: list[Any] = []
        if stride > 1:
            self.downsample = [
                nn.Conv2d(inside, outside, 1, stride=stride, bias=False),
                nn.BatchNorm(outside),
            ]

    def __call__(self, x: Any) -> Any:
        skip = x.sequential(self.downsample)
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + skip).relu()


class ResNet18:
    """Images (N, 3, 224, 224) -> logits (N, 1000)."""

    def __init__(self, nn: Any) -> None:
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm(64)
        self.blocks = [
            Residual(nn, *sizes)
            for inside, outside, stride in STAGES
            for sizes in ((inside, outside, stride), (outside, outside, 1))
        ]
        self.fc = nn.Linear(512, 1000)

    def __call__(self, x: Any) -> Any:
        x = self.bn1(self.conv1(x)).relu().max_pool2d((3, 3), stride=2, padding=1)
        return self.fc(x.sequential(self.blocks).mean((2, 3)))


class MnistNet:
    """The network of examples/mnist.py. Images (N, 1, 28, 28) -> logits (N, 10)."""

    def __init__(self, nn: Any) -> None:
        self.conv1, self.conv2, self.bn1 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 32, 5), nn.BatchNorm(32)
        self.conv3, self.conv4, self.bn2 = nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3), nn.BatchNorm(64)
        self.fc = nn.Linear(576, 10)

    def __call__(self, x: Any) -> Any:
        x = self.bn1(self.conv2(self.conv1(x).relu()).relu()).max_pool2d()
        return self.fc(self.bn2(self.conv4(self.conv3(x).relu()).relu()).max_pool2d().flatten(1))


class Block:
    """A pre-norm transformer block. (B, T, C) -> (B, T, C)."""

    def __init__(self, nn: Any, dim: int, heads: int) -> None:
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def __call__(self, x: Any) -> Any:
        batch, time, dim = x.shape
        split = (
            self.qkv(self.norm1(x))
            .reshape(batch, time, 3, self.heads, dim // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = split[0].scaled_dot_product_attention(split[1], split[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return x + self.down(self.up(self.norm2(x)).gelu())


class GPT:
    """The model of examples/gpt.py. Tokens (B, T) -> logits (B, T, vocabulary)."""

    def __init__(self, module: Any, nn: Any) -> None:
        self.tensor = module.Tensor
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = [Block(nn, DIM, HEADS) for _ in range(LAYERS)]
        self.norm = nn.LayerNorm(DIM)

    def __call__(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.positions(self.tensor.arange(tokens.shape[1]))
        return self.norm(x.sequential(self.blocks)) @ self.tokens.weight.transpose(0, 1)


def training_step(who: str, model: Any, optimizer: str, **options: Any) -> Callable[[Any, Any], Any]:
    """A jitted step (inputs, labels) -> loss of whit or tinygrad."""
    module = load(who)
    parameters = importlib.import_module(f"{who}.nn.state").get_parameters(model)
    rule = getattr(importlib.import_module(f"{who}.nn.optim"), optimizer)(parameters, **options)

    def step(x: Any, y: Any) -> Any:
        rule.zero_grad()
        loss = model(x).sparse_categorical_crossentropy(y).backward()
        rule.step()
        return loss.realize()

    jitted = module.TinyJit(step)
    context = importlib.import_module(f"{who}.helpers").Context

    def call(x: Any, y: Any) -> Any:
        with context(TRAINING=1):
            return jitted(x, y)

    return call


# ---- for torch ---------------------------------------------------------------------------------------------


def torch_resnet18() -> Any:
    torch = load("torch")
    nn = torch.nn

    class TorchResidual(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
            self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
            layers = []
            if stride > 1:
                layers = [
                    nn.Conv2d(inside, outside, 1, stride=stride, bias=False),
                    nn.BatchNorm2d(outside),
                ]
            self.downsample = nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.bn1(self.conv1(x)))
            return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))

    class TorchResNet(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)
            self.pool = nn.MaxPool2d(3, stride=2, padding=1)
            self.blocks = nn.Sequential(
                *[
                    TorchResidual(*sizes)
                    for inside, outside, stride in STAGES
                    for sizes in ((inside, outside, stride), (outside, outside, 1))
                ]
            )
            self.fc = nn.Linear(512, 1000)

        def forward(self, x: Any) -> Any:
            x = self.pool(torch.relu(self.bn1(self.conv1(x))))
            return self.fc(self.blocks(x).mean((2, 3)))

    return TorchResNet()


def torch_mnist() -> Any:
    torch = load("torch")
    nn = torch.nn

    class TorchMnist(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.bn1 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 32, 5), nn.BatchNorm2d(32)
            self.conv3, self.conv4, self.bn2 = nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)
            self.fc = nn.Linear(576, 10)

        def forward(self, x: Any) -> Any:
            pool = nn.functional.max_pool2d
            x = pool(self.bn1(torch.relu(self.conv2(torch.relu(self.conv1(x))))), 2)
            return self.fc(pool(self.bn2(torch.relu(self.conv4(torch.relu(self.conv3(x))))), 2).flatten(1))

    return TorchMnist()


def torch_gpt() -> Any:
    torch = load("torch")
    nn = torch.nn

    class TorchBlock(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

        def forward(self, x: Any) -> Any:
            batch, time, dim = x.shape
            shape = batch, time, 3, HEADS, dim // HEADS
            q, k, v = self.qkv(self.norm1(x)).reshape(shape).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class TorchGPT(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(CONTEXT, DIM)
            for table in (self.tokens, self.positions):
                nn.init.normal_(table.weight, std=0.02)
            self.blocks = nn.Sequential(*[TorchBlock() for _ in range(LAYERS)])
            self.norm = nn.LayerNorm(DIM)

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            return self.norm(self.blocks(x)) @ self.tokens.weight.T

    return TorchGPT()


def torch_step(model: Any, optimizer: str, compile_: bool, **options: Any) -> Callable[[Any, Any], Any]:
    """A step (inputs, labels) -> loss of torch, eager or with the model and its loss compiled."""
    torch = load("torch")
    rule = getattr(torch.optim, optimizer)(model.parameters(), fused=True, **options)

    def loss_of(x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    forward = compiled(loss_of) if compile_ else loss_of

    def step(x: Any, y: Any) -> Any:
        rule.zero_grad()
        loss = forward(x, y)
        loss.backward()
        rule.step()
        return loss.detach()

    return step


# ---- the work of the rows ----------------------------------------------------------------------------------


def same_weights(model: Any, state: Any) -> Any:
    """The whit model with torch's state in memory of its own."""
    whit = load("whit")
    values = {name: whit.Tensor(value.numpy()).contiguous().realize() for name, value in state.items()}
    importlib.import_module("whit.nn.state").load_state_dict(model, values)
    return model


def seeded(build: Callable[[], Any]) -> Any:
    """A torch model with the same first weights at each call."""
    load("torch").manual_seed(0)
    return build()


def resnet18(batch: int) -> Work:
    """Inference of ResNet-18 at 224, float32."""
    torch, nn = load("torch"), importlib.import_module("whit.nn")
    x = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), dtype=np.float32)
    theirs = seeded(torch_resnet18).eval()
    mine = same_weights(ResNet18(nn), theirs.state_dict())
    images = torch.from_numpy(x)
    fast = compiled(theirs)

    def eager() -> Any:
        with torch.inference_mode():
            return theirs(images)

    def fused() -> Any:
        with torch.no_grad():
            return fast(images)

    contenders = {"whit": replayed(mine, x), "torch": eager, "torch.compile": fused}
    weights = 4 * sum(p.numel() for p in theirs.parameters())
    return Work(contenders, 1e-4, 2 * 1.814e9 * batch, weights + x.nbytes, 4000 * batch)


def training(
    theirs: Callable[[], Any], mine: Any, x: Any, y: Any, optimizer: str, flops: float, lr: float
) -> Work:
    """Training steps of equal models on equal data; the first losses are compared."""
    torch, whit = load("torch"), load("whit")
    models = [seeded(theirs) for _ in range(2)]
    weights = 4 * sum(p.numel() for p in models[0].parameters())
    same_weights(mine, models[0].state_dict())
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    eager = torch_step(models[0], optimizer, False, lr=lr)
    fused = torch_step(models[1], optimizer, True, lr=lr)
    step = training_step("whit", mine, optimizer, lr=lr)
    tensors = [whit.Tensor(v).contiguous().realize() for v in (x, y)]
    contenders = {
        "whit": lambda: step(*tensors),
        "torch": lambda: eager(inputs, labels),
        "torch.compile": lambda: fused(inputs, labels),
    }

    def check() -> float:
        """Greatest relative difference of the first losses (both learn: rounding grows with each step)."""
        losses = [(float(step(*tensors).item()), float(eager(inputs, labels))) for _ in range(3)]
        return max(abs(a - b) / abs(b) for a, b in losses)

    # forward, the gradients of inputs and of weights; weights, gradients and moments are read and written
    return Work(contenders, 1e-3, 3 * flops, 5 * weights + x.nbytes, 4 * weights, check=check)


def mnist_step(batch: int) -> Work:
    """A training step of the network of examples/mnist.py, Adam."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((batch, 1, 28, 28), dtype=np.float32)
    y = numbers.integers(0, 10, batch)
    layers = 24 * 24 * 32 * 25 + 20 * 20 * 32 * 32 * 25 + 8 * 8 * 64 * 32 * 9 + 6 * 6 * 64 * 64 * 9 + 5760
    mine = MnistNet(importlib.import_module("whit.nn"))
    return training(torch_mnist, mine, x, y, "Adam", 2.0 * layers * batch, 1e-3)


def gpt_data() -> tuple[Any, Any]:
    """Tokens and the tokens that follow."""
    numbers = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, CONTEXT + 1))
    return np.ascontiguousarray(numbers[:, :-1]), np.ascontiguousarray(numbers[:, 1:])


def gpt_step() -> Work:
    """A training step of the 6-layer 384-wide GPT on 8x256 tokens, AdamW."""
    x, y = gpt_data()
    tokens = BATCH * CONTEXT
    products = LAYERS * 12 * DIM * DIM + VOCABULARY * DIM
    scores = LAYERS * CONTEXT * DIM  # both products of causal attention, for each token
    mine = GPT(load("whit"), importlib.import_module("whit.nn"))
    return training(torch_gpt, mine, x, y, "AdamW", 2.0 * tokens * (products + scores), 1e-3)

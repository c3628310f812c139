"""Programs that are measured as whole processes: `python -m bench.programs NAME WHO` prints one JSON object
whose "figure" is in seconds, or bytes for memory.

WHO is whit, tinygrad, torch or torch.compile.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import algorithms, models
from bench.peers import load
from bench.timing import repeated

Result = dict[str, float]


def first_and_later(run: Callable[[], None]) -> Result:
    """Seconds of the first run less those of a later one."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"figure": times[0] - min(times[1:]), "first": times[0], "later": min(times[1:])}


def block(who: str) -> Result:
    """Forward and backward of a transformer block: schedule and compile."""
    module = load(who)
    tensor, nn = module.Tensor, importlib.import_module(f"{who}.nn")
    model = models.Block(nn, models.DIM, models.HEADS)
    parameters = importlib.import_module(f"{who}.nn.state").get_parameters(model)
    for parameter in parameters:
        parameter.requires_grad = True
    x = tensor.randn(models.BATCH, models.CONTEXT, models.DIM)
    tensor.realize(x, *parameters)

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss = (model(x) ** 2).mean()
        loss.backward()
        tensor.realize(loss, *[p.grad for p in parameters])
        loss.item()

    return first_and_later(run)


def resnet(who: str) -> Result:
    """ResNet-18, one image forward: schedule and compile."""
    module = load(who)
    model = models.ResNet18(importlib.import_module(f"{who}.nn"))
    x = module.Tensor.randn(1, 3, 224, 224)
    module.Tensor.realize(x, *importlib.import_module(f"{who}.nn.state").get_state_dict(model).values())
    return first_and_later(lambda: model(x).numpy())


def small_op(who: str) -> Result:
    """Un-jitted repeat of one small op."""
    tensor = load(who).Tensor
    x = tensor([1.0, 2.0, 3.0, 4.0]).realize()
    return {"figure": repeated(lambda: (x + 1).realize(), 500, 20)}


def replay(who: str) -> Result:
    """100 tiny kernels, each depending on the one before, per kernel."""
    module = load(who)
    if who == "torch":
        x = module.ones(16)

        def eager() -> None:
            y = x
            for _ in range(100):
                y = y + 1.0

        with module.no_grad():
            return {"figure": repeated(eager, 300) / 100}

    def steps(x: Any) -> Any:
        for _ in range(100):
            x = (x.flip(0) + 1.0).contiguous()  # flipped: equal loops in a row would become one kernel
        return x.realize()

    chain = module.TinyJit(steps)
    x = module.Tensor.ones(16).contiguous().realize()
    figure = repeated(lambda: chain(x), 300, 5) / 100
    counters = importlib.import_module("whit.engine.counters").GlobalCounters
    counters.reset()
    if chain(x).tolist() != [101.0] * 16 or counters.kernel_count != 100:
        raise AssertionError(f"{counters.kernel_count} kernels or a wrong result in the replay")
    return {"figure": figure}


def gpt_stepper(who: str) -> Callable[[], float]:
    """A call that makes a training step and gives the loss."""
    inputs, labels = models.gpt_data()
    if who.startswith("torch"):
        torch = load("torch")
        step = models.torch_step(models.torch_gpt(), "AdamW", who == "torch.compile", lr=1e-3)
        data = torch.from_numpy(inputs), torch.from_numpy(labels)
    else:
        module = load(who)
        model = models.GPT(module, importlib.import_module(f"{who}.nn"))
        step = models.training_step(who, model, "AdamW", lr=1e-3)
        data = tuple(module.Tensor(x.astype(np.int32)).contiguous().realize() for x in (inputs, labels))
    return lambda: float(step(*data).item())


def gpt_first(who: str) -> Result:
    """The first training step, with everything that it compiles."""
    step = gpt_stepper(who)
    start = time.perf_counter()
    step()
    return {"figure": time.perf_counter() - start}


def status(key: str) -> int:
    """A size of this process in bytes, as Linux counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def gpt_memory(who: str) -> Result:
    """The greatest memory of training steps after the first two, over that of the process once the framework
    is loaded and has compiled and run something small."""
    module = load(who)
    if who == "torch":
        x = module.ones(64, 64, requires_grad=True)
        (x @ x).sum().backward()
    else:
        (module.Tensor.ones(64, 64).contiguous() @ module.Tensor.ones(64, 64).contiguous()).sum().item()
    base = status("VmRSS")
    step = gpt_stepper(who)
    step(), step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the greatest size so far
    for _ in range(3):
        step()
    return {"figure": status("VmHWM") - base, "base": base}


def sort_first(who: str) -> Result:
    """The first sort in a process, with everything that it compiles."""
    x = load(who).Tensor(np.random.default_rng(0).normal(size=100_000).astype(np.float32)).realize()
    return first(lambda: x.sort()[0].realize())


def topk_first(who: str) -> Result:
    """The first selection in a process."""
    x = load(who).Tensor(np.random.default_rng(0).normal(size=151_936).astype(np.float32)).realize()
    return first(lambda: x.topk(8)[0].realize())


def lstm_first(who: str) -> Result:
    """The first forward and backward of an LSTM in a process."""
    whit, nn = load(who), importlib.import_module(f"{who}.nn")
    x = whit.Tensor(np.random.default_rng(0).normal(size=(100, 32, 128)).astype(np.float32)).realize()
    return first(lambda: whit.Tensor.realize(*algorithms.lstm_gradients(nn.LSTM(128, 256), x)))


def first(run: Callable[[], Any]) -> Result:
    """Seconds of a call."""
    start = time.perf_counter()
    run()
    return {"figure": time.perf_counter() - start}


PROGRAMS: dict[str, Callable[[str], Result]] = {
    "block": block,
    "resnet": resnet,
    "small_op": small_op,
    "replay": replay,
    "gpt_first": gpt_first,
    "gpt_memory": gpt_memory,
    "sort_first": sort_first,
    "topk_first": topk_first,
    "lstm_first": lstm_first,
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](sys.argv[2])))

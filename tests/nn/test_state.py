"""State dicts: names as PyTorch gives them, loading that checks everything first, and messages that help."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whit import Tensor, TinyJit, nn
from whit.helpers import ArgumentError
from whit.nn.state import get_parameters, get_state_dict, load_state_dict, safe_load, safe_save


class Block:
    def __init__(self, size: int = 3) -> None:
        self.linear, self.norm, self.name, self.act = (
            nn.Linear(size, 4),
            nn.LayerNorm(4),
            "block",
            Tensor.relu,
        )


class Model:
    def __init__(self) -> None:
        self.blocks = [Block(), Block(4)]
        self.head, self.scale = nn.Linear(4, 2, bias=False), 2.0


class TorchBlock(torch.nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(size, 4), torch.nn.LayerNorm(4)


class TorchModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([TorchBlock(), TorchBlock(4)])
        self.head = torch.nn.Linear(4, 2, bias=False)


def test_names_are_those_of_pytorch() -> None:
    assert {n: t.shape for n, t in get_state_dict(Model()).items()} == {
        n: tuple(p.shape) for n, p in TorchModel().state_dict().items()
    }


def test_containers() -> None:
    pair = namedtuple("pair", "first second")
    a, b, c, d = (Tensor([float(i)]) for i in range(4))
    found = get_state_dict(pair({"x": [a, (b,)]}, OrderedDict(y=c)), prefix="top.")
    assert {n: id(t) for n, t in found.items()} == {
        "top.first.x.0": id(a),
        "top.first.x.1.0": id(b),
        "top.second.y": id(c),
    }
    assert get_state_dict(d) == {"": d} or list(get_state_dict(d)) == [""]


def test_cycles_and_shared_tensors() -> None:
    class Node:
        def __init__(self) -> None:
            self.me, self.weight = self, Tensor([1.0])

    node: Any = Node()
    node.tied = node.weight
    assert sorted(get_state_dict(node)) == ["tied", "weight"] and len(get_parameters(node)) == 1


def test_things_without_tensors() -> None:
    assert get_state_dict([1, "text", None, np.zeros(3), Model, len]) == {}


def test_a_torch_model_loads(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    theirs, ours = TorchModel(), Model()
    save_file(theirs.state_dict(), tmp_path / "f")
    load_state_dict(ours, safe_load(tmp_path / "f"))
    for name, value in theirs.state_dict().items():
        assert (get_state_dict(ours)[name].numpy() == value.numpy()).all()


def test_save_and_load_a_model(tmp_path: Path) -> None:
    first, second = Model(), Model()
    safe_save(get_state_dict(first), tmp_path / "f")
    load_state_dict(second, safe_load(tmp_path / "f"))
    x = Tensor(np.eye(3, dtype=np.float32))
    assert (first.blocks[0].linear(x).numpy() == second.blocks[0].linear(x).numpy()).all()


def test_values_are_cast_to_the_models_dtype() -> None:
    layer = nn.Linear(2, 1, bias=False)
    load_state_dict(layer, {"weight": Tensor([[1.5, 2.5]], dtype="float16")})
    assert (
        layer.weight.dtype.name == "float32"
        and layer.weight.tolist() == [[1.5, 2.5]]
        and layer.weight.requires_grad
    )


def test_captured_functions_see_loaded_values() -> None:
    layer = nn.Linear(2, 1, bias=False)
    load_state_dict(layer, {"weight": Tensor([[1.0, 2.0]])})
    call, x = TinyJit(lambda x: layer(x).realize()), Tensor([[1.0, 1.0]])
    assert [call(x.realize()).item() for _ in range(3)] == [3.0] * 3
    load_state_dict(layer, {"weight": Tensor([[10.0, 20.0]])})
    assert call(x).item() == 30.0


def test_missing_left_over_and_misshapen_names_are_listed() -> None:
    model = Model()
    before = model.head.weight.numpy()
    given = {name: Tensor.zeros(*t.shape) for name, t in get_state_dict(model).items()}
    given["blocks.0.lin.weight"] = given.pop("blocks.0.linear.weight")
    given["head.weight"] = Tensor.zeros(4, 2)
    with pytest.raises(ArgumentError) as caught:
        load_state_dict(model, given)
    text = str(caught.value)
    assert "missing blocks.0.linear.weight (near: blocks.0.lin.weight)" in text
    assert "unexpected blocks.0.lin.weight (near: blocks.0.linear.weight)" in text
    assert "head.weight is (4, 2), the model has (2, 4)" in text
    assert (model.head.weight.numpy() == before).all() and model.blocks[1].norm.weight.tolist() == [1.0] * 4
    with pytest.raises(ArgumentError, match="other shapes"):
        load_state_dict(model, given, strict=False)
    del given["head.weight"]
    load_state_dict(model, given, strict=False)
    assert (model.head.weight.numpy() == before).all() and model.blocks[1].norm.weight.tolist() == [0.0] * 4


def test_long_lists_are_cut() -> None:
    with pytest.raises(ArgumentError, match="and 40 more"):
        load_state_dict({f"w{i}": Tensor([0.0]) for i in range(50)}, {})


def test_batch_norm_statistics_are_part_of_the_state() -> None:
    theirs, ours = torch.nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    theirs(torch.randn(4, 3, 2, 2))
    load_state_dict(ours, {n: Tensor(t.numpy()) for n, t in theirs.state_dict().items()})
    assert ours.num_batches_tracked.item() == 1
    assert np.allclose(ours.running_var.numpy(), theirs.running_var.numpy())


def test_tied_weights_need_one_of_their_names(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    load_state_dict([first, second], {"0.weight": Tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert second.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_only_tensors_are_taken(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="'weight': it is a ndarray and not a Tensor"):
        load_state_dict(nn.Linear(2, 1, bias=False), {"weight": np.zeros((1, 2))})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="'x': it is a list"):
        safe_save({"x": [1.0]}, tmp_path / "f")  # type: ignore[dict-item]


def test_a_model_keeps_its_own_memory() -> None:
    """Arrays that were loaded may change afterwards: PyTorch's optimisers write in place."""
    array = np.ones(1000, np.float32)
    model = {"weight": Tensor.zeros(1000).contiguous().realize(), "bias": Tensor([0.0] * 1000)}
    load_state_dict(model, {"weight": Tensor(array), "bias": Tensor(array)})
    array += 1
    assert model["weight"].sum().item() == model["bias"].sum().item() == 1000

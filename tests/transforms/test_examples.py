"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import whit.transforms
from whit.transforms import trees

MODULES = [m.name for m in pkgutil.iter_modules(whit.transforms.__path__, "whit.transforms.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_trees() -> None:
    tree = {"a": [1, (2, None)], "b": {}}
    assert trees.leaves(tree) == [1, 2, None]
    assert trees.rebuilt(tree, iter("xyz")) == {"a": ["x", ("y", "z")], "b": {}}
    assert trees.structure(tree) == trees.structure({"a": [3, (4, 5)], "b": {}})
    for other in ({"a": [1, [2, None]], "b": {}}, {"b": {}, "a": [1, (2, None)]}, {"a": [1, (2,)], "b": {}}):
        assert trees.structure(tree) != trees.structure(other)


def test_every_transform_is_reached_from_whit() -> None:
    for name in whit.transforms.__all__:
        assert (
            getattr(whit, name) is getattr(whit.transforms, name)
            and name in whit.__all__
            and name in dir(whit)
        )

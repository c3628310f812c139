"""Every example in the docstrings of whit.nn runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import whit.nn
from whit import Tensor, nn

MODULES = [m.name for m in pkgutil.iter_modules(whit.nn.__path__, "whit.nn.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    known = {"Tensor": Tensor, "nn": nn, **vars(module)}
    result = doctest.testmod(module, extraglobs=known, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0

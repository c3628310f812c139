"""Every example in the docstrings of the tensor room runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import whit.tensor
from whit import Tensor, Variable, dtypes

MODULES = ["whit", *[f"whit.tensor.{m.name}" for m in pkgutil.iter_modules(whit.tensor.__path__)]]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    names = {**vars(module), "Tensor": Tensor, "dtypes": dtypes, "Variable": Variable}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    failures: list[str] = []
    for test in finder.find(module, extraglobs=names):
        runner.run(test, out=failures.append, clear_globs=False)
    assert not failures, "".join(failures)

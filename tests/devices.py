"""Devices that tests are run on, skipped where the machine lacks what they need."""

from __future__ import annotations

import shutil
from typing import Any

import pytest


def _needs(device: str, *programs: str) -> Any:
    missing = not any(shutil.which(p) for p in programs)
    return pytest.param(device, marks=pytest.mark.skipif(missing, reason=f"no {programs[0]}"))


CLANG = _needs("CPU:CLANG", "clang", *[f"clang-{n}" for n in range(15, 25)])  # from 15 on it has _Float16
GCC = _needs("CPU:GCC", "gcc")

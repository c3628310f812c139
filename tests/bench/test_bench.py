"""The bench itself: every row's work at a smoke size gives the peers' values, the probe's loops do what they
say; figures and verdicts follow from the samples."""

from __future__ import annotations

import ctypes
import doctest
import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench import algorithms, growth, kernels, models, peers, table, timing
from bench.rows import ROWS, Goal, Row, matching
from whit.engine import probe

pytest.importorskip("torch")

SMOKE = {
    "matmul": [(33, 17, 9, "nn"), (16, 16, 16, "nt"), (5, 16, 8, "tn")],
    "matmul_narrow": [(24, "float16"), (24, "bfloat16")],
    "matmul_int8": [(32,)],
    "matvec": [(40,)],
    "conv": [(2, 4, 9, 6, 3), (1, 3, 14, 4, 7, 2), (2, 8, 7, 8, 3, 1, 8), (2, 4, 5, 6, 1)],
    "chain": [(6, 40)],
    "total": [(6, 40)],
    "softmax": [(6, 40)],
    "layer_norm": [(6, 40)],
    "rms_norm": [(6, 40)],
    "attention": [(2, 16, 8), (2, 16, 8, True)],
    "mnist_step": [(4,)],
    "ordered": [(50,), (500,)],
    "greatest": [(200, 3)],
    "running_sum": [(100,)],
    "embedding_gradient": [(50, 3, 7)],
    "singular": [(6,)],
    "recurrent": [(5, 2, 3, 4)],
}
CASES = [(name, arguments) for name, list_ in SMOKE.items() for arguments in list_]


@pytest.mark.parametrize("name, arguments", CASES, ids=str)
def test_values_at_a_smoke_size(name: str, arguments: tuple[int | str | bool, ...]) -> None:
    module = next(module for module in (kernels, models, algorithms) if hasattr(module, name))
    work = getattr(module, name)(*arguments)
    if work.check is not None:
        assert work.check() <= work.tolerance
        return
    others = [who for who in work.contenders if who not in ("whit", "torch.compile")]
    results = {who: work.contenders[who]() for who in others}
    for _ in range(3):  # plain run, capture, replay
        mine = work.contenders["whit"]()
        for who in others:
            assert peers.difference(mine, results[who]) <= work.tolerance, who
    assert work.flops > 0 and work.read > 0 and work.written > 0


@pytest.mark.slow
def test_resnet_and_gpt_against_torch() -> None:
    for work in (models.resnet18(1), models.gpt_step()):
        if work.check is not None:
            assert work.check() <= work.tolerance
        else:
            assert peers.difference(work.contenders["whit"](), work.contenders["torch"]()) <= work.tolerance


def test_the_models_of_both_kinds_have_equal_parameters() -> None:
    torch_models = (models.torch_mnist(), models.torch_resnet18(), models.torch_gpt())
    state = importlib.import_module("whit.nn.state")
    whit, nn = importlib.import_module("whit"), importlib.import_module("whit.nn")
    for mine, theirs in zip((models.MnistNet(nn), models.ResNet18(nn), models.GPT(whit, nn)), torch_models):
        shapes = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
        assert {name: tuple(value.shape) for name, value in state.get_state_dict(mine).items()} == shapes


def test_every_racing_row_has_its_work_and_a_smoke_size() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    for row in ROWS:
        assert bool(row.work) + bool(row.program) + bool(row.code) == 1, row.name
        if row.work not in ("", "resnet18", "gpt_step"):
            assert row.work in SMOKE, row.name


def test_rows_by_word_or_group() -> None:
    assert [row.name for row in matching(["conv 1x1"])] == ["conv 1x1 64->256 at 56, batch 8"]
    assert {row.group for row in matching(["memory"]) if "peak" not in row.name} == {"memory"}
    assert matching([]) == ROWS and matching(["no such row"]) == []


def test_the_program_lists_its_rows_and_refuses_unknown_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = importlib.import_module("bench.__main__")
    monkeypatch.setattr("sys.argv", ["bench", "--list"])
    program.main()
    assert len(capsys.readouterr().out.splitlines()) == len(ROWS)
    monkeypatch.setattr("sys.argv", ["bench", "--only", "no such row"])
    with pytest.raises(SystemExit, match="no row matches no such row"):
        program.main()


def test_a_whole_program_that_fails_is_left_out_or_fails_the_row(tmp_path: Path) -> None:
    from bench.processes import programs

    goals = (Goal(("no_such_module",), 1.0, time=True),)
    result = programs(Row("a", goals, code="import {0}", cache="cold"), 1, tmp_path)
    assert len(result["samples"]["whit"]) == 1 and "no_such_module" in result["failures"]["no_such_module"]
    figure = table.figure(Row("a", goals), result)
    assert math.isnan(figure.verdicts[0].ratio) and "left out" in table.lines(figure)
    broken = programs(Row("b", goals, code="import {0}; 1 / 0"), 1, tmp_path)
    assert "ZeroDivisionError" in broken["error"]


# ---- the probe ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine() -> probe.Probe:
    return probe.Probe(2)


def floats(machine: probe.Probe, name: str, size: int) -> np.ndarray:
    address = machine.buffer(name, size)
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (size // 4,))


@pytest.mark.parametrize("kernel", list(probe.MEMORY))
def test_memory_loops_do_what_they_say(machine: probe.Probe, kernel: str) -> None:
    size = 1 << 16
    a, b, c = (floats(machine, name, size) for name in "abc")
    a[:], b[:], c[:] = -1, np.arange(size // 4), 2.0
    reads, writes, _ = probe.MEMORY[kernel]
    if not writes:  # every lane's sum of what was read, by each thread into a place of its own
        machine.memory(kernel, size)
        small = floats(machine, "c", 8192)
        sums = small[:128].sum(dtype=np.float64) + small[1024 : 1024 + 128].sum(dtype=np.float64)
        assert sums == np.arange(size // 4).sum()
        return
    if not reads:
        floats(machine, "c", 8192)[:] = 7.0
    machine.memory(kernel, size)
    expected = {"": np.full_like(b, 7.0), "b": b, "bc": b + c}[reads]
    np.testing.assert_array_equal(a, expected)


def test_multiply_adds_counts_its_operations(machine: probe.Probe) -> None:
    lanes = machine.lanes
    assert machine.multiply_adds(10) == 2 * lanes * probe.ACCUMULATORS * 10 * 2
    size = 4096 * machine.threads
    for name in "bc":
        floats(machine, name, size)[:] = 1.0
    machine.multiply_adds(3)
    # each chain starts at 1 and gains 1 a turn; the sum takes the first one twice
    assert (floats(machine, "a", size)[:lanes] == 4.0 * (probe.ACCUMULATORS + 1)).all()


def test_traffic_reports_seconds_of_one_pass(machine: probe.Probe) -> None:
    for read, written in ((1 << 20, 0), (0, 1 << 20), (1 << 20, 1 << 20), (1 << 18, 1 << 20)):
        assert 0 < machine.traffic(read, written)() < 1


# ---- timing and figures ------------------------------------------------------------------------------------


def test_race_takes_turns_and_believes_reported_seconds() -> None:
    lanes = timing.race({"a": lambda: None, "reports": lambda: 0.25, "b": lambda: None}, 3)
    assert set(lanes) == {"a", "reports", "b"} and [len(lane.samples) for lane in lanes.values()] == [3] * 3
    assert lanes["reports"].samples == [0.25] * 3 and lanes["reports"].best == 0.25
    assert 0 < lanes["a"].best <= min(lanes["a"].samples) < 0.25


def test_a_slow_contender_drops_out_with_a_sample() -> None:
    import time

    slow = timing.race({"slow": lambda: time.sleep(0.03), "fast": lambda: None}, 4, patience=0.02)["slow"]
    assert len(slow.samples) == 1 and slow.best == slow.samples[0] >= 0.03


def test_difference_sees_shapes_and_nan() -> None:
    one = np.ones(3, np.float32)
    assert peers.difference(one, one) == 0
    assert peers.difference(one, np.ones((3, 1), np.float32)) == math.inf
    assert peers.difference(one * np.nan, one) == math.inf
    assert peers.difference((one, one), (one,)) == math.inf
    assert peers.difference((one, 2 * one), (one, one)) == 1


def test_verdicts() -> None:
    seconds = {"whit": 2.0, "torch": 3.0, "jax": 2.5}
    best = table.judged(Goal(("torch", "jax", "numpy"), 1.3), seconds, 0.0)
    assert (best.against, best.ratio, best.met) == ("jax", 1.25, False)
    limit = table.judged(Goal(("limit",), 0.75), seconds, 1.5)
    assert (limit.against, limit.ratio, limit.met) == ("limit", 0.75, True)
    assert not table.judged(Goal(("tinygrad",), 0.1), seconds, 0.0).met  # not measured is not met
    assert table.judged(Goal((), 2.0, time=True), seconds, 0.0).met
    assert not table.judged(Goal((), 1.9, time=True), seconds, 0.0).met


def test_a_figure_prints_writes_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.roofline import plot

    row = Row("a row", (Goal(("torch",), 1.0), Goal(("limit",), 0.5)), work="matmul")
    samples = {"whit": [2e-3, 1e-3, 3e-3], "torch": [4e-3], "limit.flops": [1e-3], "limit.bytes": [5e-4]}
    result = table.figure(row, {"samples": samples, "flops": 1e9, "bytes": 1e6})
    assert result.seconds == {"whit": 2e-3, "torch": 4e-3} and result.limit == 1e-3
    assert [v.ratio for v in result.verdicts] == [2.0, 0.5] and all(v.met for v in result.verdicts)
    printed = table.lines(result).splitlines()
    assert len(printed) == 2 and "torch 4 ms" in printed[0] and "met" in printed[1]
    assert json.loads(json.dumps(result.to_json()))["limit"] == 1e-3
    best = table.figure(row, {"samples": samples, "best": {"whit": 5e-4}}, best=True)
    assert best.seconds == {"whit": 5e-4, "torch": 4e-3}
    failed = table.figure(row, {"error": "it broke"})
    assert "FAILED: it broke" in table.lines(failed)
    machine = probe.Machine(2, 1e11, 2e11, 1e10, 1.2e10, 1e10, 1e10, 1e10)
    plot(machine, [result, failed], tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_growth_of_a_small_size_and_its_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in growth.KINDS:
        point = growth.point(name, 20)
        assert set(point) == set(growth.MEASURES) and point["time"] > 0
    sweep = growth.Sweep("matmul", "side", (1, 2, 4), (3, 0, 2))
    for size in sweep.sizes:
        sweep.points[size] = {"time": size**3 + 5.0, "compile": 1.0, "memory": size**2.0}
    assert growth.exponent(sweep.series("compile")) == 0.0
    assert growth.exponent([(n, float(n) ** 3) for n in (1, 2, 4)]) == pytest.approx(3)
    growth.plot([sweep], tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["peers", "rows", "table", "timing", "growth"])
def test_the_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"bench.{name}"))
    assert result.attempted > 0 and result.failed == 0

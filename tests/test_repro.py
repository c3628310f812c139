"""`python -m whit.repro`: graphs of every level from text; and what golden files show computes the same
before and after."""
from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.golden.test_golden import FILES
from whit.engine.validate import as_array, compare
from whit.helpers import STATS
from whit.repro import contents, level_of, main, run
from whit.uop import UOp, dtypes
from whit.uop.rewrite import costs
from whit.uop.text import parse

GOLDEN = Path(__file__).parent / "golden"


def stages(path: Path) -> list[UOp]:
    """The graphs of a golden file that can run."""
    texts = re.split(r"^# ---- after .*\n", path.read_text(), flags=re.MULTILINE)
    graphs = [parse(text) for text in texts if not text.startswith("# unchanged")]
    return [g for g in graphs if level_of(g) != "tensor" or any(n.device for n in g.toposort())]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden_graphs_compute_the_same_before_and_after(path: Path) -> None:
    found = [g for g in stages(path) if level_of(g) in ("kernel", "linear")]
    if len(found) < 2:
        pytest.skip("it shows no two kernels")
    wanted = run(found[0], "PYTHON")
    for graph in found[1:]:
        for a, b in zip(run(graph, "PYTHON"), wanted, strict=True):
            compare(a.data, b.data, a.dtype, path.stem)


def test_a_kernel_computes_what_numpy_does(capsys: pytest.CaptureFixture[str]) -> None:
    root = parse((GOLDEN / "matmul_tile.txt").read_text().split("\n# ---- ")[0])
    a, b = (as_array(contents(dtypes.float32, n, slot), dtypes.float32) for n, slot in ((64, 1), (128, 2)))
    expected = np.maximum(a.reshape(4, 16) @ b.reshape(16, 8), 0)
    for device in ("PYTHON", "CPU"):
        got = as_array(run(root, device)[0].data, dtypes.float32).reshape(4, 8)
        assert np.allclose(got, expected, atol=1e-5)
    assert main([str(GOLDEN / "matmul_tile.txt"), "--device", "CPU"]) == 0
    assert "CPU agrees with PYTHON" in capsys.readouterr().out


def test_a_graph_of_tensors_computes_what_numpy_does() -> None:
    root = parse((GOLDEN / "fused_softmax.txt").read_text().split("\n# ---- ")[0])
    x = as_array(contents(dtypes.float32, 24, 0), dtypes.float32).reshape(4, 6)
    powers = np.exp2(x - x.max(1, keepdims=True))
    got = as_array(run(root, "CPU")[0].data, dtypes.float32).reshape(4, 6)
    assert np.allclose(got, powers / powers.sum(1, keepdims=True), atol=1e-6)


def test_variables_are_given_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.txt"
    file.write_text("""
%0 = param int32; slot=0 size=8
%1 = var index; name="n" min=1 max=8
%2 = range index %1; uid=0 axis=LOOP
%3 = mul index %1 10
%4 = cast int32 %3
%5 = store %0 %2 %4
%6 = end %5 %2
%7 = sink %6
""")
    assert main([str(file), "n=2", "--device", "CPU"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("buffer 0: int32 × 8: 20, 20, ") and "agrees" in shown
    assert main([str(file), "n"]) == 1
    assert "name=number" in capsys.readouterr().err


@pytest.mark.parametrize("text, says", [
    ("", "no node"), ("%0 = sink %1", "not defined"),
                                        ("%0 = add float32 1.0 1:int32", "operands of one dtype"),
    ("\xff", "cannot read"), ('%0 = param int8; slot=0 size=1\n%1 = sink %0',
                              "SINK is not as the level allows")])
def test_bad_files_say_what_is_wrong(text: str, says: str, tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.txt"
    file.write_text(text)
    assert main([str(file)]) == 1
    assert says in capsys.readouterr().err
    assert main([str(tmp_path / "absent.txt")]) == 1


def test_opts_are_given_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With opts a kernel is compared with what it computes without any, on the reference device too."""
    file = tmp_path / "kernel.txt"
    file.write_text((GOLDEN / "matmul_tile.txt").read_text().split("\n# ---- after ")[0])
    for device in ("CPU", "PYTHON"):
        assert main([str(file), "--device", device, "--opts", "UPCAST axis 0 by 2, STAGE axis 0 read 1"]) == 0
        assert f"{device} agrees with PYTHON" in capsys.readouterr().out
    assert main([str(file), "--opts", "UPCAST axis 77 by 2"]) == 1
    assert "no axis 77" in capsys.readouterr().err
    assert main([str(file), "--opts", "FLY axis 0 by 2"]) == 1
    assert "FLY" in capsys.readouterr().err
    file.write_text("%0 = iota int32; 4\n")
    assert main([str(file), "--opts", "UPCAST axis 0 by 2"]) == 1
    assert "tensor graph" in capsys.readouterr().err


def test_stats_say_what_each_step_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernel.txt"
    kernel = (GOLDEN / "matmul_tile.txt").read_text().split("\n# ---- ")[0]
    file.write_text(kernel.replace("range index 4; uid=0", "range index 3; uid=0"))
    costs.clear()
    assert main([str(file), "--device", "CPU", "--stats"]) == 0
    text = capsys.readouterr().out
    rows = {line[:40].strip(): line[40:].split() for line in text.splitlines() if len(line) > 40}
    for step in ("simplify values", "choose opts", "apply opts", "linearize", "render", "compile (CPU)",
                 "load code"):
        seconds, runs = rows[step][:2]
        assert float(seconds) >= 0 and int(runs) >= 1, step
    assert int(rows["linearize"][2]) > 5  # nodes
    assert "rule" in rows and STATS.value == 0

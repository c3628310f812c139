"""Golden tests: what each pass does to a small graph, as text. They show *change*; truth comes from the tests
that evaluate.

A file of this folder reads

    # the reason why it exists
    IR text
    # ---- after NAME, or NAME: its parameters
    IR text

Each section is the pass applied to the section before (`# unchanged`: it did nothing). `pytest tests/golden
--bless` rewrites what the passes now give.
"""
from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from whit.autograd.gradient import gradient
from whit.codegen.linearize import linearize
from whit.codegen.lower import _PREPARE, _PREPARE_FOR, lower_passes, prepare
from whit.codegen.opts import apply, parse_opts
from whit.codegen.simplify import simplify_values
from whit.codegen.target import Target
from whit.schedule import schedule
from whit.uop import Ops, UOp
from whit.uop.ops import ALU
from whit.uop.rewrite import Pass
from whit.uop.spec import verify
from whit.uop.symbolic import simplify
from whit.uop.text import parse, show

FOLDER = Path(__file__).parent
DECOMPOSED = {Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.ERF, Ops.POW, Ops.FLOORDIV, Ops.FLOORMOD, Ops.THREEFRY,
              Ops.TRUNC, Ops.FLOOR}
# a made-up machine, so that no real one changes these files: vectors of four floats, two tasks, no
# work-groups
TARGET = Target(key="golden", language="python", vector_bytes=16, vector_registers=16, threads=2,
                native=frozenset(ALU) - DECOMPOSED)
WITH_GROUPS = Target(key="golden groups", language="python", threads=1, has_local=True, local_bytes=1 << 15,
                     max_local=64,
                     native=frozenset(ALU) - DECOMPOSED)
UNSIGNED = TARGET._replace(key="golden unsigned", native=TARGET.native - {Ops.DOT4, Ops.DOT2})
TARGETS = {"": TARGET, "for groups": WITH_GROUPS, "with DOT4U": UNSIGNED}


def _gradient(root: UOp, text: str) -> UOp:
    """Of the first source, a scalar, with respect to the others."""
    output, *inputs = root.src
    found = gradient([output], inputs, [output.const_like(1.0)])
    return UOp.sink(*[g for g in found if g is not None])


# name -> (pass, spec level of its input, of its result)
PASSES: dict[str, tuple[Callable[[UOp, str], UOp], str, str]] = {
    "simplify": (lambda u, _: simplify(u), "", ""),
    "simplify values": (lambda u, _: simplify_values(u), "", ""),
    "gradient": (_gradient, "tensor", "tensor"),
    "schedule": (lambda u, _: schedule(list(u.src))[0].linear, "tensor", "schedule"),
    "prepare": (lambda u, _: prepare(u), "kernel", "kernel"),
    "opts": (lambda u, text: apply(u, parse_opts(text), TARGET), "kernel", "tiled"),
    "opts for groups": (lambda u, text: apply(u, parse_opts(text), WITH_GROUPS), "kernel", "tiled"),
    "linearize": (lambda u, _: linearize(u, TARGET), "tiled", "linear"),
}


def _lowering(step: Pass) -> tuple[Callable[[UOp, str], UOp], str, str]:
    return lambda u, text: step.run(u, TARGETS[text]), step.needs, step.gives


STEPS = (*_PREPARE, *_PREPARE_FOR, *lower_passes())
PASSES |= {step.name: _lowering(step) for step in STEPS if step.name not in PASSES}


def run(path: Path) -> str:
    """The file as the passes make it now: the reason and the first graph stay, the others are computed."""
    head, *sections = re.split(r"^# ---- after (.*)\n", path.read_text(), flags=re.MULTILINE)
    reason = "".join(re.findall(r"^# .*\n", head, re.MULTILINE))
    assert reason, f"{path.name}: its first line must say why it exists"
    root = parse(head)
    text = reason + show(root) + "\n"
    for title in sections[::2]:
        name, _, parameters = title.partition(": ")
        step, needs, gives = PASSES[name]
        if needs:
            verify(root, needs, f"before {name} in {path.name}")
        before, root = root, step(root, parameters)
        if gives:
            verify(root, gives, f"after {name} in {path.name}")
        assert parse(show(root)) is root
        text += f"# ---- after {title}\n{'# unchanged' if root is before else show(root)}\n"
    return text


FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(path: Path, request: pytest.FixtureRequest) -> None:
    kept, made = path.read_text(), run(path)
    if kept == made:
        return
    if request.config.getoption("--bless"):
        path.write_text(made)
        return
    change = "\n".join(difflib.unified_diff(kept.splitlines(), made.splitlines(), "kept", "now", lineterm=""))
    pytest.fail(f"{change}\nif this is what you want: pytest tests/golden --bless -k {path.stem}",
                pytrace=False)


def test_every_pass_has_a_golden_file() -> None:
    shown = {title.partition(": ")[0] for path in FILES
             for title in re.findall(r"^# ---- after (.*)$", path.read_text(), re.MULTILINE)}
    assert shown == set(PASSES), f"without a file: {set(PASSES) - shown}; unknown: {shown - set(PASSES)}"

"""The rewrite engine and the pass runner: to a fixed point, without recursion, memoised per node."""
from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from whit.helpers import DEBUG, SPEC, STATS, IRError, log
from whit.uop.pattern import rule_stats
from whit.uop.uop import UOp

LIMIT = 100_000  # rewrites of one node in a row before the rules are taken to loop


class Rewriter(Protocol):
    """What graph_rewrite needs: PatternMatcher, or anything with its `rewrite`."""

    def rewrite(self, node: UOp, ctx: Any = None) -> UOp | None: ...


def graph_rewrite(root: UOp, rules: Rewriter, ctx: Any = None, top_down: bool = False) -> UOp:
    """Rewrite every node of the graph until no rule fires.

    Bottom-up (default): a node's sources are final before the node is tried; a replacement is itself
    processed again. Top-down: a node is tried (to its own fixed point) before its sources are visited, and
    once more after they changed.
    """
    final: dict[UOp, UOp] = {}
    # a frame is (node as found, node as it now is, stage): 0 visit the sources, 1 rebuild and rewrite, 2
    # adopt a result
    stack: list[tuple[UOp, UOp, int]] = [(root, root, 0)]
    rewrite = getattr(rules, "rewrite_counted", rules.rewrite) if STATS.value else rules.rewrite
    steps: dict[UOp, int] = {}
    while stack:
        original, node, stage = stack.pop()
        if original in final:
            continue
        if stage == 0:
            if top_down:
                for _ in range(LIMIT):
                    better = rewrite(node, ctx)
                    if better is None:
                        break
                    node = better
                else:
                    raise _endless(original)
            if node in final:
                final[original] = final[node]
                continue
            stack.append((original, node, 1))
            for source in reversed(node.src):
                if source not in final:
                    stack.append((source, source, 0))
        elif stage == 1:
            src = node.src
            for source in src:
                if final[source] is not source:
                    src = tuple([final[s] for s in src])
                    break
            rebuilt = node if src is node.src else UOp(node.op, node.dtype, src, node.arg)
            if top_down:
                better = rewrite(rebuilt, ctx) if rebuilt is not node else None
            else:
                better = rewrite(rebuilt, ctx)
            if better is None:
                final[original] = final[node] = final[rebuilt] = rebuilt
            elif better in final:
                final[original] = final[node] = final[better]
            else:
                steps[original] = steps.get(original, 0) + 1
                if steps[original] > LIMIT:
                    raise _endless(original)
                stack.append((original, better, 2))
                stack.append((better, better, 0))
                steps[better] = steps[original]
        else:
            final[original] = final[node]
    return final[root]


def _endless(node: UOp) -> IRError:
    return IRError(f"rewriting {node}",
                   because=f"the rules still change it after {LIMIT} steps, so they loop",
                   fix="make every rule's result simpler than its input by one measure")


@dataclass(frozen=True)
class Pass:
    """A named step of a pipeline: a function from graph to graph. `needs` and `gives` name the spec level
    before and after."""

    name: str
    run: Callable[[UOp, Any], UOp]
    needs: str
    gives: str
    doc: str = ""


def rule_pass(name: str, rules: Rewriter, needs: str, gives: str | None = None, top_down: bool = False,
              doc: str = "") -> Pass:
    """A pass that is one rule set run to its fixed point."""
    return Pass(name, lambda root, ctx: graph_rewrite(root, rules, ctx, top_down), needs, gives or needs, doc)


pass_seconds: dict[str, float] = {}  # time in each pass since the process began


def statistics() -> str:
    """A table of the time in each pass, and with STATS=1 what each rule did; slowest first."""
    lines = [f"{'pass':40} {'ms':>10}"]
    for name, seconds in sorted(pass_seconds.items(), key=lambda item: -item[1]):
        lines.append(f"{name:40} {seconds * 1e3:10.2f}")
    lines.append(f"{'rule':40} {'ms':>10} {'tried':>10} {'fired':>10}")
    for name, stats in sorted(rule_stats.items(), key=lambda item: -item[1].seconds):
        lines.append(f"{name:40} {stats.seconds * 1e3:10.2f} {stats.tried:10} {stats.fired:10}")
    return "\n".join(lines)


if STATS:
    atexit.register(lambda: print(statistics(), file=sys.stderr))


observers: list[Callable[[Pass, UOp, UOp], None]] = []  # viewers and replay hang here


def run_passes(root: UOp, passes: Sequence[Pass], ctx: Any = None) -> UOp:
    """Run a pipeline; check specs when SPEC=1, show each graph when DEBUG >= 5, account the time per pass."""
    for step in passes:
        start = time.perf_counter()
        result = step.run(root, ctx)
        pass_seconds[step.name] = pass_seconds.get(step.name, 0.0) + time.perf_counter() - start
        if SPEC:
            from whit.uop.spec import verify
            verify(result, step.gives, f"after {step.name}")
        if DEBUG.value >= 5:
            from whit.uop.text import show
            log(5, f"---- {step.name}" + (" (unchanged)" if result is root else "\n" + show(result)))
        for observe in observers:
            observe(step, root, result)
        root = result
    return root

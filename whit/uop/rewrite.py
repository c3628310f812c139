"""The rewrite engine, the walk that passes are made of, and the pass runner with its accounts.

`graph_rewrite` runs rules to a fixed point, `rebuild` gives each node one new form; both visit a node once
and never recurse. `timed` and `run_passes` account what each step of the compiler costs.
"""
from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from whit.helpers import DEBUG, SPEC, STATS, IRError, log
from whit.uop.uop import UOp

if TYPE_CHECKING:
    from whit.uop.pattern import RuleStats

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


def rebuild(root: UOp, change: Callable[[UOp, UOp], UOp], known: Mapping[UOp, UOp] | None = None,
            keep: Callable[[UOp], bool] | None = None) -> UOp:
    """The graph made anew in one walk, sources first: `change(old, new)` says what stands in the place of a
    node, given as it was and as it is with its sources replaced. Keys of `known` are not visited: their
    values stand in their place. Nor is what `keep` holds for: it stays, and all below it.

    >>> from whit.uop import Ops, dtypes
    >>> x = UOp.variable("x", 0, 9)
    >>> double = lambda old, new: new * 2 if old.op is Ops.VAR else new
    >>> rebuild(x + 1, double) is x * 2 + 1
    True
    """
    new: dict[UOp, UOp] = {} if known is None else dict(known)
    fixed = frozenset(new)
    stop = keep if not fixed else fixed.__contains__ if keep is None else \
        lambda node: node in fixed or keep(node)
    for node in root.toposort(stop):
        if node in fixed:
            continue
        if keep is not None and keep(node):
            new[node] = node
            continue
        src = node.src
        for source in src:
            if new[source] is not source:
                made = UOp(node.op, node.dtype, tuple([new[s] for s in src]), node.arg)
                break
        else:
            made = node
        new[node] = change(node, made)
    return new[root]


class Pass(NamedTuple):
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


# ---- accounts ----------------------------------------------------------------------------------------------


class Cost:
    """What a step of the compiler has cost since the process began. `nodes`: of the graphs it was given
    (counted with STATS=1 only)."""

    __slots__ = ("calls", "nodes", "seconds")

    def __init__(self) -> None:
        self.seconds, self.calls, self.nodes = 0.0, 0, 0


costs: dict[str, Cost] = {}


def charge(name: str, seconds: float, root: UOp | None = None) -> None:
    """Add one run of the step `name` to the accounts."""
    cost = costs.get(name)
    if cost is None:
        cost = costs.setdefault(name, Cost())
    cost.seconds += seconds
    cost.calls += 1
    if root is not None and STATS.value:
        cost.nodes += len(root.toposort())


@contextlib.contextmanager
def timed(name: str, root: UOp | None = None) -> Iterator[None]:
    """Account the block as one run of the step `name` on the graph `root`.

    >>> with timed("an example"): pass
    >>> costs["an example"].calls
    1
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        charge(name, time.perf_counter() - start, root)


def statistics() -> str:
    """A table of what each step of the compiler cost, and with STATS=1 what each rule did; slowest first."""
    lines = [f"{'step':40} {'ms':>10} {'runs':>8} {'nodes':>10}"]
    for name, cost in sorted(costs.items(), key=lambda item: -item[1].seconds):
        lines.append(f"{name:40} {cost.seconds * 1e3:10.2f} {cost.calls:8} {cost.nodes or '':>10}")
    rule_stats = _rule_stats()
    if rule_stats:
        lines.append(f"{'rule':40} {'ms':>10} {'tried':>8} {'fired':>10}")
    for name, stats in sorted(rule_stats.items(), key=lambda item: -item[1].seconds):
        lines.append(f"{name:40} {stats.seconds * 1e3:10.2f} {stats.tried:8} {stats.fired:10}")
    return "\n".join(lines)


def _rule_stats() -> dict[str, RuleStats]:
    """What rules did; patterns need not be loaded for it."""
    module = sys.modules.get("whit.uop.pattern")
    return {} if module is None else module.rule_stats


if STATS:
    atexit.register(lambda: print(statistics(), file=sys.stderr))


observers: list[Callable[[Pass, UOp, UOp], None]] = []  # viewers and replay hang here


def run_passes(root: UOp, passes: Sequence[Pass], ctx: Any = None) -> UOp:
    """Run a pipeline; check specs when SPEC=1, show each graph when DEBUG >= 5, account the time per pass."""
    for step in passes:
        start = time.perf_counter()
        result = step.run(root, ctx)
        charge(step.name, time.perf_counter() - start, root)
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

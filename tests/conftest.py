"""Settings and options of the whole suite: specs are checked after every pass; `--slow` runs everything,
`--bless` rewrites golden files, `--random-opts SEED` lets any suite of values test the opts too. Hypothesis
draws the same examples on every run, so that a red build is somebody's change; `--hypothesis-profile default`
draws new ones."""
from __future__ import annotations

import pytest
from hypothesis import settings

from whit.helpers import ContextVar
from whit.uop.rewrite import statistics

ContextVar.registry["SPEC"].value = 1
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--stats", action="store_true", help="count and time every rewrite rule and pass")
    parser.addoption("--random-opts", type=int, default=None, metavar="SEED",
                     help="kernels get random legal opts in the place of the heuristics'")
    parser.addoption("--bless", action="store_true",
                     help="rewrite tests/golden/*.txt to what the passes give now")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def pytest_configure(config: pytest.Config) -> None:
    ContextVar.registry["STATS"].value = int(config.getoption("--stats"))
    if config.getoption("--random-opts") is not None:
        from tests.integration.opts_fuzz import use_random_opts
        use_random_opts(config.getoption("--random-opts"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--stats"):
        terminalreporter.write_line(statistics())

"""Running: realize, compile, jit, counters, profiling."""

from whit.engine.compile import Kernel, compiled
from whit.engine.counters import GlobalCounters
from whit.engine.realize import Step, buffer_of, read, realize
from whit.tensor.storage import hooks

hooks.realize, hooks.read = realize, read

__all__ = ["GlobalCounters", "Kernel", "Step", "buffer_of", "compiled", "read", "realize"]

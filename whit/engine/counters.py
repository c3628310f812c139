"""What ran, in numbers, and the line that DEBUG=2 prints for each kernel."""

from __future__ import annotations

from typing import NamedTuple

from whit.helpers import DEBUG, PROFILE, colored, human_bytes, log


class GlobalCounters:
    """Totals since `reset()`: floating-point operations, bytes moved at least, kernels run, seconds measured
    (only when kernels are timed: DEBUG >= 2 or PROFILE=1), bytes of device memory in use by tensors.

    >>> GlobalCounters.reset()
    >>> GlobalCounters.kernel_count
    0
    """

    global_ops: int = 0
    global_mem: int = 0
    kernel_count: int = 0
    time_sum_s: float = 0.0
    mem_used: int = 0

    @staticmethod
    def reset() -> None:
        GlobalCounters.global_ops = GlobalCounters.global_mem = GlobalCounters.kernel_count = 0
        GlobalCounters.time_sum_s = 0.0


class Work(NamedTuple):
    """What one run of a kernel costs at least."""

    name: str
    device: str
    flops: int
    nbytes: int


def timing() -> bool:
    """Whether kernels are run one by one and timed."""
    return DEBUG.value >= 2 or PROFILE.value > 0


def account(work: Work, seconds: float | None) -> None:
    """Add one run to the totals; print it when DEBUG >= 2."""
    GlobalCounters.kernel_count += 1
    GlobalCounters.global_ops += work.flops
    GlobalCounters.global_mem += work.nbytes
    if seconds is None:
        return
    GlobalCounters.time_sum_s += seconds
    if DEBUG.value >= 2:
        spent = max(seconds, 1e-9)
        log(
            2,
            f"*** {work.device:8s} {GlobalCounters.kernel_count:5d} {colored(f'{work.name:44s}', 'cyan')} "
            f"mem {human_bytes(GlobalCounters.mem_used):>10s}  {seconds * 1e6:10.1f} us  "
            f"{work.flops / spent / 1e9:8.2f} GFLOP/s  {work.nbytes / spent / 1e9:7.2f} GB/s",
        )
    if PROFILE.value:
        from whit.engine.profile import record

        record(work, seconds)

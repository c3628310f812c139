"""From tensor graphs to kernels: fusion, in-place hazards, order, memory plan."""

from whit.schedule.schedule import Call, Result, Schedule, Slot, make_schedule, schedule

__all__ = ["Call", "Result", "Schedule", "Slot", "make_schedule", "schedule"]

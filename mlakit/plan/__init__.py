"""Schedules, as frozen objects made from lengths alone: equal lengths give equal plans."""

from mlakit.plan.context import ContextPlan, PrefillPlan, plan_context, plan_prefill
from mlakit.plan.decode import DecodePlan, DecodePlanTensors, EvenSplit, WorkItem, plan_decode

__all__ = [
    "ContextPlan",
    "DecodePlan",
    "DecodePlanTensors",
    "EvenSplit",
    "PrefillPlan",
    "WorkItem",
    "plan_context",
    "plan_decode",
    "plan_prefill",
]

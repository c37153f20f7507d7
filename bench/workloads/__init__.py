"""What is asked of a server under measurement.

Every workload is a TOML file (`definition`): those beside this one are built in, others are named on the
command line. `plan` turns one into the exact requests of a round.
"""

from bench.workloads.definition import BarLine, Definition, Group, built_in, find, read_file
from bench.workloads.plan import BenchRequest, GroupPlan, Plan, Session, make_plan, single_requests

__all__ = [
    "BarLine",
    "BenchRequest",
    "Definition",
    "Group",
    "GroupPlan",
    "Plan",
    "Session",
    "built_in",
    "find",
    "make_plan",
    "read_file",
    "single_requests",
]

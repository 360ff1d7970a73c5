"""Planning: scheduling policies from samples to checked plans, with proven lower bounds."""

from .make_plan import make_plan
from .policies import POLICIES, Policy
from .problem import PlanningProblem

__all__ = ["POLICIES", "PlanningProblem", "Policy", "make_plan"]

"""Planning: scheduling policies from samples to checked plans, with proven lower bounds."""

from .explain import explain, format_explanation
from .layout_search import format_choices, search_layouts
from .make_plan import make_plan
from .policies import POLICIES, Policy
from .problem import PlanningProblem

__all__ = [
    "POLICIES",
    "PlanningProblem",
    "Policy",
    "explain",
    "format_choices",
    "format_explanation",
    "make_plan",
    "search_layouts",
]

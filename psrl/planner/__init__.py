"""Planning: scheduling policies from samples to checked plans, with proven lower bounds."""

from .explanation.cost_terms import cost_terms
from .explanation.explain import explain
from .explanation.explain_text import format_cost_terms, format_explanation
from .layout_search import format_choices, search_layouts
from .make_plan import make_plan
from .policies.find_policy import find_policy
from .policies.policies import POLICIES, Draft, Policy
from .problem import PlanningProblem
from .search_progress import search_progress

__all__ = [
    "POLICIES",
    "Draft",
    "PlanningProblem",
    "Policy",
    "cost_terms",
    "explain",
    "find_policy",
    "format_choices",
    "format_cost_terms",
    "format_explanation",
    "make_plan",
    "search_layouts",
    "search_progress",
]

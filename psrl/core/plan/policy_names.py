"""Names of scheduling policies, in the order of every table and figure."""

MERGED_DENSE = "merged_dense"
"""Row of a comparison: dense training of step samples merged to trajectories.

No policy of its own: the plan of `verl` for the merged samples, which train the same tokens in the
same contexts.
"""

POLICY_ORDER = (
    "verl",
    MERGED_DENSE,
    "vllm_ps",
    "sglang_ps",
    "sharing_agnostic",
    "prefix_match_first",
    "balance_first",
    "first_fit",
    "dfs_cut",
    "quick",
    "psrl",
    "optimal",
)

DEFAULT_POLICIES = ("verl", "sglang_ps", "dfs_cut", "quick", "psrl")
"""What a comparison plans unless told otherwise."""

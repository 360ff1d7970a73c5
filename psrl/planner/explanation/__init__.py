"""Why a plan is what it is, from the plan itself."""

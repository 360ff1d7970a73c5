"""`psrl reproduce`: the published experiments as scenarios, and their numbers beside ours."""

"""The prefix tree of samples, and what it says about ranks and predicted rows."""

"""Two engines that replay a plan: SimPy processes, and the same in vectors."""

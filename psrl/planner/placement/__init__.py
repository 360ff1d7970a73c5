"""Which data-parallel rank trains which sample."""

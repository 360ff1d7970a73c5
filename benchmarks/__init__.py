"""Benchmarks of psRL: measured figures beside their bars. Run them with `make bench`."""

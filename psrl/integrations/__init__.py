"""Adapters that run psRL inside other systems; each is the only place that imports its host."""

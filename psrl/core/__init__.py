"""Data, arithmetic and files that every other part of psRL builds on."""

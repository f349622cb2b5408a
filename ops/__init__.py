"""Compiled recurrences as torch ops, the step-by-step reference, and the catalogue."""

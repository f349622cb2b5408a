"""Comparing operators: small tasks that tell them apart, training on them, tables over variants."""

"""Text and Python in, a checked ``RecurrenceSpec`` out."""

"""Which ops run in which kernel, and with what block sizes."""

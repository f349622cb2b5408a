"""linalg_dsl: one line of recurrence in, checked chunkwise kernels out."""

"""A GPU that is not there: its tensors, streams and compiled kernels, so that code for one is walked."""

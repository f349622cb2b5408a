"""A GPU that is not there: its tensors, streams and compiled kernels, so that all code for one can be walked."""

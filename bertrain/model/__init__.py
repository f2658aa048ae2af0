"""BERT on one page, the same by hand on the kernels, and the Batch and Arena that both use."""

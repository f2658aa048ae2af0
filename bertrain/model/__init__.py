"""BERT in one file (bert.py), the same by hand on kernels (fused*.py), and the Batch and Arena that both use."""

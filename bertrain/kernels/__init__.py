"""Triton kernels for GPUs, C kernels for CPUs with AMX, each beside the plain-PyTorch function that specifies it.

Forward and backward are separate functions, for a hand-written backward pass (`bertrain.model.fused`).
`backend.available(device)` returns whether Triton kernels can run, and why; `cpu_library.available()`, the C kernels.
"""

IGNORED = -100  # label without a loss, as in torch.nn.functional.cross_entropy

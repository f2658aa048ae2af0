"""Triton kernels, each beside the plain-PyTorch twin that is its specification.

They are pure functions, forward and backward apart, for a caller that runs the backward pass by hand
(`bertrain.model.fused`). `backend.available(device)` says whether they can run, and why.
"""

IGNORED = -100  # label without a loss, as in torch.nn.functional.cross_entropy

"""Triton kernels, each beside the plain-PyTorch twin that is its specification.

Every public function here takes the same arguments on every machine: on a device where the kernels can run
it launches them, anywhere else it runs the twin. `backend.available(device)` says which, and why.
"""

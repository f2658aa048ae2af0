"""Bytes of all tensors that are alive, at every operation: what memory a computation needs, to the byte, on any device.

The size of a process says the same less exactly: allocators keep what was freed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While entered: `now` is what the tensors made since then hold, `peak` the most it has been."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        self._sizes = {key: item for key, item in self._sizes.items() if not item[0].expired()}
        return sum(size for _, size in self._sizes.values())

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        outside = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((arguments, options or {}))
            if isinstance(leaf, torch.Tensor)
        }
        results = operation(*arguments, **(options or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in outside:  # views and results written in place are not new memory
                    reference = StorageWeakRef(storage)
                    self._sizes[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, self.now)
        return results

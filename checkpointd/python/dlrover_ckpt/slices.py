"""Storages that begin where a tensor begins."""

from __future__ import annotations

import ctypes
from typing import Any


def storage_at(tensor: Any) -> Any:
    """An untyped storage whose first bytes are those of a dense tensor. It keeps the memory alive; no copy is made
    on CPU and CUDA devices."""
    import torch

    if tensor.storage_offset() == 0 or tensor.numel() == 0:
        return untyped(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu":
        memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
        memory.owner = tensor
        return untyped(torch.frombuffer(memory, dtype=torch.uint8))
    if tensor.device.type == "cuda":
        return untyped(torch.as_tensor(_CudaBytes(tensor, nbytes), device=tensor.device))
    return untyped(tensor.clone())


def untyped(tensor: Any) -> Any:
    """tensor.untyped_storage(), which torch 1.13 does not have."""
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()._storage


class _CudaBytes:
    """The bytes of a tensor on a GPU, for torch.as_tensor."""

    def __init__(self, tensor: Any, nbytes: int) -> None:
        self._owner = tensor
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2}

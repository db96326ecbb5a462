"""Stands for PyTorch where that is not installed: the parts that the shim watches, in the shape of 1.13 or of 2.x."""

import os

from .serialization import load, save  # noqa: F401
from . import nn, optim  # noqa: F401
from .utils import data  # noqa: F401

__version__ = os.environ.get("FAKE_TORCH", "2.1")

"""The little of PyTorch that the checkpoint engine needs, so that a worker starts in a tenth of a second."""

from . import distributed

__version__ = "0.0-fast"
__all__ = ["distributed"]

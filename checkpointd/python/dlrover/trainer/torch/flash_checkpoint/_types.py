"""Types of arguments, for type checkers only: nothing imports this when a program runs."""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, Union

Path = Union[str, "os.PathLike[str]"]  # ~ is the home directory
StateDict = Mapping[str, Any]  # names to tensors, nested containers of them, and objects that can be pickled
Loaded = Dict[str, Any]  # the same, as it was loaded

"""A module that hides another one of the same name, which is on PYTHONPATH."""
import os
import sys

import facts

facts.begin()
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "pkg"))

import torch  # noqa: E402
import twin  # noqa: E402

facts.late()
facts.same("twin", [os.path.basename(os.path.dirname(twin.__file__)), torch.__name__])
facts.ddp()
facts.end()

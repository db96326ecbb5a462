"""For -m."""
import facts

facts.begin()

import torch  # noqa: E402
from . import twin  # noqa: E402

facts.late()
facts.same("names", [__name__, __package__, twin.__name__, torch.__name__])
facts.ddp()
facts.end()

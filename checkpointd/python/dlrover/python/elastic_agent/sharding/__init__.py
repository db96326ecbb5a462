"""Data shards, which a launcher's store hands out. Under DLRover's own master its own client takes precedence, if it is
installed: there the workers serve the store themselves."""

import os
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
    __path__ = __path__[1:] + __path__[:1]

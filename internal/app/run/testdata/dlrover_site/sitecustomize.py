"""Gives every agent of DLRover a folder of its own, DLROVER_FOLDER: their files below /tmp/dlrover are those of a host,
and the tests have several nodes on one."""

import os

FOLDER = os.environ.get("DLROVER_FOLDER")
if FOLDER:
    try:
        from dlrover.python.common.constants import ConfigPath
    except ImportError:  # another interpreter's
        pass
    else:
        for name, path in list(vars(ConfigPath).items()):
            if isinstance(path, str) and path.startswith("/tmp/dlrover/"):
                setattr(ConfigPath, name, os.path.join(FOLDER, path[len("/tmp/dlrover/") :]))

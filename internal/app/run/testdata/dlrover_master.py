"""DLRover's own master on this machine, as `python -m dlrover.python.master.main`, for tests of versions 0.4 to 0.6.

FOLDER is where it writes to `heard` what it hears, one JSON object a line, and where it looks for actions: the first
heartbeat of the node ID after the file action.ID has come is answered with the action of which the file has the name.
"""

import importlib
import json
import os
import socket
import sys

FOLDER = sys.argv.pop(1)
UID = sys.argv.pop(1)  # of the job; "" is none

from dlrover.python.diagnosis.common import diagnosis_action as actions
from dlrover.python.master import main, servicer
from dlrover.python.master.node import local_job_manager
from dlrover.python.scheduler import job

try:
    messages = importlib.import_module("dlrover.python.common.comm")
except ImportError:
    messages = importlib.import_module("dlrover.python.common.grpc")


def plain(value):
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "__dict__"):
        return plain(vars(value))
    return value


def tell(call):
    answer = getattr(servicer.MasterServicer, call)

    def told(self, request, context):
        # A message in the words of another version is none, and the master says so itself.
        if messages.__name__.encode() in request.data or b"ommon." not in request.data:
            message = messages.deserialize_message(request.data)
            line = {"call": call, "id": request.node_id, "name": type(message).__name__, "of": plain(message)}
            with open(os.path.join(FOLDER, "heard"), "a") as heard:
                heard.write(json.dumps(line) + "\n")
        return answer(self, request, context)

    setattr(servicer.MasterServicer, call, told)


def action(node_id):
    """What a test wants of a node, once; None if nothing."""
    path = os.path.join(FOLDER, "action.%d" % node_id)
    if not os.path.exists(path):
        return None
    with open(path) as file:
        kind = file.read()
    os.remove(path)
    if kind in ("restart_worker", "relaunch_worker"):
        return actions.NodeAction(
            node_id=node_id, node_type="worker", reason="the test wants it", action_type=kind
        )
    return getattr(actions, kind)(reason="the test wants it", msg="")


beat = local_job_manager.LocalJobManager.collect_node_heart_beat


def collect_node_heart_beat(self, node_type, node_id, timestamp):
    return action(node_id) or beat(self, node_type, node_id, timestamp)


local_job_manager.LocalJobManager.collect_node_heart_beat = collect_node_heart_beat
initilize = job.LocalJobArgs.initilize


def with_uid(self):
    initilize(self)
    self.job_uuid = UID


job.LocalJobArgs.initilize = with_uid
getaddrinfo = socket.getaddrinfo


def services_are_here(host, *args, **kwargs):
    """What Kubernetes' DNS knows is this machine."""
    return getaddrinfo("127.0.0.1" if str(host).startswith("elasticjob-") else host, *args, **kwargs)


socket.getaddrinfo = services_are_here
tell("get")
tell("report")
os._exit(main.main() or 0)

"""A module of PYTHONPATH that starts a thread when it is imported."""
import facts

facts.begin()

import torch  # noqa: E402
import starts_a_thread  # noqa: E402

facts.late()
facts.same("alive", [starts_a_thread.thread.is_alive(), torch.__name__])
facts.ddp()
facts.end()

"""The job's own extension in C, beside the script, and one on PYTHONPATH."""
import facts

facts.begin()

import torch  # noqa: E402
import own_c  # noqa: E402
import other_c  # noqa: E402

facts.late()
facts.same("answers", [own_c.answer(), other_c.answer(), torch.__name__])
facts.ddp()
facts.end()

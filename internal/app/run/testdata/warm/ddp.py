import facts

facts.begin()

import torch  # noqa: E402
import torch.distributed  # noqa: E402
import torch.nn.parallel  # noqa: E402

facts.late()
facts.ddp()
facts.end()

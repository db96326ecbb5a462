"""The ranks of a job: which one this process is, and how they agree."""

from __future__ import annotations

from typing import Any, List, Mapping


class RankInfo:
    """This process's rank and the sizes of the job, from the environment that launchers set."""

    def __init__(self, env: Mapping[str, str]) -> None:
        def number(name: str, default: int) -> int:
            try:
                return int(env.get(name, ""))
            except ValueError:
                return default

        self.rank = number("RANK", 0)
        self.world_size = max(1, number("WORLD_SIZE", 1))
        self.local_rank = number("LOCAL_RANK", 0)
        self.local_world_size = max(self.local_rank + 1, number("LOCAL_WORLD_SIZE", 1))
        self.node_rank = max(0, number("GROUP_RANK", 0))
        self.run = env.get("DLROVER_CKPT_RUN") or env.get("TORCHELASTIC_RUN_ID") or "none"
        self.epoch = env.get("DLROVER_CKPT_EPOCH") or "%s.%s" % (env.get("TORCHELASTIC_RESTART_COUNT", "0"),
                                                                 env.get("MASTER_PORT", ""))


class Ranks:
    """The collectives of all ranks. Without torch.distributed, or with one rank, a process agrees with itself."""

    def __init__(self, info: RankInfo, group: Any) -> None:
        """group: the torch.distributed group of all ranks; None: the default one."""
        self.info = info
        self._group = group

    @property
    def initialized(self) -> bool:
        """Whether torch.distributed is."""
        import torch

        return bool(torch.distributed.is_available() and torch.distributed.is_initialized())

    @property
    def agree_alone(self) -> bool:
        """Whether this rank's word counts for all: it is the only one."""
        return self.info.world_size == 1 or not self.initialized

    def gather(self, value: Any) -> List[Any]:
        """The values of all ranks, in their order. Collective."""
        if self.agree_alone:
            return [value]
        import torch

        out: List[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(out, value, group=self._group)
        return out

    def all(self, yes: bool) -> bool:
        """Whether all ranks say yes. Collective."""
        return all(self.gather(yes))

import os


class ProcessGroup:
    group_desc = "of tests"

    def __init__(self, ranks, rank):
        self._ranks, self._rank, self.seq = ranks, rank, 0

    def rank(self):
        return self._rank

    def _get_sequence_number_for_group(self):
        if self.seq < 0:
            raise RuntimeError("this backend does not count")
        return self.seq


class GroupMember:
    WORLD = None


class _World:
    def __init__(self):
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.count = 0

    def add(self, group, ranks):
        self.pg_map[group] = ("gloo", None)
        self.pg_names[group] = str(self.count)
        self.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
        self.pg_backend_config[group] = "cpu:gloo"
        self.count += 1
        return group


_world = _World()


def init_process_group(fails=None, world_size=None):
    global _world
    if fails:
        raise fails
    ranks = range(world_size or int(os.environ["WORLD_SIZE"]))
    _world = _World()
    GroupMember.WORLD = _world.add(ProcessGroup(ranks, int(os.environ["RANK"])), ranks)
    return GroupMember.WORLD


def new_group(ranks):
    return _world.add(ProcessGroup(ranks, 0), ranks)


def destroy_process_group(group):
    for table in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config):
        del table[group]

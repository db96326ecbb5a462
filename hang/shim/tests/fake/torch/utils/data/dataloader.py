class _BaseDataLoaderIter:
    def __init__(self, batches):
        self._left = iter(batches)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._left)
        return batch() if callable(batch) else batch


class DataLoader:
    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return _BaseDataLoaderIter(self._batches)

import time


def save(obj, f):
    """Takes so long."""
    time.sleep(obj)


def load(f):
    raise ValueError(f)

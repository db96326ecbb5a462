# A PyTorch for tests: as much of it as the probe uses, with devices and faults as the environment says.
#
# FAKE_DEVICES is their number. FAKE_FAULTS are words such as "matmul:1:raise": where, on which device, and what.
import os
import subprocess
import sys
import time

__version__ = "9.9.fake"
DEVICES = int(os.environ.get("FAKE_DEVICES", "0"))
bfloat16, float32 = "bfloat16", "float32"
current = -1


def fault(where):
    for word in os.environ.get("FAKE_FAULTS", "").split():
        at, device, what = word.split(":")
        if at != where or device not in ("*", str(current)):
            continue
        if what == "hang":
            time.sleep(1000)
        elif what == "missing":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        elif what == "broken":
            raise ImportError("libcudart.so.12: cannot open shared object file\nsecond line")
        elif what == "raise":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore of it")
        elif what == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 128 MiB")
        elif what == "crash":
            os.abort()
        elif what == "exit":
            print("something went wrong", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        elif what == "flood":
            for _ in range(1 << 12):
                os.write(1, b"x" * (1 << 10))
        elif what == "talk":
            os.write(4, b"I am no answer\n")
        elif what == "long":
            os.write(4, b"x" * (1 << 20))
        elif what == "leave":
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open(os.path.join(os.environ["FAKE_DIR"], "pids"), "a") as pids:
                pids.write("%d %d " % (child.pid, os.getpid()))
        elif what == "wrong":
            return True
        else:
            raise ValueError(what)
    return False


class Generator:
    def manual_seed(self, seed):
        return self


class Tensor:
    def __init__(self, value=1.0):
        self.value = value

    def to(self, name, kind):
        return self

    def __eq__(self, other):
        return Tensor(self.value == other)

    def all(self):
        return self.value

    def __getitem__(self, index):
        return self.value


def device(kind, index=0):
    return "%s:%d" % (kind, index)


def randn(rows, columns, generator):
    fault("allocate")
    return Tensor()


def ones(*size, device, dtype):
    return Tensor(1.0)


def tensor(values, dtype, device):
    return Tensor(values[0])


def matmul(a, b):
    wrong = fault("matmul")
    time.sleep(0.001 * (3 if fault("slow") else 1))
    return Tensor(-1 if wrong else 8192 if current >= 0 else 256)


def set_num_threads(number):
    pass


class cuda:
    @staticmethod
    def is_available():
        return DEVICES > 0

    @staticmethod
    def device_count():
        fault("count")
        return DEVICES

    @staticmethod
    def set_device(index):
        global current
        current = index
        fault("wake")

    @staticmethod
    def synchronize():
        pass

    @staticmethod
    def is_bf16_supported():
        return True


class version:
    cuda = "13.2"


fault("import")

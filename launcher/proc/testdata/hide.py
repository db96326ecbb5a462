"""Starts descendants that hide from whoever looks for them, each in a way of its own.

Usage: hide.py DIR. Every one holds a shared lock on DIR/<way>.lock as long as it lives,
and says in DIR/<way>.up that it has hidden, or why it cannot. Ends, with a line, when
all have said so.
"""
import ctypes
import os
import platform
import shutil
import signal
import sys
import threading
import time
import fcntl

DIR = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
SYS_CLONE, SYS_EXIT = (56, 60) if X86 else (220, 93)
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS, CLONE_VFORK = 0x10000000, 0x20000000, 0x20000, 0x4000
PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 4, 15, 36
MANY = int(os.environ.get("MANY", "200"))


class Cannot(Exception):
    pass


def call(ok, what):
    if not ok:
        raise Cannot("%s: %s" % (what, os.strerror(ctypes.get_errno())))


def sleep():
    while True:
        time.sleep(60)


def run(env=None):
    os.execve("/bin/sleep", ["sleep", "1000"], os.environ if env is None else env)


def fork(child):
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    return pid


def prctl(option, value):
    call(libc.prctl(option, value, 0, 0, 0) == 0, "prctl")


def overwrite(first):
    """Clears the memory that /proc/self/environ (field 50) or cmdline (field 48) shows."""
    with open("/proc/self/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    start, end = int(fields[first - 3]), int(fields[first - 2])
    ctypes.memset(start, 0, end - start)


# Each way returns when it has hidden, in the process that lives on.
def cleared_environment(up):
    up()
    run({})


def own_session(up):
    os.setsid()
    up()
    run({})


def overwritten_environment(up):
    os.setsid()
    overwrite(50)
    up()


def overwritten_command_line(up):
    os.setsid()
    overwrite(48)
    overwrite(50)
    prctl(PR_SET_NAME, b"kworker/0:1")
    up()


def stopped(up):
    os.setsid()
    up()
    os.kill(os.getpid(), signal.SIGSTOP)


def double_fork(up):
    def second():
        os.setsid()
        fork(lambda: (up(), run({})))
    os.waitpid(fork(second), 0)
    os._exit(0)


def daemon(up):
    def second():
        os.setsid()
        os.chdir("/")
        for fd in range(3):
            os.close(fd)
        fork(lambda: (up(), sleep()))
    os.waitpid(fork(second), 0)
    os._exit(0)


def many_grandchildren(up):
    os.setsid()
    for _ in range(MANY):
        if libc.fork() == 0:
            libc.setsid()
            libc.clearenv()
            libc.pause()
    up()


def deep_tree(up):
    for _ in range(30):
        if os.fork():
            sleep()
        os.setsid()
    up()


def user_namespace(up):
    call(libc.unshare(CLONE_NEWUSER) == 0, "unshare")
    os.setsid()
    up()
    run({})


def pid_namespace(up):
    flags = CLONE_NEWPID if os.geteuid() == 0 else CLONE_NEWPID | CLONE_NEWUSER
    call(libc.unshare(flags) == 0, "unshare")

    def init():
        os.setsid()
        fork(lambda: (os.setsid(), up(), sleep()))
        sleep()
    fork(init)
    os._exit(0)


def mount_namespace(up):
    flags = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    call(libc.unshare(flags) == 0, "unshare")
    os.setsid()
    up()


def own_subreaper(up):
    prctl(PR_SET_CHILD_SUBREAPER, 1)

    def second():
        os.setsid()
        fork(lambda: (os.setsid(), up(), run({})))
    os.waitpid(fork(second), 0)


def blocked_in_vfork(up):
    os.setsid()
    if libc.syscall(SYS_CLONE, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        up()
        libc.pause()


def another_user(up):
    if os.geteuid() != 0:
        raise Cannot("only root may")
    os.setgroups([])
    os.setresgid(65533, 65533, 65533)
    os.setresuid(65533, 65533, 65533)
    os.setsid()
    up()
    run({})


def not_dumpable(up):
    os.setsid()
    prctl(PR_SET_DUMPABLE, 0)
    up()


def ignores_all(up):
    os.setsid()
    for s in range(1, 65):
        try:
            signal.signal(s, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    up()


def traced(up):
    os.setsid()
    pid = fork(lambda: (libc.ptrace(0, 0, 0, 0), os.kill(os.getpid(), signal.SIGSTOP), sleep()))
    os.waitpid(pid, os.WUNTRACED)
    up()


def forks_for_ever(up):
    os.setsid()
    up()
    end = time.time() + 60
    while time.time() < end:
        if os.fork():
            os._exit(0)
        os.setsid()


def another_cgroup(up):
    for path in ("/sys/fs/cgroup/unified/cgroup.procs", "/sys/fs/cgroup/cgroup.procs"):
        try:
            with open(path, "w") as f:
                f.write(str(os.getpid()))
            break
        except OSError as e:
            why = e
    else:
        raise Cannot(str(why))
    os.setsid()
    up()
    run({})


def first_thread_ended(up):
    os.setsid()
    threading.Thread(target=sleep).start()
    up()
    libc.syscall(SYS_EXIT, 0)  # of this thread alone


def deleted_program(up):
    os.setsid()
    path = os.path.join(DIR, "program-%d" % os.getpid())
    shutil.copy("/bin/sleep", path)
    fd = os.open(path, os.O_RDONLY)
    os.set_inheritable(fd, True)
    os.unlink(path)
    up()
    os.execve(fd, ["-", "1000"], {})


WAYS = [cleared_environment, own_session, overwritten_environment, overwritten_command_line, stopped, double_fork, daemon,
        many_grandchildren, deep_tree, user_namespace, pid_namespace, mount_namespace, own_subreaper, blocked_in_vfork,
        another_user, not_dumpable, ignores_all, traced, forks_for_ever, another_cgroup, first_thread_ended, deleted_program]


def hide(way):
    lock = os.open(os.path.join(DIR, way.__name__ + ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.set_inheritable(lock, True)
    done = os.open(os.path.join(DIR, way.__name__ + ".up"), os.O_WRONLY | os.O_CREAT, 0o666)

    def up(text="hidden\n"):
        os.write(done, text.encode())
    try:
        way(up)
    except Cannot as e:
        up("cannot: %s\n" % e)
        os._exit(0)
    sleep()


def ready(way):
    try:
        return os.path.getsize(os.path.join(DIR, way.__name__ + ".up")) > 0
    except OSError:
        return False


for w in WAYS:
    fork(lambda: hide(w))
while not all(ready(w) for w in WAYS):
    time.sleep(0.01)
print("ready", flush=True)
sleep()

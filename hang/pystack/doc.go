// Package pystack reads the stacks of processes from outside: the Python frames of all threads, and native ones.
//
// The process is never stopped, signalled or traced. Its memory is read while it runs, through /proc/PID/mem, as a
// debugger would read it; values are used only if they are consistent. So it makes no difference whether a thread runs,
// sleeps, is stopped (T) or in an uninterruptible sleep (D), nor which thread holds the interpreter's lock (GIL). A
// thread that runs while it is read may be caught between two states; such a stack is read again, a few times.
//
// CPython 3.8 to 3.12 are known by tables; from 3.13 on an interpreter describes its own layout. 64-bit,
// little-endian Linux only. Files are opened as the process sees them (/proc/PID/root), so it may live in another
// container.
//
// # Permissions
//
// The reader needs the permissions of ptrace(2): the same user ids and a process that is dumpable, or CAP_SYS_PTRACE.
// Where Yama is in force (kernel.yama.ptrace_scope = 1) the reader must also be an ancestor of the process, as a
// launcher is of its workers, or be named by the process: prctl(PR_SET_PTRACER, pid of the reader). With ptrace_scope
// 2 it needs CAP_SYS_PTRACE, with 3 nothing helps. A sidecar needs a shared PID namespace and the same user, or
// CAP_SYS_PTRACE. See https://docs.kernel.org/admin-guide/LSM/Yama.html.
//
// # Reads that do not return
//
// Reading memory waits for a lock of the process, which a driver may hold for long, or forever. The caller of Read
// never waits for it: after the deadline the read is abandoned. Its goroutine remains until the kernel lets it go, and
// until then the process is not read again. The wait can be killed, so the reader can end.
package pystack

package verdict

import (
	"cmp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Class is the kind of fault that ended a worker, a node or a job. Classes are only ever added.
type Class string

// The classes.
const (
	OOMKernel          Class = "oom-kernel"          // killed by the kernel for lack of memory, or a process of it was
	OOMDevice          Class = "oom-device"          // no memory left on the accelerator
	OOMPython          Class = "oom-python"          // an allocation on the host was refused
	ImportError        Class = "import-error"        // a module, a library or the script cannot be loaded
	UserException      Class = "user-exception"      // any other exception of the program
	Assertion          Class = "assertion"           // assert, in Python or C
	Segfault           Class = "segfault"            //
	SIGBUSShm          Class = "sigbus-shm"          // SIGBUS, or an error about a full /dev/shm
	IllegalInstruction Class = "illegal-instruction" // SIGILL, SIGFPE or SIGTRAP
	Abort              Class = "abort"               // SIGABRT, without an error that has a class of its own
	Killed             Class = "killed"              // by a signal from outside
	DiskFull           Class = "disk-full"           //
	AddressInUse       Class = "address-in-use"      //
	Permission         Class = "permission"          //
	FileNotFound       Class = "file-not-found"      //
	StoreTimeout       Class = "store-timeout"       // a store that is not there, or a key that was not set
	CollectiveTimeout  Class = "collective-timeout"  // a rank did not come
	PeerLost           Class = "peer-lost"           // another process is gone; its end is not known
	NCCLError          Class = "nccl-error"          //
	DeviceError        Class = "device-error"        // the accelerator or its driver, or a program's misuse of them
	Hardware           Class = "hardware"            // the machine: uncorrectable ECC errors, Xids, a device that is lost
	DataLoader         Class = "data-loader"         // a worker process of PyTorch's DataLoader
	UsageError         Class = "usage-error"         // the worker's command line
	Interrupted        Class = "interrupted"         // by SIGINT, such as ctrl-C
	Hang               Class = "hang"                // found by the hang detection, or by a timer
	Lost               Class = "node-lost"           //
	Unknown            Class = "unknown"             // no sign of any class
)

// sign identifies a class: parts of an error, in lower case.
type sign struct {
	class Class
	parts []string
}

// signs are in the order in which they count: the particular before the general.
func signs() []sign {
	return []sign{
		{Hardware, hardwareSigns()},
		{SIGBUSShm, []string{"out of shared memory", "insufficient shared memory", "unable to allocate shared memory",
			"to file </torch_", "resize file </torch_", "terminated with signal sigbus"}},
		{OOMDevice, []string{"cuda out of memory", "cuda error: out of memory", "cuda driver error: out of memory",
			"hip out of memory", "npu out of memory", "xpu out of memory", "cublas_status_alloc_failed",
			"cudnn_status_alloc_failed", "resource_exhausted: out of memory", "out of memory error on gpu"}},
		{StoreTimeout, []string{"socket has timed out", "socket timeout", "wait timeout", "clients joined"}},
		{CollectiveTimeout, timeouts()},
		{PeerLost, consequences()},
		{DeviceError, []string{"cuda error:", "cuda driver error", "hip error:", "cublas_status_", "cudnn_status_",
			"no cuda gpus are available", "found no nvidia driver", "no gpus found", "at least one cuda device",
			"not compiled with cuda enabled", "doesn't have nccl built in"}},
		{NCCLError, []string{"nccl error", "ncclsystemerror", "ncclinternalerror", "ncclinvalidusage",
			"ncclunhandledcudaerror", "hccl error"}},
		{DiskFull, []string{"no space left on device", "disk quota exceeded", "[errno 28]", "[errno 122]",
			"[errno 27]", "inline_container.cc"}},
		{AddressInUse, []string{"address already in use", "eaddrinuse"}},
		{OOMPython, []string{"memoryerror", "can't allocate memory", "cannot allocate memory", "std::bad_alloc",
			"can't start new thread"}},
		{ImportError, []string{"modulenotfounderror", "importerror", "no module named", "undefined symbol",
			"cannot open shared object file", "symbol lookup error", "syntaxerror:", "indentationerror:", "taberror:"}},
		{Permission, []string{"permissionerror", "permission denied", "operation not permitted", "read-only file system"}},
		{FileNotFound, []string{"filenotfounderror", "no such file or directory", "notadirectoryerror",
			"isadirectoryerror", "couldn't find them in the cached files",
			"repo id must be in the form"}}, // Hugging Face's, of a path that is not there
		{UsageError, []string{"not used by the hfargumentparser"}},
		{Assertion, []string{"assertionerror", "assertion `", "internal assert failed"}},
		{DataLoader, []string{"dataloader worker", "dataloader timed out"}},
		{Segfault, []string{"terminated with signal sigsegv"}},
		{Killed, []string{"terminated with signal sigkill", "terminated with signal sigterm"}},
		{Abort, []string{"terminated with signal sigabrt"}},
		{Interrupted, []string{"keyboardinterrupt"}},
	}
}

// classOfText is the class that an error is a sign of; "" if it is none.
func classOfText(text string) Class {
	text = strings.ToLower(text)
	for _, s := range signs() {
		if slices.ContainsFunc(s.parts, func(p string) bool { return strings.Contains(text, p) }) {
			return s.class
		}
	}
	return ""
}

// classOfSignal is the class of a worker that signal n ended.
func classOfSignal(n int) Class {
	switch n {
	case int(unix.SIGSEGV):
		return Segfault
	case int(unix.SIGBUS):
		return SIGBUSShm
	case int(unix.SIGILL), int(unix.SIGFPE), int(unix.SIGTRAP):
		return IllegalInstruction
	case int(unix.SIGABRT):
		return Abort
	case int(unix.SIGINT):
		return Interrupted
	}
	return Killed
}

// Class says what kind of fault f is. What the kernel and the launcher know comes first, then the signal, then the
// error that the worker tells of: its own line, then the errors that it came of, then, without an error, the end of the
// output. Where that leaves open whether a device is broken, the end of the output says so.
func (f Failure) Class() Class {
	c := f.class()
	if mayBeHardware(c) && IsHardware(f.LastLines) {
		return Hardware
	}
	return c
}

func (f Failure) class() Class {
	switch {
	case f.OOM != nil:
		return OOMKernel
	case f.Timer != "":
		return Hang
	case f.ExitCode < 0 && f.ExitCode != -int(unix.SIGABRT) && !f.Stopped:
		return classOfSignal(-f.ExitCode)
	}
	if c := f.told(); c != "" {
		return c
	}
	switch {
	case f.ExitCode < 0 && !f.Stopped:
		return classOfSignal(-f.ExitCode)
	case cause(f) != "":
		return UserException
	}
	return Unknown
}

// told is the class that the worker's own words are a sign of; "" if they are none.
func (f Failure) told() Class {
	e := cause(f)
	whole := f.Message + "\n" + wholeError(f.Traceback) + "\n" + wholeError(f.LastLines)
	c := cmp.Or(classOfText(e), classOfText(whole))
	if f.lostSharer() {
		c = DataLoader
	}
	switch {
	case c == DataLoader && classOfText(f.LastLines) == SIGBUSShm:
		return SIGBUSShm // PyTorch prints it beside the exception
	case c == "" && e == "":
		c = classOfOutput(f)
	}
	return c
}

// wholeError is the error that ended a worker, with those that it came of, without stacks.
func wholeError(text string) string {
	lines, _ := errorLines(text)
	return strings.Join(lines, "\n")
}

// fewLines are as many lines of output as programs print about their own end.
const fewLines = 4

// classOfOutput is the class of a worker that has told no error that is recognised.
func classOfOutput(f Failure) Class {
	lines := plainLines(f.LastLines, "") // PyTorch prints a stack at SIGABRT
	last := strings.Join(lines[max(0, len(lines)-fewLines):], "\n")
	if f.ExitCode == 2 && strings.Contains(strings.ToLower(last), "error: ") && strings.Contains(
		strings.ToLower(f.LastLines), "usage: ") {
		return UsageError
	}
	return classOfText(last)
}

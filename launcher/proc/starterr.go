package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

// lookPath finds a program named without a slash in PATH of env, as Python's
// subprocess does (and unlike os/exec, which uses the launcher's own PATH).
func lookPath(name string, env []string) (string, error) {
	if name == "" {
		return "", errors.New("cannot start a process: no program given")
	}
	if strings.Contains(name, "/") {
		return name, nil
	}
	var dirs string
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			dirs = v
		}
	}
	for _, dir := range filepath.SplitList(dirs) {
		path := filepath.Join(dir, name)
		if fi, err := os.Stat(path); err == nil && fi.Mode().IsRegular() && unix.Access(path, unix.X_OK) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("cannot start %s: not found in PATH (%s); give its path, or extend PATH: %w",
		name, dirs, fs.ErrNotExist)
}

// explainStart turns the bare errno of fork and exec into a text with the way out. The errno stays wrapped.
func explainStart(err error, path string, args []string, attr *os.ProcAttr) error {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return fmt.Errorf("cannot start %s: %w", path, err)
	}
	if fi, serr := os.Stat(attr.Dir); attr.Dir != "" && (serr != nil || !fi.IsDir()) {
		return fmt.Errorf("cannot start %s: working directory %s does not exist or is not a directory: %w",
			path, attr.Dir, errno)
	}
	file := path
	if !filepath.IsAbs(path) {
		file = filepath.Join(attr.Dir, path) // the kernel resolves it after chdir
	}
	if why := startReason(errno, file, args, attr.Env); why != "" {
		return fmt.Errorf("cannot start %s: %s: %w", path, why, errno)
	}
	return fmt.Errorf("cannot start %s: %w", path, err)
}

func startReason(errno unix.Errno, file string, args, env []string) string {
	switch errno {
	case unix.ENOENT, unix.ENOTDIR:
		return missingReason(file)
	case unix.EACCES, unix.EPERM:
		return deniedReason(file)
	case unix.ENOEXEC:
		return "neither a program for this machine nor a script with a #! line; start it with its interpreter"
	case unix.ETXTBSY:
		return "the file is open for writing; wait until the copy or build that writes it has finished"
	case unix.E2BIG:
		return fmt.Sprintf("%d bytes of arguments and %d bytes of environment are more than the kernel takes"+
			" (one string: 128 KiB; all: a quarter of the stack limit, see ulimit -s)", size(args), size(env))
	case unix.EAGAIN:
		return "the limit on processes is reached (ulimit -u, or pids.max of the cgroup)"
	}
	return ""
}

func missingReason(file string) string {
	if _, err := os.Stat(file); err != nil {
		return "file not found"
	}
	interp, ok := interpreter(file)
	switch {
	case !ok:
		return "the file exists but its loader does not: it was built for another system (glibc or musl, other architecture)"
	case strings.HasSuffix(interp, "\r"):
		return fmt.Sprintf("its interpreter %q does not exist: the script has DOS line ends, remove them (sed -i 's/\\r$//')",
			interp)
	default:
		return fmt.Sprintf("its interpreter %q (first line of the script) does not exist", interp)
	}
}

// interpreter returns the program on the #! line of a script.
func interpreter(file string) (string, bool) {
	f, err := openfile.OpenLinked(file)
	if err != nil {
		return "", false
	}
	defer f.Close()
	head := make([]byte, 256) // the kernel looks no further
	n, _ := f.Read(head)
	line, ok := bytes.CutPrefix(head[:n], []byte("#!"))
	if !ok {
		return "", false
	}
	line, _, _ = bytes.Cut(line, []byte("\n"))
	line, _, _ = bytes.Cut(bytes.TrimLeft(line, " \t"), []byte(" "))
	return string(line), true
}

func deniedReason(file string) string {
	fi, err := os.Stat(file)
	switch {
	case err != nil:
		return "permission denied for a directory on the way to it"
	case fi.IsDir():
		return "is a directory"
	case fi.Mode()&0o111 == 0:
		return fmt.Sprintf("not executable (mode %v): chmod +x it, or start it with its interpreter", fi.Mode())
	default:
		return "permission denied although the file is executable (mount with noexec, owner, or a security module)"
	}
}

func size(ss []string) (n int) {
	for _, s := range ss {
		n += len(s) + 1
	}
	return n
}

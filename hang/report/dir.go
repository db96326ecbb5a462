package report

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/tempdir"
)

// TimelinePath is xpu_timer's variable for the directory of its files.
const TimelinePath = "XPU_TIMER_TIMELINE_PATH"

// timeline is xpu_timer's directory without the variable. Its processes are root's.
const timeline = "/root/timeline"

// Dir is the directory for reports. It is $XPU_TIMER_TIMELINE_PATH, which is made if need be; else /root/timeline, if
// it is there; else Default, if it is not empty, and logDir; else a directory of this user alone below the one for
// temporary files. Directories that cannot be written to are passed over; skipped has the errors of those that it
// would have made. Only if all fail dir is empty.
func Dir(env func(string) (string, bool), meant bool, logDir string) (dir string, skipped []error) {
	return choose(env, timeline, Default(env, meant), logDir)
}

// Default is xpu_timer's own directory for its files where no variable names one, if the job was started with
// xpu_timer in mind (meant): /root/timeline, or ~/timeline of another user than root. "": there is none.
func Default(env func(string) (string, bool), meant bool) string {
	home, _ := env("HOME")
	switch named, _ := env(TimelinePath); {
	case !meant || named != "":
		return ""
	case os.Geteuid() == 0:
		return timeline
	case !filepath.IsAbs(home):
		return ""
	}
	return filepath.Join(home, filepath.Base(timeline))
}

func choose(env func(string) (string, bool), timeline, standard, logDir string) (dir string, skipped []error) {
	named, _ := env(TimelinePath)
	for _, c := range []struct {
		dir  string
		make bool
		tell string
	}{{named, true, "$" + TimelinePath}, {timeline, false, ""}, {standard, true, "xpu_timer's directory"},
		{logDir, true, "the directory of the logs"}} {
		if c.dir == "" {
			continue
		}
		err := usable(c.dir, c.make)
		if err == nil {
			return c.dir, skipped
		}
		if c.tell != "" {
			skipped = append(skipped, fmt.Errorf("no reports in %s: %w", c.tell, err))
		}
	}
	err := tempdir.First(func(base string) (err error) {
		dir, err = private(base)
		return err
	})
	if err != nil {
		return "", append(skipped, err)
	}
	return dir, skipped
}

func usable(dir string, create bool) error {
	if create {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory", dir)
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return &os.PathError{Op: "write to", Path: dir, Err: err}
	}
	return nil
}

// private is a directory of this user in one that all users may write to: another user's directory is not used.
func private(in string) (string, error) {
	dir := filepath.Join(in, "dlrover-hang-"+strconv.Itoa(os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || info.Mode().Perm()&0o022 != 0 || !ok || int(owner.Uid) != os.Getuid() {
		return "", fmt.Errorf("no reports in %s: it has to be a directory of this user that nobody else may write to", dir)
	}
	return dir, nil
}

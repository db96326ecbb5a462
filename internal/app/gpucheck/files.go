package gpucheck

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"dlrover-run/switchbox"
)

// unlisted reports the device files of dir that lead to no GPU of NVML; listed has the minor numbers of NVML's GPUs. A
// GPU whose file is not known is assumed to have one of the files left over.
func unlisted(dir string, listed []int) []switchbox.Finding {
	var lost, stale []string
	for _, n := range deviceFiles(dir) {
		if slices.Contains(listed, n) {
			continue
		}
		path := filepath.Join(dir, "nvidia"+strconv.Itoa(n))
		switch err := open(path); {
		case errors.Is(err, os.ErrPermission), errors.Is(err, os.ErrNotExist): // another container's
		case errors.Is(err, syscall.ENXIO), errors.Is(err, syscall.ENODEV):
			stale = append(stale, fmt.Sprintf("%s (%v)", path, err))
		case err != nil:
			lost = append(lost, fmt.Sprintf("%s (%v)", path, err))
		default:
			lost = append(lost, path)
		}
	}
	unknown := len(slices.DeleteFunc(slices.Clone(listed), func(n int) bool { return n >= 0 }))
	if len(lost)+len(stale) <= unknown {
		return nil
	}
	f := switchbox.Finding{Check: adaptor, Kind: "gpu.lost", Severity: switchbox.Warn,
		Text: "NVML lists no GPU for " + strings.Join(append(lost, stale...), ", ")}
	if unknown > 0 {
		f.Text += fmt.Sprintf(" but %d", unknown)
	}
	if len(lost) > unknown {
		f.Severity = switchbox.Fatal
	}
	return []switchbox.Finding{f}
}

// deviceFiles are the numbers of dir's files nvidia0, nvidia1, ..., ascending.
func deviceFiles(dir string) (all []int) {
	entries, _ := os.ReadDir(dir) // none without a driver
	for _, e := range entries {
		number, found := strings.CutPrefix(e.Name(), "nvidia")
		if n, err := strconv.Atoi(number); found && err == nil && n >= 0 && strconv.Itoa(n) == number {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all
}

// open returns an error unless the kernel's driver lets this process use a device.
func open(path string) error {
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return syscall.Close(fd)
}

package torchpython

import (
	"os"
	"os/exec"
	"path/filepath"
)

// Interpreter returns one of a version of Python such as 3.8, with or without PyTorch, "" if there is none: on PATH, or
// where pyenv has them.
func Interpreter(version string) string {
	works := func(path string) bool {
		check := "import sys; sys.exit(not ('%d.%d.' % sys.version_info[:2]).startswith(sys.argv[1] + '.'))"
		return exec.Command(path, "-c", check, version).Run() == nil
	}
	if path, err := exec.LookPath("python" + version); err == nil && works(path) {
		return path
	}
	home, _ := os.UserHomeDir()
	installed, _ := filepath.Glob(filepath.Join(home, ".pyenv/versions", version+".*", "bin/python"))
	for _, path := range installed {
		if works(path) {
			return path
		}
	}
	return ""
}

package run

import (
	"fmt"
	"path/filepath"
)

// python finds the workers' interpreter: $PYTHON_EXEC, then that of the venv with the launcher in its bin, then the
// first in PATH. torchrun runs the interpreter of its own installation.
func (r *resolver) python() (string, error) {
	if p := r.lookup("PYTHON_EXEC"); p != "" {
		path, err := r.host.lookPath(p)
		if err != nil {
			return "", &unusableError{fmt.Errorf("$PYTHON_EXEC=%q cannot be executed: %w", p, err)}
		}
		return path, nil
	}
	for _, bin := range r.host.venvs() {
		for _, name := range []string{"python3", "python"} {
			if path, err := r.host.lookPath(filepath.Join(bin, name)); err == nil {
				return path, nil
			}
		}
	}
	for _, name := range []string{"python3", "python"} {
		if path, err := r.host.lookPath(name); err == nil {
			return path, nil
		}
	}
	return "", &unusableError{
		fmt.Errorf("no python3 or python in PATH; set PYTHON_EXEC to the interpreter, or use --no-python"),
	}
}

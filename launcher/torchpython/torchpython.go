// Package torchpython finds the Python with PyTorch that tests, demo and bench use.
package torchpython

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"
)

// variable names the interpreter; without it System is used.
const variable = "TORCH_PYTHON"

// System is where the packages of a Linux distribution install PyTorch.
const System = "/usr/bin/python3"

// probeBudget is ample for an import of PyTorch from a cold disk.
const probeBudget = 2 * time.Minute

// Path returns the interpreter, which need not exist.
func Path() string { return cmp.Or(os.Getenv(variable), System) }

// Chosen returns the interpreter of $TORCH_PYTHON, "" if none is chosen.
func Chosen() string { return os.Getenv(variable) }

// Require returns the interpreter. When it cannot import PyTorch the test fails if the user chose it, and is skipped
// otherwise; untested names in capitals the parts that then are not tested.
func Require(t testing.TB, untested string) string {
	t.Helper()
	err := imported()
	if err != nil && Chosen() != "" {
		t.Fatalf("$%s=%s: %v", variable, Chosen(), err)
	}
	if err != nil {
		t.Skipf("SKIPPED: %s NOT TESTED: %v; install PyTorch (apt-get install python3-torch), or name a Python with it in %s",
			untested, err, variable)
	}
	return Path()
}

// imported is asked once a process, and looks for the package only: an import takes two seconds of CPU. Tests with a
// PyTorch that is there and cannot be imported fail.
var imported = sync.OnceValue(func() error {
	ctx, cancel := context.WithTimeout(context.Background(), probeBudget)
	defer cancel()
	out, err := exec.CommandContext(ctx, Path(), "-c", "import importlib.util as u; s = u.find_spec('torch'); "+
		"assert s and s.origin, 'No module named torch'").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s cannot import torch: %w %s", Path(), err, out)
	}
	return nil
})

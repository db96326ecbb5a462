package run

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/lighthouse"
	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/pyenv"
	"dlrover-run/launcher/scheduler"
)

// autoPreset is the --preset that depends on the script.
const autoPreset = "auto"

// framework is the framework of the workers, and the values that its preset needs.
type framework struct {
	preset preset.Preset
	why    string // in one line, with --preset=auto
	// port is that of the framework's own service if the user chose one; 0: the first that node 0 offers.
	port     int
	servers  int // side processes of the framework
	devices  int // accelerators of this node, if the preset needs them
	device   string
	virtual  bool // --virtual-local-rank
	oldTorch bool // the workers' torch is older than 2.2
}

// pick finds the preset of a world of this many workers, and warns of signs against it.
func (f *framework) pick(o *options, s *scheduler.Facts, dir workdir, workers int) (err error) {
	name := o.String("preset")
	if s.Share != "" {
		if name, err = presetByScheduler(o, s, name); err != nil {
			return err
		}
	}
	auto := name == autoPreset
	path, src := readScript(o, name, dir, workers)
	found := preset.Imports(src)
	if auto {
		name, f.why = autoPresetOf(path, found)
	} else if why := preset.Misfit(name, found, workers); why != "" {
		o.Warn("%s: %s", path, why)
	}
	if f.preset, err = preset.Lookup(name); err != nil {
		return err
	}
	if o.Bool("no-local-rank") || auto && !bytes.Contains(src, []byte("local_rank")) {
		f.preset.Args = nil // the script does not know --local_rank
	}
	f.warn(o, path, found, workers)
	if f.preset.Devices && o.String("accelerator") != feature.NoAccelerator {
		f.devices, f.device = o.host.gpus()
	}
	return nil
}

// presetByScheduler is the preset of a scheduler whose pods are those of one framework.
func presetByScheduler(o *options, f *scheduler.Facts, name string) (string, error) {
	if o.IsSet("preset") && name != autoPreset && name != f.Preset {
		return "", fmt.Errorf("--preset=%s, but the pods of %s are those of --preset=%s: leave the option out, or give "+
			"--scheduler=none", name, f.Name, f.Preset)
	}
	return f.Preset, nil
}

// autoPresetOf picks the preset by the imports of the script at path, and gives the reason.
func autoPresetOf(path string, found []preset.Import) (name, why string) {
	name, by, ok := preset.Choose(found)
	switch {
	case ok:
		return name, fmt.Sprintf("line %d of %s: %s", by.Line, path, by.Text)
	case path == "":
		return "torch", "the program is not a Python script that can be looked at"
	}
	return "torch", path + " imports no framework that is known"
}

// warn warns of settings that only the user can change.
func (f *framework) warn(o *options, path string, found []preset.Import, workers int) {
	for _, name := range f.preset.Wants {
		if _, ok := o.env(name); !ok && !(name == lighthouse.Variable && o.Int("replica-groups") > 0) {
			o.Warn("--preset=%s: $%s is not set; scripts that do not name it themselves fail", f.preset.Name, name)
		}
	}
	if by, ok := preset.StartsMPI(found); ok && f.preset.Name == "mpi" && workers > 1 {
		o.Warn("%s: line %d (%s) may call MPI_Init, and --preset=mpi only sets variables: without mpirun each worker is an "+
			"MPI world of its own", path, by.Line, by.Text)
	}
}

// look looks for the version of torch that the program at path imports.
func (f *framework) look(o *options, path string) {
	f.virtual = o.Bool("virtual-local-rank")
	if o.Bool("no-python") && !strings.HasPrefix(filepath.Base(path), "python") {
		path, _ = o.Python() // the one that a shell script would start
	}
	if major, minor, ok := pyenv.TorchRelease(path, o.env); ok {
		f.oldTorch = major < 2 || major == 2 && minor < 2
	}
}

// readScript reads the workers' program, if it is a Python file and its imports matter for the preset. Otherwise it is
// nil.
func readScript(o *options, preferred string, dir workdir, workers int) (path string, src []byte) {
	path = scriptPath(o, dir)
	if path == "" || preferred == "torch" && workers < 2 {
		return "", nil
	}
	if src, _ = openfile.ReadLinked(dir.file(path), preset.MaxScript); src == nil {
		return "", nil
	}
	if preferred == "torch" && !preset.Telling(src) {
		return path, nil
	}
	return path, src
}

// scriptPath is the Python file that the command line names, relative to the working directory; "" if there is none.
func scriptPath(o *options, dir workdir) string {
	args := o.Args()
	if len(args) == 0 || o.Bool("check-only") {
		return ""
	}
	switch {
	case o.Bool("module"):
		return dir.module(args[0])
	case o.Bool("no-python") && strings.HasPrefix(filepath.Base(args[0]), "python"):
		for args = args[1:]; len(args) > 0 && strings.HasPrefix(args[0], "-"); {
			args = args[1:]
		}
	}
	if len(args) == 0 || !strings.HasSuffix(args[0], ".py") {
		return ""
	}
	return args[0]
}

// module is the file of a module below the working directory; "" if it is elsewhere.
func (d workdir) module(name string) string {
	base := filepath.Join(strings.Split(name, ".")...)
	for _, path := range []string{base + ".py", filepath.Join(base, "__main__.py")} {
		if info, err := os.Stat(d.file(path)); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

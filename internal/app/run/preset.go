package run

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/preset"
)

// autoPreset is the --preset that depends on the script.
const autoPreset = "auto"

// pickPreset finds the preset of the workers' framework, and warns of signs against it.
func (r *resolver) pickPreset() (err error) {
	name := r.c.String("preset")
	if f := &r.s.scheduler; f.Share != "" {
		if name, err = r.presetByScheduler(name); err != nil {
			return err
		}
	}
	auto := name == autoPreset
	path, src := r.script(name)
	found := preset.Imports(src)
	if auto {
		name, r.s.presetWhy = autoPresetOf(path, found)
	} else if why := preset.Misfit(name, found, r.s.params.Max*r.s.slots); why != "" {
		r.warn("%s: %s", path, why)
	}
	if r.s.preset, err = preset.Lookup(name); err != nil {
		return err
	}
	if r.c.Bool("no-local-rank") || auto && !bytes.Contains(src, []byte("local_rank")) {
		r.s.preset.Args = nil // the script does not know --local_rank
	}
	r.warnOfPreset(path, found)
	if r.s.preset.Devices && r.c.String("accelerator") != noAccelerator {
		r.s.devices, r.s.device = r.host.gpus()
	}
	return nil
}

// presetByScheduler is the preset of a scheduler whose pods are those of one framework.
func (r *resolver) presetByScheduler(name string) (string, error) {
	f := &r.s.scheduler
	if r.c.IsSet("preset") && name != autoPreset && name != f.Preset {
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
		return "torch", "the program is no Python script that can be looked at"
	}
	return "torch", path + " imports no framework that is known"
}

// warnOfPreset warns of settings that only the user can change.
func (r *resolver) warnOfPreset(path string, found []preset.Import) {
	for _, name := range r.s.preset.Wants {
		if _, ok := r.env(name); !ok {
			r.warn("--preset=%s: $%s is not set; scripts that do not name it themselves fail", r.s.preset.Name, name)
		}
	}
	if by, ok := preset.StartsMPI(found); ok && r.s.preset.Name == "mpi" && r.s.params.Max*r.s.slots > 1 {
		r.warn("%s: line %d (%s) may call MPI_Init, and --preset=mpi only sets variables: without mpirun each worker is an "+
			"MPI world of its own", path, by.Line, by.Text)
	}
}

// script reads the workers' program, if it is a Python file and its imports matter for the preset. Otherwise it is
// nil.
func (r *resolver) script(name string) (path string, src []byte) {
	path = r.scriptPath()
	if path == "" || name == "torch" && r.s.params.Max*r.s.slots < 2 {
		return "", nil
	}
	if src, _ = openfile.ReadLinked(r.s.inWorkdir(path), preset.MaxScript); src == nil {
		return "", nil
	}
	if name == "torch" && !preset.Telling(src) {
		return path, nil
	}
	return path, src
}

// scriptPath is the Python file that the command line names, relative to the working directory; "" if there is none.
func (r *resolver) scriptPath() string {
	args := r.c.Args()
	if len(args) == 0 || r.c.Bool("check-only") {
		return ""
	}
	switch {
	case r.c.Bool("module"):
		return r.modulePath(args[0])
	case r.c.Bool("no-python") && strings.HasPrefix(filepath.Base(args[0]), "python"):
		for args = args[1:]; len(args) > 0 && strings.HasPrefix(args[0], "-"); {
			args = args[1:]
		}
	}
	if len(args) == 0 || !strings.HasSuffix(args[0], ".py") {
		return ""
	}
	return args[0]
}

// modulePath is the file of a module below the working directory; "" if it is elsewhere.
func (r *resolver) modulePath(module string) string {
	base := filepath.Join(strings.Split(module, ".")...)
	for _, path := range []string{base + ".py", filepath.Join(base, "__main__.py")} {
		if info, err := os.Stat(r.s.inWorkdir(path)); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

// Package pyenv finds out about Python installations from their files, without running an interpreter.
package pyenv

import (
	"cmp"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/argv"
)

// LauncherVenvs returns the bin directories of the venvs that the launcher lies in. First are those of the path by
// which it was called, and of the links from there to the file. Each of them may be a venv's. The last is that of
// the file itself.
func LauncherVenvs(arg0 string) (bins []string) {
	file, err := os.Executable()
	if err != nil {
		return nil // no /proc; PATH decides
	}
	for _, path := range append(hops(calledAs(arg0, file)), file) {
		bin := filepath.Dir(path)
		if filepath.Base(bin) == "bin" && isFile(filepath.Join(filepath.Dir(bin), "pyvenv.cfg")) {
			bins = append(bins, bin)
		}
	}
	return bins
}

// calledAs is the absolute path that arg0, looked up as a shell does, stands for. It is "" if that is not file,
// because a program's caller chooses its arg0 freely.
func calledAs(arg0, file string) string {
	path, err := exec.LookPath(arg0)
	if err != nil {
		return ""
	}
	if path, err = filepath.Abs(path); err != nil || !sameFile(path, file) {
		return ""
	}
	return path
}

// maxLinks is how many links to a file the kernel follows.
const maxLinks = 40

// hops are path, unless it is "", and the files that it leads to, link by link.
func hops(path string) (paths []string) {
	for path != "" && len(paths) <= maxLinks {
		paths = append(paths, path)
		next, err := os.Readlink(path)
		if err != nil {
			break
		}
		if !filepath.IsAbs(next) {
			// The kernel follows links in the directory's path before "..".
			dir, err := filepath.EvalSymlinks(filepath.Dir(path))
			if err != nil {
				break
			}
			next = filepath.Join(dir, next)
		}
		path = next
	}
	return paths
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

func isFile(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular()
}

// TorchRelease finds the major and minor number of the torch that python would import. It does not run python,
// because an interpreter takes longer to start than this whole program. It looks where installers put packages. ok
// is false when torch is elsewhere (behind a wrapper script, in a source tree) or not installed.
func TorchRelease(python string, env argv.LookupEnv) (major, minor int, ok bool) {
	for _, dir := range packageDirs(python, env) {
		if major, minor, ok = releaseIn(filepath.Join(dir, "torch", "version.py")); ok {
			return major, minor, true
		}
	}
	return 0, 0, false
}

// HasPackage reports whether python can import a package. It looks in the places where installers put packages.
func HasPackage(python, name string, env argv.LookupEnv) bool {
	for _, dir := range packageDirs(python, env) {
		if isFile(filepath.Join(dir, name, "__init__.py")) {
			return true
		}
	}
	return false
}

// packageDirs lists where python looks for packages, in its order.
func packageDirs(python string, env argv.LookupEnv) (dirs []string) {
	path, _ := env("PYTHONPATH")
	for _, dir := range filepath.SplitList(path) {
		if dir != "" {
			dirs = append(dirs, dir)
		}
	}
	// The last file of the chain of links is named after the version, such as python3.11.
	file, err := filepath.EvalSymlinks(python)
	if err != nil {
		return dirs
	}
	version := strings.TrimPrefix(filepath.Base(file), "python")
	cfg := venvConfig(python)
	if !strings.Contains(version, ".") { // a copy
		version = release(cmp.Or(cfg["version"], cfg["version_info"]))
	}
	if cfg["home"] != "" {
		dirs = append(dirs, sitePackages(cfg["prefix"], version)...)
		if !strings.EqualFold(cfg["include-system-site-packages"], "true") {
			return dirs
		}
	}
	if off, _ := env("PYTHONNOUSERSITE"); off == "" {
		user, _ := env("PYTHONUSERBASE")
		if home, _ := env("HOME"); user == "" && home != "" {
			user = filepath.Join(home, ".local")
		}
		dirs = append(dirs, sitePackages(user, version)...)
	}
	prefix := filepath.Dir(filepath.Dir(file))
	if prefix == "/usr" && strings.HasPrefix(version, "3.") {
		dirs = append(dirs, "/usr/local/lib/python"+version+"/dist-packages", "/usr/lib/python3/dist-packages") // Debian's
	}
	return append(dirs, sitePackages(prefix, version)...)
}

// release is the major and minor number of a full version.
func release(version string) string {
	parts := strings.SplitN(version, ".", 3)
	return strings.Join(parts[:min(2, len(parts))], ".")
}

func sitePackages(prefix, version string) []string {
	if prefix == "" {
		return nil
	}
	return []string{
		filepath.Join(prefix, "lib", "python"+version, "site-packages"),
		filepath.Join(prefix, "lib64", "python"+version, "site-packages"),
	}
}

// venvConfig reads the pyvenv.cfg of the venv with the interpreter python, and adds its prefix; nil if there is no
// such venv.
func venvConfig(python string) map[string]string {
	bin := filepath.Dir(python)
	for _, prefix := range []string{bin, filepath.Dir(bin)} {
		text, err := readHead(filepath.Join(prefix, "pyvenv.cfg"))
		if err != nil {
			continue
		}
		cfg := map[string]string{"prefix": prefix}
		for line := range strings.Lines(text) {
			if key, value, found := strings.Cut(line, "="); found {
				cfg[strings.ToLower(strings.TrimSpace(key))] = strings.TrimSpace(value)
			}
		}
		return cfg
	}
	return nil
}

// releaseIn reads torch/version.py: __version__ = '2.15.0+cu132'.
func releaseIn(path string) (major, minor int, ok bool) {
	text, err := readHead(path)
	if err != nil {
		return 0, 0, false
	}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, "=")
		if strings.TrimSpace(name) != "__version__" {
			continue
		}
		parts := strings.SplitN(strings.Trim(value, " \t\r\n'\""), ".", 3)
		if len(parts) < 2 {
			return 0, 0, false
		}
		major, err1 := strconv.Atoi(parts[0])
		minor, err2 := strconv.Atoi(parts[1])
		return major, minor, err1 == nil && err2 == nil
	}
	return 0, 0, false
}

// readHead reads the first 4 KiB of a regular file, more than those that it is for have.
func readHead(path string) (string, error) {
	f, err := openfile.OpenLinked(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 4<<10))
	return string(text), err
}

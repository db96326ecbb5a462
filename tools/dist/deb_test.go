package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// testPages gives a release pages, each with its name in it.
func testPages(t *testing.T, r *release) {
	t.Helper()
	r.pages = t.TempDir()
	for _, p := range []string{"dlrover-run", "dlrover-master", "checkpointd", "dlroverctl", gpucheck} {
		for _, path := range []string{"man/" + p + ".1", "bash/" + p, "zsh/_" + p, "fish/" + p + ".fish"} {
			text := path + "\n"
			if strings.HasPrefix(path, "man/") {
				text = ".TH " + p + " 1\n.SH NAME\n" + p + " \\- a program\n"
			}
			path = filepath.Join(r.pages, path)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		}
	}
}

func needs(t *testing.T, program, lost string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("SKIPPED: NO %s HERE, SO %s", strings.ToUpper(program), lost)
	}
}

func TestDeb(t *testing.T) {
	t.Parallel()
	needs(t, "dpkg-deb", "NO DEBIAN PACKAGE IS MADE")
	r := testRelease(t)
	testPages(t, r)
	for _, d := range debs() {
		require.NoError(t, r.writeDeb(r.out, d, amd64))
	}
	path, data := one(t, r.out, "*.deb") // there is no gpucheck
	require.Equal(t, "dlrover-run_1.2.3-1_amd64.deb", filepath.Base(path))
	out, err := exec.Command("dpkg-deb", "-c", path).Output()
	require.NoError(t, err)
	for _, line := range []string{
		`-rwxr-xr-x root/root +\d+ 2023-11-14 22:13 ./usr/bin/dlrover-run`,
		`-rw------- root/root +\d+ 2023-11-14 22:13 ./etc/default/dlrover-master`,
		`./usr/share/man/man1/checkpointd.1.gz`, `./usr/lib/systemd/system/dlrover-master.service`,
		`./usr/share/zsh/vendor-completions/_dlroverctl`, `./usr/share/doc/dlrover-run/examples/demo.py`,
	} {
		require.Regexp(t, `(?m)`+line+`$`, string(out))
	}
	dir := t.TempDir()
	require.NoError(t, exec.Command("dpkg-deb", "-R", path, dir).Run())
	sums := exec.Command("md5sum", "--quiet", "-c", "DEBIAN/md5sums")
	sums.Dir = dir
	out, err = sums.CombinedOutput()
	require.NoError(t, err, string(out))

	require.NoError(t, r.writeDeb(r.out, debs()[0], amd64))
	_, again := one(t, r.out, "*.deb")
	require.True(t, bytes.Equal(data, again), "other bytes the second time")
	lint(t, path)
}

// lint asks Debian's checker. It says why of all that the overrides allow.
func lint(t *testing.T, path string) {
	t.Helper()
	needs(t, "lintian", "THE DEBIAN PACKAGES ARE NOT CHECKED")
	out, err := exec.Command("lintian", "--allow-root", path).CombinedOutput()
	require.NoError(t, err, string(out))
	said := strings.ReplaceAll(string(out), "running with root privileges is not recommended!", "")
	require.Empty(t, strings.TrimSpace(said))
}

// The unit starts with the settings as they are installed.
func TestUnit(t *testing.T) {
	needs(t, "systemd-analyze", "THE UNIT IS NOT CHECKED")
	unit, err := debian.ReadFile("debian/dlrover-run/usr/lib/systemd/system/dlrover-master.service")
	require.NoError(t, err)
	text := strings.ReplaceAll(string(unit), "/usr/bin/dlrover-master", "/bin/true")
	text = strings.ReplaceAll(text, "man:dlrover-master(1)", "man:true(1)")
	path := filepath.Join(t.TempDir(), "dlrover-master.service")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	out, err := exec.Command("systemd-analyze", "verify", path).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Empty(t, string(out))
}

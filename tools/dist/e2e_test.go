package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/require"
)

// The end-to-end tests use dist/ as a user does: in the root of a small Debian with PyTorch and without Go, behind
// nothing but loopback. Each has a copy of its own, in memory, that is gone with its processes. "make e2e-dist".

// baseRoot is that Debian. DIST_ROOT names it.
func baseRoot(t *testing.T) string {
	t.Helper()
	root := os.Getenv("DIST_ROOT")
	if root == "" {
		t.Skip("SKIPPED: NO PACKAGE IS INSTALLED AND USED; make e2e-dist does that")
	}
	require.Zero(t, os.Getuid(), "namespaces and chroot need root")
	return root
}

// prepare makes a container: $1 is the root below it, or "" for none, $2 dist/, $3 a tar for its root, or "". It ends
// in $root, as process 1.
const prepare = `
base=$1 dist=$2 layer=$3 root=$4
shift 4
mount -t tmpfs -o mode=755 tmpfs "$root"
if [ -n "$base" ]; then
  mkdir "$root/up" "$root/work" "$root/root"
  mount -t overlay -o "lowerdir=$base,upperdir=$root/up,workdir=$root/work" overlay "$root/root"
  root=$root/root
fi
[ -z "$layer" ] || tar -xpf "$layer" -C "$root"
mkdir -p "$root/proc" "$root/dev" "$root/dist" "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for device in null zero random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mount --bind "$dist" "$root/dist"
mount -t proc proc "$root/proc"
ip link set lo up
`

// container runs what follows prepare, with its own processes, network and mounts.
func container(t *testing.T, base, layer, then string, args ...string) string {
	t.Helper()
	dist, err := filepath.Abs("../../dist")
	require.NoError(t, err)
	command := append([]string{"--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child", "--", "sh", "-ec",
		prepare + then, "sh", base, dist, layer, t.TempDir()}, args...)
	cmd := exec.CommandContext(t.Context(), "unshare", command...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	t.Logf("%s", out)
	return string(out)
}

// inDebian runs a script in a copy of the Debian.
func inDebian(t *testing.T, script string) string {
	t.Helper()
	const begin = "if command -v go; then exit 1; fi; cd /dist/$(uname -m)\n"
	return container(t, baseRoot(t), "", `exec chroot "$root" /bin/sh -exc "$1"`, begin+script)
}

// trained asserts that the demo has lost a worker and has come to its end.
func trained(t *testing.T, out string) {
	t.Helper()
	require.Contains(t, out, "kill -9 of myself at step 80")
	require.Regexp(t, `2 workers train from step 80, \d+\.\d s after the kill at step 80, with the state that was in `+
		`memory`, out)
	require.Regexp(t, `trained 160 steps: (9\d|100) % of the points are on the right side`, out)
}

func TestE2EWheel(t *testing.T) {
	out := inDebian(t, `
python3 -m venv --system-site-packages /venv # which sees Debian's PyTorch
/venv/bin/pip install --no-index *.whl
/venv/bin/python -m dlrover_run.demo
cat >/job.py <<'end'
import os, dlrover_run
def rank(): return int(os.environ["RANK"])
if __name__ == "__main__": print("launched", dlrover_run.launch(rank, nproc_per_node=2))
end
PATH=/usr/bin:/bin /venv/bin/python /job.py
/venv/bin/dlrover-run --version
for program in dlrover-master checkpointd dlroverctl gpucheck; do /venv/bin/$program --version; done
/venv/bin/pip uninstall -qy dlrover-run-go dlrover-run-go-master dlrover-run-go-gpucheck
ls /venv/bin | grep dlrover || echo nothing is left`)
	trained(t, out)
	require.Contains(t, out, "launched {0: 0, 1: 1}\n")
	require.Contains(t, out, "/venv/bin/dlrover-run is of dlrover-run-go, not of the Python package dlrover\n")
	require.Contains(t, out, "\nnothing is left\n")
}

// Two packages have a file of one name.
func TestE2EBesideDLRover(t *testing.T) {
	out := inDebian(t, `
python3 -m venv /venv
pip="/venv/bin/pip --quiet" ours="install --no-index dlrover_run_go-*.whl"
theirs="install --no-deps --no-index /dlrover/dlrover-*.whl"
$pip $theirs; $pip $ours
/venv/bin/dlrover-run --version
mkdir /names; /venv/bin/dlroverctl install-names /names torchrun
$pip uninstall -y dlrover
/venv/bin/python -m dlrover_run --version || echo A
/venv/bin/dlroverctl install-names /names torchrun || echo B
$pip install --force-reinstall --no-deps --no-index dlrover_run_go-*.whl
/venv/bin/python -m dlrover_run --version
$pip $theirs
/venv/bin/dlroverctl install-names /names torchrun || echo C
/venv/bin/python -m dlrover_run --version || echo D
$pip uninstall -y dlrover-run-go
test ! -e /venv/bin/dlrover-run
$pip install --force-reinstall --no-deps --no-index /dlrover/dlrover-*.whl
head -1 /venv/bin/dlrover-run`)
	mine := "/venv/bin/dlrover-run is of dlrover-run-go"
	require.Equal(t, 2, strings.Count(out, "\n"+mine), out)
	require.Contains(t, out, "/venv/bin/dlrover-run is this program, and also a file of dlrover 0.6.1")
	const back = "pip install --force-reinstall --no-deps dlrover_run_go-*.whl"
	require.Contains(t, out, "dlrover_run: /venv/bin/dlrover-run is missing: "+back)
	require.Contains(t, out, "if pip has removed it with another package: "+back)
	require.Contains(t, out, "/venv/bin/dlrover-run is a script of dlrover 0.6.1, to which the links would lead: "+back)
	require.Contains(t, out, "dlrover_run: /venv/bin/dlrover-run is the script of another package: "+back)
	for _, refused := range []string{"A", "B", "C", "D"} {
		require.Contains(t, out, "\n"+refused+"\n")
	}
	require.Contains(t, out, "\n#!/venv/bin/python3\n")
}

func TestE2EDeb(t *testing.T) {
	out := inDebian(t, `
dpkg -i *.deb
python3 /usr/share/doc/dlrover-run/examples/demo.py
dpkg -V dlrover-run dlrover-run-gpucheck
dlroverctl --version
test ! -e /etc/systemd/system/multi-user.target.wants/dlrover-master.service
zcat /usr/share/man/man1/dlrover-run.1.gz | grep -c nproc
dpkg -r dlrover-run dlrover-run-gpucheck; dpkg -P dlrover-run dlrover-run-gpucheck
find / -xdev -name '*dlrover*' -not -path '/proc/*' -not -path '/dist/*' -not -path '/dlrover*'`)
	trained(t, out)
	_, left, _ := strings.Cut(out, "\n+ find ")
	require.Equal(t, 1, strings.Count(left, "\n"), "left behind: %s", left)
}

// imageOf unpacks an image of this machine's architecture: its configuration, and its layer in a file.
func imageOf(t *testing.T, pattern string) (config *v1.ConfigFile, layer string) {
	t.Helper()
	uname, err := exec.Command("uname", "-m").Output()
	require.NoError(t, err)
	path, _ := one(t, filepath.Join("../../dist", strings.TrimSpace(string(uname))), pattern)
	img, err := tarball.ImageFromPath(path, nil)
	require.NoError(t, err)
	config, err = img.ConfigFile()
	require.NoError(t, err)
	layers, err := img.Layers()
	require.NoError(t, err)
	require.Len(t, layers, 1)
	in, err := layers[0].Uncompressed()
	require.NoError(t, err)
	var data bytes.Buffer
	_, err = io.Copy(&data, in)
	require.NoError(t, err)
	layer = filepath.Join(t.TempDir(), "layer.tar")
	require.NoError(t, os.WriteFile(layer, data.Bytes(), 0o600))
	return config, layer
}

// run starts an image as an engine of containers does: its entry point is process 1, of its user, with its environment
// alone, and what can be written is in memory.
func run(t *testing.T, base, pattern string, args ...string) string {
	t.Helper()
	config, layer := imageOf(t, pattern)
	command := append([]string{"-i"}, config.Config.Env...)
	command = append(command, "/usr/sbin/chroot", "--userspec="+config.Config.User, "ROOT")
	command = append(append(command, config.Config.Entrypoint...), args...)
	return container(t, base, layer, `mount -o remount,ro "$root"
for arg; do shift; [ "$arg" != ROOT ] || arg=$root; set -- "$@" "$arg"; done
exec env "$@"`, command...)
}

func TestE2EImage(t *testing.T) {
	base := baseRoot(t)
	const job = `echo rank $RANK of $WORLD_SIZE, launched by process $PPID of user $(id -u); touch /a || :`
	for _, c := range []struct {
		base, image string
		args        []string
		want        []string
	}{
		{"", "dlrover-run-launcher-*-image.tar", []string{"--no-python", "--nproc-per-node=2", "/usr/local/bin/dlrover-run",
			"--version"}, []string{"/usr/local/bin/dlrover-run is of dlrover-run-go"}},
		{"", "dlrover-run-[^l]*-image.tar", []string{"--no-python", "dlroverctl", "--version"}, []string{"dlroverctl "}},
		{base, "dlrover-run-[^l]*-image.tar", []string{"--standalone", "--no-python", "--nproc-per-node=2", "sh", "-c", job},
			[]string{"rank 0 of 2, launched by process ", "rank 1 of 2", "of user 65534", "Read-only file system"}},
	} {
		out := run(t, c.base, c.image, c.args...)
		for _, want := range c.want {
			require.Contains(t, out, want)
		}
	}
	trained(t, run(t, base, "dlrover-run-[^l]*-image.tar", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
		"--warm", "--log-format=text", "/usr/local/share/doc/dlrover-run/demo.py"))
}

// The commands of the documentation are those of these tests.
func TestE2ECommandsAreDocumented(t *testing.T) {
	for file, commands := range map[string][]string{
		"README.md":             {"pip install dist/$(uname -m)/*.whl", "python -m dlrover_run.demo"},
		"docs/start/install.md": {"dpkg -i dist/$(uname -m)/*.deb", "python3 /usr/share/doc/dlrover-run/examples/demo.py"},
	} {
		text, err := os.ReadFile(filepath.Join("../..", file))
		require.NoError(t, err)
		for _, c := range commands {
			require.Contains(t, string(text), fmt.Sprint("    ", c), file)
		}
	}
}

package run

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/app/token"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/pyenv"
	"dlrover-run/rendezvous"
)

// hostFacts are the facts about this machine that settings need.
type hostFacts struct {
	id       string // random, of this process
	root     fs.FS  // the file system, for /sys, /proc and /dev
	name     string // host name
	cpus     func() int
	gpus     func() (n int, kind string)
	owns     func(host string) bool // whether host names this machine
	addrs    func() []string        // of this machine's interfaces, loopback left out
	route    func(host string, port int) string
	lookPath func(file string) (string, error)
	readFile func(path string) ([]byte, error) // that a scheduler names
	venvs    func() []string                   // bin directories of the venvs that the launcher lies in
	environ  func() []string                   // all variables, as KEY=VALUE
	shmFree  func() (int64, error)
}

func thisHost(env func(string) (string, bool)) hostFacts {
	name, err := os.Hostname()
	if err != nil {
		name = "localhost"
	}
	return hostFacts{
		id: randomID(), name: name, root: os.DirFS("/"), owns: ownsHost,
		addrs: networkAddresses, route: routeTo, lookPath: exec.LookPath, readFile: readNamed,
		cpus:  func() int { return proc.CPUCount("/proc", "/sys/fs/cgroup") },
		gpus:  sync.OnceValues(func() (int, string) { return proc.GPUCount("/", env) }), // takes a millisecond
		venvs: func() []string { return pyenv.LauncherVenvs(os.Args[0]) }, environ: os.Environ, shmFree: shmFree,
	}
}

func randomID() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// resolveTimeout bounds a name lookup; a name that takes longer is not our own.
const resolveTimeout = 5 * time.Second

// ownsHost decides, as torchrun does, whether the endpoint's host is this machine. It is for a loopback name, our
// own name, or a name or address of one of our interfaces.
func ownsHost(host string) bool {
	if token.Loopback(host) {
		return true
	}
	if name, err := os.Hostname(); err == nil && name == host {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return false
	}
	own := ownAddresses()
	for _, a := range addrs {
		if own[a.Unmap()] || a.IsLoopback() {
			return true
		}
	}
	return false
}

func ownAddresses() map[netip.Addr]bool {
	own := map[netip.Addr]bool{}
	as, _ := net.InterfaceAddrs() // none is as good as an error: nothing is ours
	for _, a := range as {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			own[p.Addr().Unmap()] = true
		}
	}
	return own
}

// networkAddresses are the addresses from which other nodes may see our workers.
func networkAddresses() []string {
	var out []string
	for a := range ownAddresses() {
		if !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			out = append(out, a.String())
		}
	}
	slices.Sort(out)
	return out[:min(len(out), rendezvous.MaxAddrs)]
}

// routeTo is our address on the way to host. No packet is sent: connecting a UDP
// socket only looks up the route.
func routeTo(host string, port int) string {
	c, err := net.DialTimeout("udp", net.JoinHostPort(host, strconv.Itoa(max(port, 1))), resolveTimeout)
	if err != nil {
		name, _ := os.Hostname()
		return name
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).IP.String()
}

// shmFree is the room in /dev/shm for this user, in bytes.
func shmFree() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}

//go:build linux

package sockets

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	if addr := os.Getenv("SOCKETS_TEST_DIAL"); addr != "" {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(nc.LocalAddr())
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func listen(t *testing.T, addr string) (string, uint16) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skipf("SKIPPED: CONNECTIONS TO %s ARE NOT TESTED: %v", addr, err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			if _, err := l.Accept(); err != nil {
				return
			}
		}
	}()
	return l.Addr().String(), uint16(l.Addr().(*net.TCPAddr).Port)
}

func dial(t *testing.T, addr string) netip.AddrPort {
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close() })
	end := netip.MustParseAddrPort(nc.LocalAddr().String())
	return netip.AddrPortFrom(end.Addr().Unmap(), end.Port())
}

// child connects to addr from a process of its own.
func child(t *testing.T, addr string) (pid int, end netip.AddrPort) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "SOCKETS_TEST_DIAL="+addr)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		require.NoError(t, cmd.Wait())
	})
	var line string
	_, err = fmt.Fscanln(out, &line)
	require.NoError(t, err)
	return cmd.Process.Pid, netip.MustParseAddrPort(line)
}

func TestLocal(t *testing.T) {
	for _, host := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(host, func(t *testing.T) {
			addr, port := listen(t, host)
			first, second := dial(t, addr), dial(t, addr)
			pid, third := child(t, addr)
			self := os.Getpid()
			got, err := Local([]int{self, pid}, port)
			require.NoError(t, err)
			require.ElementsMatch(t, []netip.AddrPort{first, second}, got[self])
			require.Equal(t, []netip.AddrPort{third}, got[pid])

			got, err = Local([]int{pid}, port)
			require.NoError(t, err)
			require.Equal(t, map[int][]netip.AddrPort{pid: {third}}, got, "only those that were asked for")
			got, err = Local([]int{pid}, port, netip.MustParseAddr("192.0.2.1"))
			require.NoError(t, err)
			require.Empty(t, got, "another host")
			got, err = Local([]int{pid}, port, netip.MustParseAddr("192.0.2.1"), netip.MustParseAddrPort(addr).Addr())
			require.NoError(t, err)
			require.Len(t, got, 1)
		})
	}
}

func TestIPv4OverIPv6(t *testing.T) {
	_, port := listen(t, "[::]:0")
	end := dial(t, fmt.Sprintf("[::ffff:127.0.0.1]:%d", port))
	got, err := Local([]int{os.Getpid()}, port, netip.MustParseAddr("::ffff:127.0.0.1"))
	require.NoError(t, err)
	require.Equal(t, []netip.AddrPort{end}, got[os.Getpid()])
	require.True(t, end.Addr().Is4())
}

func TestAProcessThatIsGone(t *testing.T) {
	addr, port := listen(t, "127.0.0.1:0")
	dial(t, addr)
	cmd := exec.Command("true")
	require.NoError(t, cmd.Run())
	got, err := Local([]int{cmd.Process.Pid, os.Getpid()}, port)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, fmt.Sprintf("process %d", cmd.Process.Pid))
	require.Len(t, got, 1, "the others are found all the same")
}

// fake makes a process whose files are as given.
func fake(t *testing.T, proc string, pid int, files map[string]string, links map[string]string) {
	dir := filepath.Join(proc, fmt.Sprint(pid))
	for name, text := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	for name, to := range links {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.Symlink(to, filepath.Join(dir, name)))
	}
}

const header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

func row(local, remote, state, inode string) string {
	return "   0: " + local + " " + remote + " " + state + " 00000000:00000000 00:00000000 00000000     0        0 " +
		inode +
		" 1 0000000000000000 20 4 30 10 -1\n"
}

func TestNamespacesAndStates(t *testing.T) {
	proc := t.TempDir()
	tcp := header + row("0100007F:9C40", "0100007F:1F90", "01", "11") + // wanted
		row("0100007F:1F90", "0100007F:9C40", "01", "12") + // the server's end
		row("0100007F:9C41", "0100007F:1F90", "06", "13") + // TIME_WAIT
		row("garbage", "0100007F:1F90", "01", "14") + "0100007F:1F90 \n"
	fake(t, proc, 1, map[string]string{"net/tcp": tcp}, map[string]string{
		"ns/net": "net:[1]", "fd/3": "socket:[11]", "fd/4": "socket:[12]", "fd/5": "/dev/null", "fd/6": "socket:[13]",
	})
	fake(t, proc, 2, map[string]string{"net/tcp": "what is never read"}, map[string]string{
		"ns/net": "net:[1]", "fd/3": "socket:[11]",
	})
	fake(t, proc, 3, map[string]string{"net/tcp": header}, map[string]string{"ns/net": "net:[2]", "fd/3": "socket:[11]"})
	got, err := local(proc, []int{1, 2, 3}, 8080, nil)
	require.NoError(t, err)
	end := netip.MustParseAddrPort("127.0.0.1:40000")
	require.Equal(t, map[int][]netip.AddrPort{1: {end}, 2: {end}}, got)
}

func FuzzTable(f *testing.F) {
	f.Add([]byte(header + row("0100007F:9C40", "0100007F:1F90", "01", "11")))
	f.Add([]byte(row("00000000000000000000000001000000:9C40", "0000000000000000FFFF00000100007F:1F90", "01", "9")))
	f.Fuzz(func(t *testing.T, b []byte) {
		found := table{}
		err := found.add(bytes.NewReader(b), filter{port: 8080})
		require.True(t, err == nil || strings.Contains(err.Error(), "too long"))
		for inode, end := range found {
			require.True(t, strings.HasPrefix(inode, "socket:["))
			require.True(t, end.IsValid() && !end.Addr().Is4In6())
		}
	})
}

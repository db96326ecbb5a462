package api

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// askRaw sends a request as it is written, with what is to be said of its connection.
func askRaw(t *testing.T, addr, request string) (status int, body string) {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer nc.Close()
	require.NoError(t, nc.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = io.WriteString(nc, request)
	require.NoError(t, err)
	all, err := io.ReadAll(nc)
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(all), " ")
	status, err = strconv.Atoi(rest[:3])
	require.NoError(t, err, "%s", all)
	_, body, _ = strings.Cut(rest, "\r\n\r\n")
	return status, body
}

func TestWebPages(t *testing.T) {
	const token, rebound = "the-right-token-0", -1 // refused by what serves one user
	own, err := os.Hostname()
	require.NoError(t, err)
	for name, c := range map[string]struct {
		method, host, header string
		secret, own          int // the status with a token, and without one
	}{
		"a program":                 {"GET", "127.0.0.1:29400", "", 200, 200},
		"by IPv6":                   {"GET", "[::1]:29400", "", 200, 200},
		"localhost":                 {"GET", "LOCALHOST", "", 200, 200},
		"below localhost":           {"GET", "job.localhost:29400", "", 200, 200},
		"a name in /etc/hosts":      {"GET", "node0:29400", "", 200, 200},
		"this host":                 {"GET", own + ":29400", "", 200, 200},
		"the endpoint's name":       {"GET", "Rdzv.Site.Example.:29400", "", 200, 200},
		"DNS rebinding":             {"GET", "evil.example:29400", "", 200, rebound},
		"an address as a name":      {"GET", "127.0.0.1.evil.example:29400", "", 200, rebound},
		"a page's image":            {"GET", "127.0.0.1", "Sec-Fetch-Site: cross-site", 200, 403},
		"the address line":          {"GET", "127.0.0.1", "Sec-Fetch-Site: none", 200, 200},
		"a page's script":           {"GET", "127.0.0.1", "Origin: http://evil.example", 403, 403},
		"a page without referrer":   {"POST", "127.0.0.1", "Origin: null", 403, 403},
		"a form":                    {"POST", "127.0.0.1", "Content-Type: application/x-www-form-urlencoded", 415, 415},
		"plain text":                {"POST", "127.0.0.1", "Content-Type: text/plain; charset=UTF-8", 415, 415},
		"a type that is none":       {"POST", "127.0.0.1", "Content-Type: ;", 415, 415},
		"JSON":                      {"POST", "127.0.0.1", "Content-Type: application/json; charset=utf-8", 200, 200},
		"an earlier version of us":  {"POST", "127.0.0.1", "Accept: */*", 200, 200},
		"an empty Content-Type":     {"POST", "127.0.0.1", "Content-Type:", 200, 200},
		"a page asks for permision": {"OPTIONS", "127.0.0.1", "Origin: http://evil.example", 403, 403},
	} {
		t.Run(name, func(t *testing.T) {
			for _, cfg := range []ServerConfig{
				{Token: token}, {Insecure: true, Name: "rdzv.site.example"}, {Name: "rdzv.site.example"},
			} {
				s := serveConfig(t, cfg)
				path, body, want := "/v1/runs", "", c.own
				if want == rebound {
					want = map[bool]int{false: 403, true: 200}[cfg.Insecure]
				}
				if c.method == "POST" {
					_ = s.hub.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1}))
					path, body = "/v1/runs/r/orders", `{"kind":"stop"}`
				}
				auth := ""
				if cfg.Token != "" {
					auth, want = "Authorization: Bearer "+token+"\r\n", c.secret
				}
				if c.header != "" {
					auth += c.header + "\r\n"
				}
				status, answer := askRaw(t, s.addr, c.method+" "+path+" HTTP/1.1\r\nHost: "+c.host+"\r\nConnection: close\r\n"+auth+
					"Content-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
				require.Equal(t, want, status, answer)
			}
		})
	}
}

// connect opens a connection within this host and returns its ends as the server sees them.
func connect(t *testing.T, host string) (nc net.Conn, peer, local netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	require.NoError(t, err)
	defer l.Close()
	nc, err = net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	own, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close(); own.Close() })
	return nc, own.RemoteAddr().(*net.TCPAddr).AddrPort(), own.LocalAddr().(*net.TCPAddr).AddrPort()
}

func TestUserOfAConnection(t *testing.T) {
	for name, of := range map[string]func(from, to netip.AddrPort) (int, error){
		"": UserOf, " by sock_diag": userByDiag, " by the table": userByTable,
	} {
		for _, host := range []string{"127.0.0.1", "::1", "::ffff:127.0.0.1"} {
			t.Run(host+name, func(t *testing.T) {
				nc, peer, local := connect(t, host)
				uid, err := of(peer, local)
				require.NoError(t, err)
				require.Equal(t, os.Geteuid(), uid)
				require.NoError(t, nc.Close())
				_, err = of(peer, local)
				require.Error(t, err, "the kernel calls it root's")
			})
		}
	}
}

// A listener has the port, and no connection.
func TestUserOfNoConnection(t *testing.T) {
	_, peer, local := connect(t, "127.0.0.1")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	listening := l.Addr().(*net.TCPAddr).AddrPort()
	for _, ends := range [][2]netip.AddrPort{{listening, local}, {peer, listening}, {local, local}, {listening, peer}} {
		_, err = UserOf(ends[0], ends[1])
		require.Error(t, err, "%s", ends)
	}
}

// TestOtherUsers has a child that becomes another user, which needs root.
func TestOtherUsers(t *testing.T) {
	const variable = "TEST_OTHER_USER_ADDR"
	if addr := os.Getenv(variable); addr != "" {
		c := NewClient(addr, "")
		defer c.Close()
		_, err := c.Runs(t.Context())
		if err != nil {
			t.Log("refused: " + err.Error())
		}
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: OTHER USERS OF THE HOST ARE NOT TESTED: only root can become one")
	}
	for name, c := range map[string]struct {
		cfg ServerConfig
		uid uint32
		say string
	}{
		"another user": {ServerConfig{}, 12345, "refused: the job token was not accepted: this rendezvous has none " +
			"and serves its own user alone, uid 0, and this is uid 12345"},
		"its own user": {ServerConfig{}, 0, ""},
		"everybody":    {ServerConfig{Insecure: true}, 12345, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := serveConfig(t, c.cfg)
			program, err := os.Open("/proc/self/exe") // which others may not reach by its path
			require.NoError(t, err)
			defer program.Close()
			cmd := exec.Command("/proc/self/fd/3", "-test.run=^TestOtherUsers$", "-test.v")
			cmd.Env, cmd.ExtraFiles, cmd.Dir = []string{variable + "=" + s.addr}, []*os.File{program}, "/"
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.uid, Gid: c.uid}}
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			if c.say == "" {
				require.NotContains(t, string(out), "refused")
			}
			require.Contains(t, string(out), c.say)
		})
	}
}

func TestMayAsk(t *testing.T) {
	for _, c := range []struct {
		uid, own int
		may      bool
	}{{7, 7, true}, {0, 0, true}, {0, 7, true}, {7, 0, false}, {8, 7, false}, {-1, 7, false}} {
		require.Equal(t, c.may, MayAsk(c.uid, c.own), c)
	}
}

func FuzzReadDiag(f *testing.F) {
	answer := make([]byte, diagAnswerSize)
	binary.NativeEndian.PutUint16(answer[4:], sockDiagByFamily)
	binary.BigEndian.PutUint16(answer[syscall.NLMSG_HDRLEN+6:], 29400)
	answer[diagAnswerSize-8], answer[diagAnswerSize-4] = 7, 1
	f.Add(answer, uint16(29400))
	f.Add(answer[:20], uint16(29400))
	f.Fuzz(func(t *testing.T, b []byte, port uint16) {
		uid, err := readDiag(b, port)
		if err != nil {
			require.Zero(t, uid)
		}
	})
}

func FuzzReadTable(f *testing.F) {
	const from, to = "0100007F:BCBC", "0100007F:6A10"
	f.Add("  1: "+from+" "+to+" 01 00000000:00000000 02:000000EF 00000000  1234  0 769121 3", from, to)
	f.Fuzz(func(t *testing.T, text, from, to string) {
		if _, ok := readTable([]byte(text), from, to); ok {
			require.Contains(t, text, from)
			require.Contains(t, text, to)
		}
	})
}

func TestReadDiag(t *testing.T) {
	answer := make([]byte, diagAnswerSize)
	binary.NativeEndian.PutUint16(answer[4:], sockDiagByFamily)
	binary.BigEndian.PutUint16(answer[syscall.NLMSG_HDRLEN+6:], 29400)
	answer[diagAnswerSize-8] = 7
	_, err := readDiag(answer, 29400)
	require.ErrorIs(t, err, errNoSocket, "without an inode no process has it")
	answer[diagAnswerSize-4] = 1
	uid, err := readDiag(answer, 29400)
	require.NoError(t, err)
	require.Equal(t, 7, uid&0xff|uid>>24)
	_, err = readDiag(answer, 29401)
	require.ErrorIs(t, err, errNoSocket)
}

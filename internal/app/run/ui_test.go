package run

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestUIIsChecked(t *testing.T) {
	h := testHost()
	h.lookPath = func(f string) (string, error) {
		if filepath.Base(f) == "dlrover-master" {
			return "", os.ErrNotExist
		}
		return f, nil
	}
	for line, want := range map[string]string{
		"--ui=8080":     "--ui=8080: need [HOST]:PORT",
		"--ui=:80800":   "need [HOST]:PORT",
		"--ui=:8080":    "--ui=:8080 is a network address and needs a job token",
		"--ui":          "--ui needs dlrover-master, which is neither in ",
		"--ui=[::1]:80": "--ui needs dlrover-master",
		"--ui --rdzv-backend=dlrover-master --rdzv-endpoint=m:1 --rdzv-id=x": "leave --ui out",
	} {
		_, err := resolvedOn(t, h, line+" train.py", map[string]string{"PYTHON_EXEC": "python3"})
		require.ErrorContains(t, err, want, line)
	}
	s, err := resolved(t, "--ui train.py", map[string]string{"PYTHON_EXEC": "python3"})
	require.NoError(t, err)
	plan, err := makePlan(&s, testHost())
	require.NoError(t, err)
	require.Contains(t, plan.Features, "ui")
}

// link is the page's address, once a launcher has logged it.
func (l *launched) link() string {
	l.t.Helper()
	url := regexp.MustCompile(`"url":"([^"]+)"`)
	eventually(l.t, "the link", func() bool { return url.MatchString(l.err.String()) })
	return url.FindStringSubmatch(l.err.String())[1]
}

// pages are the helpers that serve one.
func (b *bench) pages() (pids []int) {
	for _, pid := range b.tagged() {
		if args, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline"); strings.Contains(string(args), "--page-of=") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// shows reports whether a page is served that has some words.
func shows(url, token, words string) func() bool {
	return func() bool {
		req, err := http.NewRequest(http.MethodGet, url, nil)
		if err != nil {
			return false
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		page, err := io.ReadAll(resp.Body)
		return err == nil && resp.StatusCode == http.StatusOK && strings.Contains(string(page), words)
	}
}

// A job has no token. Its page survives the death of the helper, and ends with the launcher.
func TestPageOfAJobOnOneHost(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	port := freePort(t)
	l := b.start("dlrover-run", nil, b.sh("while [ ! -e $DIR/go ]; do sleep 0.02; done", "--standalone",
		"--ui=127.0.0.1:"+port)...)
	url := l.link()
	require.Contains(t, url, "http://127.0.0.1:"+port+"/ui/runs/")
	eventually(t, "the page", shows(url, "", "Yes: 1 workers run"))
	old := b.pages()
	require.Len(t, old, 1)
	require.NoError(t, syscall.Kill(old[0], syscall.SIGKILL))
	eventually(t, "the page is back", shows(url, "", "Yes: 1 workers run"))
	require.NotEqual(t, old, b.pages())
	second := b.start("dlrover-run", nil, b.sh("true", "--standalone", "--ui=127.0.0.1:"+port)...)
	require.NotZero(t, second.wait())
	require.Contains(t, second.err.String(), "end what listens there, or give another port")
	b.release()
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Empty(t, b.pages())
}

// The page is where the rendezvous is served: it ends with a launcher that is killed, and the successor has the next.
func TestPageMovesWithTheRendezvous(t *testing.T) {
	long(t)
	t.Parallel()
	b := newBench(t)
	args := b.sh("while [ ! -e $DIR/go ]; do sleep 0.02; done", b.c10d("2:3", "--rdzv-id=a/b", "--ui")...)
	var nodes []*launched
	for i := range 3 {
		nodes = append(nodes, b.start("dlrover-run", []string{"DLROVER_TOKEN=" + testToken}, args...))
		if i == 0 {
			nodes[0].link()
		}
	}
	url := nodes[0].link()
	require.Contains(t, url, "/ui/runs/a%2Fb")
	eventually(t, "the page", shows(url, testToken, "Yes: 6 workers run"))
	require.False(t, shows(url, "another", "workers")())
	require.Len(t, b.pages(), 1, "nodes that serve nothing have no page")

	_, endpoint, _ := strings.Cut(strings.Join(args, " "), "--rdzv-endpoint=")
	endpoint, _, _ = strings.Cut(endpoint, " ")
	cmd := exec.Command(filepath.Join(binDir, "dlroverctl"), "open", "a/b", "--master="+endpoint)
	cmd.Env = append(os.Environ(), "DLROVER_TOKEN="+testToken)
	link, err := cmd.Output()
	require.NoError(t, err)
	once := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	for _, status := range []int{http.StatusTemporaryRedirect, http.StatusSeeOther} { // to the page, and into it
		resp, err := once.Get(strings.TrimSpace(string(link)))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, status, resp.StatusCode)
		link = []byte(resp.Header.Get("Location"))
		require.Equal(t, status == http.StatusSeeOther, len(resp.Cookies()) == 1)
	}
	require.Equal(t, "/ui/runs/a%2Fb", string(link))

	require.NoError(t, syscall.Kill(nodes[0].launcher(), syscall.SIGKILL))
	began := time.Now()
	next := nodes[1]
	eventually(t, "a successor has the page", func() bool {
		for _, n := range nodes[1:] {
			if strings.Contains(n.err.String(), "/ui/runs/") {
				next = n
				return true
			}
		}
		return false
	})
	eventually(t, "its page", shows(next.link(), testToken, "Yes: 4 workers run"))
	t.Logf("the page has moved within %s", time.Since(began).Round(time.Millisecond))
	require.Len(t, b.pages(), 1)
	b.release()
	for _, n := range nodes[1:] {
		require.Equal(t, 0, n.wait(), n.err.String())
	}
}

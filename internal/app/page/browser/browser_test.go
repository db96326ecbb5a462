// Package browser tests the page of dlrover-master in a real browser, with real launchers.
package browser

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

const (
	secret = "0123456789abcdef0123456789abcdef"
	limit  = time.Minute // of one step, on a busy machine
	run    = `job <b onmouseover="alert(1)">one</b>`
)

// house is a master, and launchers of one run.
type house struct {
	t    *testing.T
	dir  string
	bin  string
	addr string
	env  []string // more of it, for every program
	// within are commands that start a node's program elsewhere, such as in a network namespace.
	within map[string][]string
}

func newHouse(t *testing.T) *house { return newHouseAt(t, freeAddr(t, "127.0.0.1")) }

func newHouseAt(t *testing.T, addr string, options ...string) *house {
	if _, err := exec.LookPath("chromium"); err != nil {
		t.Skip("NOT TESTED: there is no chromium; apt-get install chromium")
	}
	bin, err := filepath.Abs(cmp.Or(os.Getenv("PAGE_BIN"), "../../../../bin"))
	require.NoError(t, err)
	require.FileExists(t, bin+"/dlrover-master", "make build")
	h := &house{t: t, dir: t.TempDir(), bin: bin, addr: addr}
	require.NoError(t, os.WriteFile(h.dir+"/job.py", []byte(script), 0o600))
	h.start("master", "dlrover-master", append(options, "--listen", h.addr, "--data-dir", h.dir+"/data")...)
	require.Eventually(t, func() bool {
		resp, err := http.Get("http://" + h.addr + "/healthz")
		return err == nil && resp.Body.Close() == nil
	}, limit, 20*time.Millisecond)
	return h
}

// script runs until a file says otherwise: one that is named as the worker's rank fails it.
const script = `import os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
while not os.path.exists(os.path.join(here, "end")):
    mark = os.path.join(here, "fail" + os.environ["RANK"])
    if os.path.exists(mark):
        os.remove(mark)
        raise ValueError("batch 17 is <i>bad</i>")
    time.sleep(0.05)
`

func freeAddr(t *testing.T, host string) string {
	l, err := net.Listen("tcp", host+":0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// start starts a program, which is killed with all its children at the end of the test.
func (h *house) start(name, program string, args ...string) *exec.Cmd {
	h.t.Helper()
	log, err := os.Create(filepath.Join(h.dir, strings.Map(letters, name)+".log"))
	require.NoError(h.t, err)
	command := append(h.within[name], append([]string{filepath.Join(h.bin, program)}, args...)...)
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "DLROVER_TOKEN="+secret, "DLROVER_MASTER_ADDR="+h.addr, "POD_NAME="+name, "HOME="+h.dir)
	cmd.Env = append(cmd.Env, h.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	require.NoError(h.t, cmd.Start())
	h.t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		done := make(chan struct{})
		go func() { _ = cmd.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-done
		}
		_ = log.Close()
		if h.t.Failed() {
			data, _ := os.ReadFile(log.Name())
			h.t.Logf("%s:\n%s", name, data[max(0, len(data)-3000):])
		}
	})
	return cmd
}

func letters(r rune) rune {
	if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
		return r
	}
	return '-'
}

func (h *house) node(name string) *exec.Cmd { return h.nodeOf(run, name) }

func (h *house) nodeOf(run, name string) *exec.Cmd {
	return h.start(name, "dlrover-run", "--nnodes=3", "--nproc-per-node=2", "--max-restarts=9", "--rdzv-id="+run,
		h.dir+"/job.py")
}

func (h *house) url(path string) string { return "http://" + h.addr + path }

// ticket is the path of a link that dlroverctl prints.
func (h *house) ticket(run ...string) string {
	return h.ticketOf(h.addr, run...)
}

func (h *house) ticketOf(addr string, run ...string) string {
	cmd := exec.Command(filepath.Join(h.bin, "dlroverctl"), append([]string{"open"}, run...)...)
	cmd.Env = append(os.Environ(), "DLROVER_TOKEN="+secret, "DLROVER_MASTER_ADDR="+addr)
	out, err := cmd.Output()
	require.NoError(h.t, err)
	return strings.TrimSpace(string(out))
}

// tab is a tab of a browser. All that it complains of fails the test, and so does a request to anywhere else.
type tab struct {
	*house
	ctx context.Context
	mu  sync.Mutex
	bad []string

	answer string // to what the page asks, under mu
}

func (h *house) browse(options ...chromedp.ExecAllocatorOption) *tab {
	options = append(append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.WindowSize(1200, 1500),
		chromedp.UserDataDir(h.t.TempDir()), chromedp.Env("TMPDIR="+h.t.TempDir())), options...)
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	h.t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	h.t.Cleanup(cancel)
	b := &tab{house: h, ctx: ctx}
	require.NoError(h.t, chromedp.Listen(ctx, b.listen))
	call(b, network.Enable, network.EnableParams{})
	h.t.Cleanup(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		require.Empty(h.t, b.bad)
	})
	return b
}

func (b *tab) listen(event any) {
	complain := func(format string, args ...any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.bad = append(b.bad, fmt.Sprintf(format, args...))
	}
	switch e := event.(type) {
	case *runtime.EventConsoleAPICalled:
		complain("console %s: %s", e.Type, e.Args[0].Value)
	case *runtime.EventExceptionThrown:
		complain("exception: %s %s", e.ExceptionDetails.Text, e.ExceptionDetails.Exception.Description)
	case *network.EventRequestWillBeSent:
		if u, err := url.Parse(e.Request.URL); err != nil || u.Scheme == "http" && u.Host != b.addr {
			complain("request to %s", e.Request.URL)
		}
	case *page.EventJavascriptDialogOpening:
		go func() {
			b.mu.Lock()
			p := page.HandleJavaScriptDialogParams{Accept: true, PromptText: b.answer}
			b.mu.Unlock()
			_, _ = chromedp.Call(b.ctx, page.HandleJavaScriptDialog, p)
		}()
	}
}

// answers is what the visitor answers from now on.
func (b *tab) answers(text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.answer = text
}

func (b *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	require.NoError(b.t, chromedp.Do(b.ctx, steps...))
}

// click clicks what the page may replace just then.
func (b *tab) click(selector string) {
	b.t.Helper()
	var err error
	require.Eventually(b.t, func() bool {
		err = chromedp.Do(b.ctx, chromedp.Click(chromedp.CSS(selector)))
		return err == nil
	}, limit, 50*time.Millisecond, "%s: %v", selector, &err)
}

// call sends a command of the browser's protocol.
func call[P, R any](b *tab, c cdp.Command[P, R], params P) R {
	b.t.Helper()
	r, err := chromedp.Call(b.ctx, c, params)
	require.NoError(b.t, err)
	return r
}

// eval is the value of an expression in the page.
func eval[T any](b *tab, js string) T {
	b.t.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](js))
	require.NoError(b.t, err)
	return v
}

func (b *tab) open(path string) { b.t.Helper(); b.do(chromedp.Navigate(b.url(path))) }

// says waits until an element has a text, and returns how long that took.
func (b *tab) says(selector, words string) time.Duration {
	b.t.Helper()
	began := time.Now()
	var got string
	for time.Since(began) < limit {
		got = eval[string](b, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))
		if strings.Contains(got, words) {
			return time.Since(began)
		}
		time.Sleep(20 * time.Millisecond)
	}
	require.Failf(b.t, "not said", "%s: %q has no %q", selector, got, words)
	return 0
}

const runPath = "/ui/runs/job%20%3Cb%20onmouseover=%22alert(1)%22%3Eone%3C%2Fb%3E"

func TestLogin(t *testing.T) {
	h := newHouse(t)
	b := h.browse()
	b.open("/ui/")
	b.says("h1", "Log in")
	b.do(chromedp.SendKeys(chromedp.CSS("input[name=token]"), "wrong\r"))
	b.says("main", "This is not the job token.")
	b.do(chromedp.SendKeys(chromedp.CSS("input[name=token]"), secret+"\r"))
	b.says("h1", "Runs")
	cookies := call(b, network.GetCookies, network.GetCookiesParams{}).Cookies
	require.Len(t, cookies, 1)
	require.True(t, cookies[0].HTTPOnly)
	require.Equal(t, network.CookieSameSiteStrict, cookies[0].SameSite)
	require.NotContains(t, cookies[0].Value, secret)

	link := h.ticket()
	other := h.browse()
	other.do(chromedp.Navigate(link))
	other.says("h1", "Runs")
	third := h.browse()
	third.do(chromedp.Navigate(link))
	third.says("main", "This link has been used")
	// What a browser says on its console of a refused page is no fault of the page.
	for _, x := range []*tab{b, third} {
		x.mu.Lock()
		x.bad = nil
		x.mu.Unlock()
	}
}

// One run's life, as its page tells it to a browser that stays open.
func TestARun(t *testing.T) {
	h := newHouse(t)
	h.node("node-0")
	h.node("node-1")
	b := h.browse()
	require.Eventually(t, func() bool {
		out, _ := h.get(runPath)
		return strings.Contains(out, "For 1 of 3 nodes.")
	}, limit, 50*time.Millisecond)
	b.do(chromedp.Navigate(h.ticket(run)))
	b.says("h1", run)
	b.says("#moving", "No: waiting for nodes")
	b.says("#waits", "For 1 of 3 nodes.")
	b.says("#next", "the run fails, unless enough nodes are there in 9 min")

	third := h.node(hostile)
	require.Eventually(t, func() bool {
		out, _ := h.get(runPath)
		return strings.Contains(out, "Yes: 6 workers run")
	}, limit, 10*time.Millisecond)
	took := b.says("#moving", "Yes: 6 workers run")
	t.Logf("told the browser within %s", took)
	require.Less(t, took, 3*time.Second, "a second on a quiet machine")
	b.says("#nodes", hostile)
	b.says("h2", "3 nodes, 6 workers")
	require.Zero(t, eval[int](b, "document.images.length"))

	require.NoError(t, os.WriteFile(h.dir+"/fail3", nil, 0o600))
	b.says("#why", "ValueError: batch 17 is <i>bad</i>")
	b.says("#moving", "Restarts: 1 of 9.")

	require.NoError(t, syscall.Kill(-third.Process.Pid, syscall.SIGKILL))
	b.says("#waits", hostile+" (node ")
	b.says("#timeline", "node-loss")
	b.screenshot("loss.png")

	h.node("node-2")
	b.says("#moving", "Yes: 6 workers run")
	b.keyboard()
	b.looks()
	require.NoError(t, os.WriteFile(h.dir+"/end", nil, 0o600))
	b.says("#moving", "The run has succeeded")
}

// The page of a job without a master is as live, and takes orders.
func TestThePageOfALauncher(t *testing.T) {
	h := newHouse(t)
	endpoint := freeAddr(t, "127.0.0.1")
	h.addr = freeAddr(t, "127.0.0.1")
	h.start("alone", "dlrover-run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint="+endpoint,
		"--rdzv-id=alone", "--max-restarts=9", "--ui="+h.addr, h.dir+"/job.py")
	require.Eventually(t, func() bool {
		out, _ := h.get("/ui/runs/alone")
		return strings.Contains(out, "Yes: 2 workers run")
	}, limit, 50*time.Millisecond)
	b := h.browse()
	b.do(chromedp.Navigate(strings.Replace(h.ticketOf(endpoint, "alone"), endpoint, h.addr, 1)))
	b.says("#moving", "Yes: 2 workers run")
	b.click("button[data-kind=pause]")
	b.says("#moving", "No: it is paused: ordered on the page")
	b.click("button[data-kind=resume]")
	b.says("#moving", "Yes: 2 workers run")
	require.NoError(t, os.WriteFile(h.dir+"/fail1", nil, 0o600))
	b.says("#why", "ValueError: batch 17 is <i>bad</i>")
}

// TestPicture makes the picture in docs/tasks/page.md, with PAGE_SHOTS=docs/tasks.
func TestPicture(t *testing.T) {
	if os.Getenv("PAGE_SHOTS") == "" {
		t.Skip("it only makes a picture, with PAGE_SHOTS")
	}
	const name, nodes = "llama-7b", 8
	file, lines := filepath.Join(t.TempDir(), "topology"), ""
	for i := range nodes {
		lines += fmt.Sprintf("leaf-%d spine 10.1.0.%d\n", 1+i/2, i)
	}
	require.NoError(t, os.WriteFile(file, []byte(lines), 0o600))
	h := newHouseAt(t, freeAddr(t, "127.0.0.1"), "--topology-file="+file)
	h.within = map[string][]string{}
	var all []*exec.Cmd
	for i := range nodes {
		node := fmt.Sprintf("gpu-%02d", 1+i)
		h.within[node] = []string{"env", fmt.Sprintf("NODE_IP=10.1.0.%d", i)}
		all = append(all, h.start(node, "dlrover-run", "--nnodes=8", "--nproc-per-node=4", "--max-restarts=9",
			"--rdzv-id="+name, h.dir+"/job.py"))
	}
	b := h.browse(chromedp.WindowSize(1100, 900))
	require.Eventually(t, func() bool {
		out, _ := h.get("/ui/runs/" + name)
		return strings.Contains(out, "Yes: 32 workers run")
	}, limit, 10*time.Millisecond)
	b.do(chromedp.Navigate(h.ticket(name)))
	b.says("#moving", "Yes")
	for _, cmd := range all[4:6] {
		require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
	}
	b.says("#rack", "below one switch: leaf-3")
	b.do(chromedp.EmulateViewport(1100, 1080)) // all that answers a question
	b.paints("#grid canvas")
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	require.NoError(t, err)
	require.Less(t, len(png), 200_000)
	require.NoError(t, os.WriteFile(filepath.Join(os.Getenv("PAGE_SHOTS"), "page.png"), png, 0o600))
}

// keyboard pauses and resumes the run without a mouse.
func (b *tab) keyboard() {
	b.t.Helper()
	press := func(kind string) {
		focus := fmt.Sprintf("document.activeElement?.dataset?.kind === %q", kind)
		for range 40 {
			if eval[bool](b, focus) {
				b.do(chromedp.KeyEvent("\r"))
				return
			}
			b.do(chromedp.KeyEvent("\t"))
		}
		require.Fail(b.t, "the Tab key does not reach "+kind)
	}
	press("pause")
	b.says("#moving", "No: it is paused: ordered on the page")
	press("resume")
	b.says("#moving", "Yes: 6 workers run")
}

// looks holds the page on a narrow screen, in the dark and without a script.
func (b *tab) looks() {
	b.t.Helper()
	b.screenshot("run.png")
	const background = "getComputedStyle(document.body).backgroundColor"
	b.scheme("dark")
	dark := eval[string](b, background)
	b.screenshot("dark.png")
	b.scheme("light")
	require.NotEqual(b.t, dark, eval[string](b, background))
	b.do(chromedp.EmulateViewport(375, 800))
	b.says("#moving", "Yes")
	require.LessOrEqual(b.t, eval[int](b, "document.documentElement.scrollWidth"), 375)
	b.screenshot("narrow.png")
	b.do(chromedp.EmulateViewport(1200, 1500))
	b.without(runPath, func() {
		b.says("#moving", "Yes: 6 workers run")
		require.Zero(b.t, eval[int](b, "document.querySelectorAll('button:enabled').length"))
	})
	b.says("#moving", "Yes: 6 workers run")
}

// screenshot keeps a picture if PAGE_SHOTS names a directory.
func (b *tab) screenshot(name string) {
	b.t.Helper()
	dir := os.Getenv("PAGE_SHOTS")
	if dir == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, chromedp.FullScreenshot(100))
	require.NoError(b.t, err)
	require.NoError(b.t, os.WriteFile(filepath.Join(dir, name), png, 0o600))
}

// get is a page as the server writes it.
func (h *house) get(path string, headers ...string) (body string, status int) {
	req, err := http.NewRequest(http.MethodGet, h.url(path), nil)
	require.NoError(h.t, err)
	req.Header.Set("Authorization", "Bearer "+secret)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", 0
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(h.t, err)
	return string(bytes.ToValidUTF8(data, nil)), resp.StatusCode
}

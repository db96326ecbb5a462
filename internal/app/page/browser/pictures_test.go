package browser

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/tracing"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

const hostile = `<img src=x onerror=alert(1)>`

// painted counts the colours of a canvas.
func (b *tab) painted(selector string) int {
	b.t.Helper()
	return eval[int](b, fmt.Sprintf(`(() => {
		const c = document.querySelector(%q);
		const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
		const seen = new Set();
		for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 24 | d[i + 1] << 16 | d[i + 2] << 8 | d[i + 3]);
		return seen.size;
	})()`, selector))
}

// scheme makes the page light or dark, and narrow looks at it on a small screen.
func (b *tab) scheme(name string) {
	b.t.Helper()
	call(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
}

func (b *tab) narrow() {
	b.t.Helper()
	b.do(chromedp.EmulateViewport(375, 800))
	require.LessOrEqual(b.t, eval[int](b, "document.documentElement.scrollWidth"), 375)
}

// without opens a page with no script, and has f look at it.
func (b *tab) without(path string, f func()) {
	b.t.Helper()
	call(b, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true})
	b.open(path)
	call(b, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{})
	f()
	b.open(path)
}

// paints waits for a canvas that has more than three colours, or shades: it is drawn in tasks of their own.
func (b *tab) paints(selector string) {
	b.t.Helper()
	require.Eventually(b.t, func() bool { return b.painted(selector) > 3 }, limit, 50*time.Millisecond)
}

// matrix holds the page of a check whose slow node is known.
func (b *tab) matrix(run, slow string) {
	b.t.Helper()
	b.click("#evidence a")
	b.says("h1", "Check of the nodes of "+run)
	b.says("#nodes", slow)
	b.says("#nodes", hostile)
	b.says("#matrix tbody tr", slow) // the lowest rate
	require.Zero(b.t, eval[int](b, "document.images.length"))
	b.paints("#matrix canvas")
	b.do(chromedp.Focus(chromedp.CSS("#matrix canvas")), chromedp.KeyEvent("\u0303")) // right
	b.says("#matrix .told", " to ")
	first := eval[string](b, "document.querySelector('#matrix .told').innerText")
	b.do(chromedp.KeyEvent("\u0302"))
	require.NotEqual(b.t, first, eval[string](b, "document.querySelector('#matrix .told').innerText"))
	b.scheme("dark")
	b.paints("#matrix canvas")
	b.screenshot("matrix-dark.png")
	b.scheme("light")
	b.narrow()
	b.screenshot("matrix-narrow.png")
	b.do(chromedp.EmulateViewport(1280, fold))
	b.screenshot("matrix.png")
	b.without("/ui/runs/"+run+"/check", func() {
		b.says("#matrix tbody tr", slow)
		b.says("#nodes", hostile)
	})
}

// flame holds the merged stacks of a run with a rank in a function.
func (b *tab) flame(run, function string) {
	b.t.Helper()
	b.says("#flame", function)
	const widths = `[...document.querySelectorAll("#flame > ul > li")].map(e => e.getBoundingClientRect().width)`
	require.Greater(b.t, eval[float64](b, "Math.max(..."+widths+")"), 200.0)
	call(b, input.DispatchMouseEvent, input.DispatchMouseEventParams{Type: "mouseMoved", X: 5, Y: 5})
	b.do(chromedp.Focus(chromedp.CSS("#flame")), chromedp.KeyEvent("\u0301"), chromedp.KeyEvent("\u0301"))
	b.says("#flame ~ .told", "rank")
	inner := eval[string](b, "document.querySelector('#flame ~ .told').innerText")
	b.do(chromedp.KeyEvent("\u0304"))
	require.NotEqual(b.t, inner, eval[string](b, "document.querySelector('#flame ~ .told').innerText"))
	b.narrow()
	b.screenshot("flame-narrow.png")
	b.do(chromedp.EmulateViewport(1280, fold))
	b.screenshot("flame.png")
	b.without("/ui/runs/"+run, func() {
		b.says("#flame", function)
		require.Zero(b.t, eval[int](b, "document.querySelectorAll('#flame.drawn').length"), "an indented list")
		require.Greater(b.t, eval[int](b, "document.querySelectorAll('#flame li li').length"), 0)
	})
}

// traced are the tasks of the page's main thread while f acts, by their CPU time, the longest first. Other programs of
// the machine do not count.
func (b *tab) traced(f func()) (tasks []time.Duration) {
	b.t.Helper()
	var mu sync.Mutex
	var all []map[string]any
	done := make(chan struct{})
	require.NoError(b.t, chromedp.Listen(b.ctx, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *tracing.EventDataCollected:
			for _, v := range e.Value {
				var x map[string]any
				if json.Unmarshal(v, &x) == nil {
					all = append(all, x)
				}
			}
		case *tracing.EventTracingComplete:
			select {
			case <-done:
			default:
				close(done)
			}
		}
	}))
	call(b, tracing.Start, tracing.StartParams{TraceConfig: &tracing.TraceConfig{
		IncludedCategories: []string{"toplevel", "disabled-by-default-devtools.timeline", "devtools.timeline",
			"__metadata"}}})
	f()
	call(b, tracing.End, struct{}{})
	select {
	case <-done:
	case <-time.After(limit):
		require.Fail(b.t, "the trace does not end")
	}
	mu.Lock()
	defer mu.Unlock()
	return mainTasks(all)
}

func mainTasks(all []map[string]any) (tasks []time.Duration) {
	main := map[[2]any]bool{}
	for _, e := range all {
		args, _ := e["args"].(map[string]any)
		if e["name"] == "thread_name" && args["name"] == "CrRendererMain" {
			main[[2]any{e["pid"], e["tid"]}] = true
		}
	}
	for _, e := range all {
		cpu, _ := e["tdur"].(float64)
		if e["ph"] == "X" && e["name"] == "RunTask" && main[[2]any{e["pid"], e["tid"]}] {
			tasks = append(tasks, time.Duration(cpu*float64(time.Microsecond)))
		}
	}
	slices.SortFunc(tasks, func(a, b time.Duration) int { return int(b - a) })
	return tasks
}

// join has a node join a run that it never sees start. The connection stays, or its end would be that of the node.
func (h *house) join(c *http.Client, run string, i int) {
	body := fmt.Sprintf(`{"node":{"id":"n%d","name":"gpu-%05d","rank":-1,"slots":8,"ip":"%s"},`+
		`"params":{"min":20000,"max":20000,"node_timeout":3600000000000,"join_timeout":3600000000000}}`, i, i, ipOf(i))
	req, err := http.NewRequest(http.MethodPost, h.url("/v1/runs/"+run+"/join"), strings.NewReader(body))
	if err == nil {
		req.Header.Set("Authorization", "Bearer "+secret)
		req.Header.Set("Content-Type", "application/json")
		var resp *http.Response
		if resp, err = c.Do(req); err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	}
	if err != nil {
		h.t.Errorf("node %d cannot join: %v", i, err)
	}
}

func ipOf(node int) string { return fmt.Sprintf("10.%d.%d.1", node/256, node%256) }

// frameTime is a sixtieth of a second.
const frameTime = 16 * time.Millisecond

// The page of 80,000 workers keeps up with its visitor and with news.
func TestTenThousandNodes(t *testing.T) {
	const nodes, run = 10_000, "large"
	var topology strings.Builder
	for i := range nodes {
		fmt.Fprintf(&topology, "leaf-%03d spine %s\n", i/32, ipOf(i))
	}
	file := filepath.Join(t.TempDir(), "topology")
	require.NoError(t, os.WriteFile(file, []byte(topology.String()), 0o600))
	h := newHouseAt(t, freeAddr(t, "127.0.0.1"), "--topology-file="+file)
	began := time.Now()
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16}}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := w; i < nodes; i += 4 {
				h.join(c, run, i)
			}
		})
	}
	wg.Wait()
	t.Logf("%d nodes have joined after %.1f s", nodes, time.Since(began).Seconds())
	b := h.browse(chromedp.WindowSize(1280, fold))
	b.do(chromedp.Navigate(h.ticket(run)), chromedp.EmulateViewport(1280, fold))
	b.says("h2", "10000 nodes, 80000 workers")
	b.paints("#grid canvas")
	b.do(chromedp.ScrollIntoView(chromedp.CSS("#grid canvas")))
	at := eval[[]float64](b, `(() => { const r = document.querySelector("#grid canvas").getBoundingClientRect();
		return [r.left, r.top, r.width, Math.min(r.height, innerHeight - r.top)] })()`)
	tasks := b.traced(func() {
		for i := range 120 {
			call(b, input.DispatchMouseEvent, input.DispatchMouseEventParams{Type: "mouseMoved",
				X: at[0] + at[2]*float64(i%40)/40, Y: at[1] + at[3]*float64(i)/120})
		}
		b.do(chromedp.Focus(chromedp.CSS("#grid canvas")))
		for range 40 {
			b.do(chromedp.KeyEvent("\u0301"))
		}
		time.Sleep(2 * time.Second)
	})
	require.NotEmpty(t, tasks)
	b.says("#grid .told", "leaf-")
	t.Logf("a visitor points and presses: the longest frames take %v of a CPU", tasks[:min(5, len(tasks))])
	require.Less(t, tasks[0], frameTime)

	// Workers of all tones, and of many latenesses, which take their turns; and blocks that are folded.
	const grid = "document.querySelector('#grid canvas')"
	eval[int](b, `(window.other = `+grid+`.dataset.grid.split('\n').map((l, i) => {
		const f = l.split('\t');
		f[0] = '00230123';
		f[4] = i % 3 ? '0.1,0.2,3.0,20.5+,,7.5,0.1,0.1' : '';
		return f.join('\t');
	}).join('\n')).length`)
	b.screenshot("large.png")
	tasks = b.traced(func() {
		eval[string](b, grid+".dataset.grid = window.other; ''")
		for _, by := range []string{"late", "state", "late"} {
			b.do(chromedp.Click(chromedp.CSS("#by input[value=" + by + "]")))
			time.Sleep(time.Second)
		}
		b.do(chromedp.Focus(chromedp.CSS("#grid canvas")))
		for range 5 {
			b.do(chromedp.KeyEvent("\r"), chromedp.KeyEvent("\u0301"), chromedp.KeyEvent("\u0303"))
		}
		time.Sleep(time.Second)
	})
	t.Logf("other colours and folds: the longest frames take %v of a CPU", tasks[:min(8, len(tasks))])
	require.Less(t, tasks[0], frameTime)
	b.screenshot("large-lag.png")

	asked := eval[string](b, "document.querySelector('footer time').dateTime")
	tasks = b.traced(func() {
		for i := range 3 {
			h.join(c, run, nodes+i)
			time.Sleep(2 * time.Second)
		}
	})
	require.NotEqual(t, asked, eval[string](b, "document.querySelector('footer time').dateTime"))
	t.Logf("news: the longest frames take %v of a CPU", tasks[:min(8, len(tasks))])
	require.Less(t, tasks[0], frameTime)
}

// All that a browser loads besides the page is small.
func TestAssetsAreSmall(t *testing.T) {
	total := 0
	files, err := os.ReadDir("../assets")
	require.NoError(t, err)
	for _, f := range files {
		data, err := os.ReadFile("../assets/" + f.Name())
		require.NoError(t, err)
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		_, _ = z.Write(data)
		require.NoError(t, z.Close())
		t.Logf("%s: %d bytes, %d packed", f.Name(), len(data), packed.Len())
		total += packed.Len()
	}
	require.Less(t, total, 60_000)
}

// lag holds the grid of a run with a rank that has not come, coloured by that, with the keyboard alone.
func (b *tab) lag() {
	b.t.Helper()
	by := func() string { return eval[string](b, "document.querySelector('#by input:checked').value") }
	require.Equal(b.t, "state", by())
	red := b.colours("#grid canvas")
	b.do(chromedp.Focus(chromedp.CSS("#by input:checked")), chromedp.KeyEvent("\u0303"))
	require.Equal(b.t, "late", by())
	b.says("#late", "As of ")
	require.Equal(b.t, red, b.colours("#grid canvas"), "a red one and a green one, as by the state")
	b.do(chromedp.Focus(chromedp.CSS("#grid canvas")), chromedp.KeyEvent("\u0303"))
	b.says("#grid .told", "; has not come, ")
	b.screenshot("lag.png")
	b.do(chromedp.Focus(chromedp.CSS("#by input:checked")), chromedp.KeyEvent("\u0302"))
	require.Equal(b.t, "state", by())
}

// colours are the frequent ones of a canvas.
func (b *tab) colours(selector string) (all []string) {
	b.t.Helper()
	return eval[[]string](b, fmt.Sprintf(`(() => {
		const c = document.querySelector(%q);
		const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
		const seen = {};
		for (let i = 0; i < d.length; i += 4) {
			if (d[i + 3] === 255) seen[d.slice(i, i + 3).join()] = (seen[d.slice(i, i + 3).join()] ?? 0) + 1;
		}
		return Object.keys(seen).filter((k) => seen[k] > 50).sort();
	})()`, selector))
}

// All nodes of a switch are lost: the page says so, and shows it. Its blocks fold and unfold by keyboard.
func TestOneRackIsTold(t *testing.T) {
	const rack = "leaf-<b>7</b>"
	file := filepath.Join(t.TempDir(), "topology")
	require.NoError(t, os.WriteFile(file, []byte("leaf-1 spine 10.1.0.1\nleaf-1 spine 10.1.0.2\n"+
		rack+" spine 10.1.0.3\n"+rack+" spine 10.1.0.4\n"), 0o600))
	h := newHouseAt(t, freeAddr(t, "127.0.0.1"), "--topology-file="+file)
	h.within = map[string][]string{}
	var below []*exec.Cmd
	for i := range 4 {
		name := fmt.Sprintf("gpu-0%d", i+1)
		h.within[name] = []string{"env", fmt.Sprintf("NODE_IP=10.1.0.%d", i+1)}
		below = append(below, h.train(name, "--nnodes=4", "--nproc-per-node=2", "--max-restarts=9", h.dir+"/job.py"))
	}
	b := h.reads()
	b.says("#moving", "Yes: 8 workers run")
	b.says("#rack", "No worker is in trouble.")
	b.says("#switches", rack+" 2 nodes, 4 workers: well")
	for _, cmd := range below[2:] {
		require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
	}
	b.says("#rack", "All 4 workers in trouble are below one switch: "+rack+" (4 of 4).")
	b.says("#grid h2", "2 nodes, 4 workers, and 2 nodes that are gone")
	b.says("#switches li", rack+" 2 nodes, 4 workers: 4 in trouble") // the worst is the first
	require.Zero(t, eval[int](b, "document.images.length"))
	b.folds(rack)
	b.screenshot("rack.png")
	b.narrow()
	b.screenshot("rack-narrow.png")
	b.do(chromedp.EmulateViewport(1280, fold))
	b.scheme("dark")
	b.screenshot("rack-dark.png")
	b.without("/ui/runs/"+faultyRun, func() {
		b.says("#rack", "below one switch: "+rack)
		b.says("#switches", rack+" 2 nodes, 4 workers: 4 in trouble")
	})
}

// folds folds and unfolds the block of the first switch in words with its button, and in the picture.
func (b *tab) folds(name string) {
	b.t.Helper()
	const button = "#switches button"
	expanded := func(want string) {
		b.t.Helper()
		require.Equal(b.t, want, eval[string](b, "document.querySelector('"+button+"').getAttribute('aria-expanded')"))
	}
	cells := func() int { return eval[int](b, "document.querySelector('#grid canvas').height") }
	expanded("true")
	b.do(chromedp.Focus(chromedp.CSS(button)), chromedp.KeyEvent("\r"))
	expanded("false")
	asked := eval[string](b, "document.querySelector('footer time').dateTime")
	require.Eventually(b.t, func() bool {
		return asked != eval[string](b, "document.querySelector('footer time').dateTime")
	}, limit, 100*time.Millisecond)
	expanded("false") // and the focus stays, when the server has written the page anew
	require.True(b.t, eval[bool](b, "document.activeElement.matches('"+button+"')"))
	require.Positive(b.t, cells())
	b.do(chromedp.Focus(chromedp.CSS("#grid canvas")))
	for range 20 {
		if strings.Contains(eval[string](b, "document.querySelector('#grid .told').innerText"), name+": 2 nodes") {
			break
		}
		b.do(chromedp.KeyEvent("\u0303"))
	}
	b.says("#grid .told", name+": 2 nodes, 4 workers, 4 of them red; Enter unfolds it")
	b.do(chromedp.KeyEvent("\r"))
	b.says("#grid .told", "; Enter folds it")
	expanded("true")
	b.do(chromedp.KeyEvent("\u0301"))
	b.says("#grid .told", "local rank 0 on gpu-0")
	b.says("#grid .told", "("+name+"): gone: ")
}

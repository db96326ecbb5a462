package browser

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
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

// paints waits for a canvas that has more than three colours: it is drawn in tasks of their own.
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
	body := fmt.Sprintf(`{"node":{"id":"n%d","name":"gpu-%05d","rank":-1,"slots":8,"addr":"10.0.0.1"},`+
		`"params":{"min":20000,"max":20000,"node_timeout":3600000000000,"join_timeout":3600000000000}}`, i, i)
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

// frameTime is a sixtieth of a second.
const frameTime = 16 * time.Millisecond

// The page of 80,000 workers keeps up with its visitor and with news.
func TestTenThousandNodes(t *testing.T) {
	h := newHouse(t)
	const nodes, run = 10_000, "large"
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
	require.Greater(t, b.painted("#grid canvas"), 1)
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
	b.says("#grid .told", "on gpu-")
	t.Logf("a visitor points and presses: the longest frames take %v of a CPU", tasks[:min(5, len(tasks))])
	require.Less(t, tasks[0], frameTime)

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

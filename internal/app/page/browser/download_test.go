package browser

import (
	"archive/tar"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// saved waits for a file that the browser saves, and returns the path.
func (h *house) saved(pattern string) (path string) {
	h.t.Helper()
	require.Eventually(h.t, func() bool {
		found, err := filepath.Glob(pattern)
		if len(found) > 0 {
			path = found[0]
		}
		return err == nil && path != ""
	}, limit, 20*time.Millisecond, pattern)
	return path
}

// keyed presses a button by keyboard. If the page is written anew just then, it keeps the focus.
func (b *tab) keyed(kind string) {
	b.t.Helper()
	require.Eventually(b.t, func() bool {
		return eval[bool](b, fmt.Sprintf(`(() => {
			const b = document.querySelector("button[data-kind=%s]:enabled");
			b?.focus();
			return b !== null && document.activeElement === b;
		})()`, kind))
	}, limit, 50*time.Millisecond)
	b.do(chromedp.KeyEvent("\r"))
}

// A visitor presses Bundle and Profile, and has a file, or the reason that there is none.
func TestFilesArePressed(t *testing.T) {
	h := newHouse(t)
	torch(t, h)
	script := h.write("train.py", `import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
here = os.path.dirname(__file__)
while True:
    dist.all_reduce(torch.ones(1))
    open(os.path.join(here, "trains"), "w").close()
    time.sleep(0.05)
`)
	args := []string{"--nnodes=2", "--hang=auto", script}
	h.train("gpu-01", args...)
	h.train(hostile, args...)
	b := h.reads()
	b.answers("1")
	dir := t.TempDir()
	call(b, browser.SetDownloadBehavior, browser.SetDownloadBehaviorParams{
		Behavior: browser.SetDownloadBehaviorBehaviorAllow, DownloadPath: dir})
	b.says("#moving", "Yes: 2 workers run")
	b.says("#press", "5 s of one worker")
	b.keyed("bundle")
	b.says("#link", "Saved: dlrover-bundle-"+faultyRun)
	files := untar(t, h.saved(dir+"/dlrover-bundle-"+faultyRun+"-*.tar.gz"))
	require.Contains(t, files["status.json"], `"name": "gpu-01"`)
	require.Contains(t, files["events.json"], hostile)
	require.NotContains(t, files["status.json"], secret)

	h.since("trains")
	time.Sleep(2 * time.Second) // our thread in a worker looks twice a second
	b.keyed("profile")
	var said string
	require.Eventually(t, func() bool {
		said = eval[string](b, "document.querySelector('#link').innerText")
		return !strings.HasSuffix(said, "under way")
	}, limit, 50*time.Millisecond)
	if strings.Contains(said, "Saved: dlrover-profile-") {
		h.saved(dir + "/dlrover-profile-" + faultyRun + "-rank1-*.json.gz")
	} else {
		require.Contains(t, said, "a profile needs PyTorch 2.7 or newer, and this is ")
	}
	b.says("#timeline", "on the page: a profile of 5s")
	b.screenshot("files.png")
	b.answers("<i>x</i>")
	b.keyed("profile")
	b.says("#link", `rank "<i>x</i>": need the rank of a worker`)
	time.Sleep(time.Second) // news do not wipe it out
	b.says("#link", `rank "<i>x</i>": need the rank of a worker`)
}

// untar are the files of an archive.
func untar(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	require.NoError(t, err)
	files := map[string]string{}
	for in := tar.NewReader(zip); ; {
		head, err := in.Next()
		if err == io.EOF {
			return files
		}
		require.NoError(t, err)
		_, name, _ := strings.Cut(head.Name, "/")
		data, err := io.ReadAll(in)
		require.NoError(t, err)
		files[name] = string(data)
	}
}

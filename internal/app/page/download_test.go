package page

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous/api"
)

// archived are the names of the files of a bundle.
func archived(t *testing.T, data string) (names []string) {
	t.Helper()
	zip, err := gzip.NewReader(strings.NewReader(data))
	require.NoError(t, err)
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		require.NoError(t, err)
		_, name, _ := strings.Cut(h.Name, "/")
		names = append(names, name)
		if name == "status.json" {
			data, err := io.ReadAll(in)
			require.NoError(t, err)
			require.Contains(t, string(data), `"n1"`)
		}
	}
}

// The bundle is the same, whether the page's own server or another one has the run.
func TestABundleIsPressed(t *testing.T) {
	s := newServed(t, secret)
	s.join("a/b", "n0", "n1")
	auth := []string{"Authorization", "Bearer " + secret, orderHeader, "1"}
	const path, wish = "/ui/runs/a%2Fb/orders", `{"kind":"bundle"}`
	resp, _ := s.do(http.MethodPost, path, wish, auth[2:]...)
	require.Equal(t, http.StatusUnauthorized, resp.StatusCode)
	for _, headers := range [][]string{auth[:2], append([]string{"Origin", "http://elsewhere"}, auth...)} {
		resp, _ = s.do(http.MethodPost, path, wish, headers...)
		require.Equal(t, http.StatusForbidden, resp.StatusCode)
	}
	resp, data := s.do(http.MethodPost, path, wish, auth...)
	require.Equal(t, http.StatusOK, resp.StatusCode, data)
	require.Equal(t, "no-store", resp.Header.Get("Cache-Control"))
	require.Regexp(t, `^attachment; filename="dlrover-bundle-a_b-\d{8}T\d{6}Z\.tar\.gz"$`,
		resp.Header.Get("Content-Disposition"))
	names := archived(t, data)
	require.Subset(t, names, []string{"status.json", "events.json", "failures.json", "checkpoints.json", "missing.txt"})

	from := api.NewClient(strings.TrimPrefix(s.at, "http://"), secret)
	defer from.Close()
	elsewhere := httptest.NewServer(api.PageHandler(api.ServerConfig{Token: secret, Page: New(Config{
		Source: Elsewhere(from), Log: slog.New(slog.DiscardHandler), Tokens: func() []string { return []string{secret} }})}))
	defer elsewhere.Close()
	there := *s
	there.at = elsewhere.URL
	_, data = there.do(http.MethodPost, path, wish, auth...)
	require.Equal(t, names, archived(t, data))
	for _, x := range []*served{s, &there} {
		resp, data = x.do(http.MethodPost, "/ui/runs/none/orders", wish, auth...)
		require.Equal(t, http.StatusConflict, resp.StatusCode)
		require.Contains(t, data, "bundle: ")
		for rank, why := range map[string]string{"": `rank "": need the rank`, "-1": "need the rank", "1e3": "need the rank",
			"7": "no such rank", "0": "without profiles"} {
			resp, data = x.do(http.MethodPost, path, `{"kind":"profile","rank":"`+rank+`"}`, auth...)
			require.Equal(t, http.StatusConflict, resp.StatusCode)
			require.Contains(t, data, why)
			require.Empty(t, resp.Header.Get("Content-Disposition"))
		}
	}
}

// recorded is a stream with a profile.
func recorded(end streams.Exit, parts ...string) io.ReadCloser {
	var b []byte
	for _, p := range parts {
		b = streams.Frame{Kind: streams.KindOutput, Std: 1, Data: []byte(p)}.Append(b)
	}
	b = streams.Frame{Kind: streams.KindExit, Data: streams.JSON(end)}.Append(b)
	return io.NopCloser(bytes.NewReader(b))
}

func TestAProfileIsPressed(t *testing.T) {
	var stream io.ReadCloser
	p := New(Config{Log: slog.New(slog.DiscardHandler), Source: Source{
		Profile: func(_ context.Context, run string, rank int, from string) (io.ReadCloser, error) {
			require.Equal(t, "a b", run)
			require.Equal(t, 3, rank)
			require.Contains(t, from, " on the page")
			return stream, nil
		}}})
	server := httptest.NewServer(p)
	defer server.Close()
	press := func() (*http.Response, string, error) {
		req, err := http.NewRequest(http.MethodPost, server.URL+"/ui/runs/a%20b/orders",
			strings.NewReader(`{"kind":"profile","rank":"3"}`))
		require.NoError(t, err)
		req.Header.Set(orderHeader, "1")
		resp, err := server.Client().Do(req)
		if err != nil {
			return nil, "", err
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		return resp, string(data), err
	}
	stream = recorded(streams.Exit{}, "one ", "trace")
	resp, data, err := press()
	require.NoError(t, err)
	require.Equal(t, "one trace", data)
	require.Regexp(t, `"dlrover-profile-a_b-rank3-\d{8}T\d{6}Z\.json\.gz"`,
		resp.Header.Get("Content-Disposition"))

	const old = "there is no profile of rank 3: a profile needs PyTorch 2.7 or newer, and this is 1.13"
	stream = recorded(streams.Exit{Code: streams.CodeRefused, Error: old})
	resp, data, err = press()
	require.NoError(t, err)
	require.Equal(t, http.StatusConflict, resp.StatusCode)
	require.Contains(t, data, old)

	stream = recorded(streams.Exit{Code: streams.CodeRefused, Error: "lost"}, "half a trace")
	_, _, err = press()
	require.Error(t, err, "no browser keeps a part")

	for range maxFiles {
		p.files <- struct{}{}
	}
	resp, data, err = press()
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
	require.Contains(t, data, "4 downloads are under way")
}

func TestDownloadsAreBounded(t *testing.T) {
	f := &file{w: httptest.NewRecorder(), size: maxFile}
	_, err := f.Write([]byte{0})
	require.ErrorIs(t, err, errLarge)
	synctest.Test(t, func(t *testing.T) { // a worker that writes no trace
		in, silent := io.Pipe()
		defer silent.Close()
		p := New(Config{Log: slog.New(slog.DiscardHandler), Source: Source{
			Profile: func(context.Context, string, int, string) (io.ReadCloser, error) { return in, nil }}})
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/ui/runs/a/orders",
			strings.NewReader(`{"kind":"profile","rank":"3"}`))
		req.Header.Set(orderHeader, "1")
		w, began := httptest.NewRecorder(), time.Now()
		p.ServeHTTP(w, req)
		require.Equal(t, fileTime, time.Since(began))
		require.Contains(t, w.Body.String(), "there is no trace after 10m0s")
	})
}

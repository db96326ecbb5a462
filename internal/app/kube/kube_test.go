package kube

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func TestParseLevel(t *testing.T) {
	for _, l := range []Level{None, Event, Condition, Taint, Cordon} {
		got, err := ParseLevel(string(l))
		require.NoError(t, err)
		require.Equal(t, l, got)
	}
	for _, name := range []string{"", "Taint", "drain"} {
		_, err := ParseLevel(name)
		require.ErrorContains(t, err, "want none, event, condition, taint, cordon or external-fault")
	}
}

func TestInCluster(t *testing.T) {
	dir, env := t.TempDir(), map[string]string{}
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	_, err := inCluster(lookup, dir)
	require.ErrorIs(t, err, ErrNotInCluster)
	env["KUBERNETES_SERVICE_HOST"], env["KUBERNETES_SERVICE_PORT"] = "fd00::1", "443"
	_, err = inCluster(lookup, dir)
	require.ErrorIs(t, err, ErrNotInCluster)
	require.ErrorContains(t, err, "automountServiceAccountToken")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "token"), []byte("t"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "namespace"), []byte("training\n"), 0o600))
	env["POD_NAME"] = "master-0"
	c, err := inCluster(lookup, dir)
	require.NoError(t, err)
	require.Equal(t, Config{
		Server: "https://[fd00::1]:443", CAFile: filepath.Join(dir, "ca.crt"), TokenFile: filepath.Join(dir, "token"),
		Namespace: "training", Pod: "master-0",
	}, c)
	for _, port := range []string{"0", "65536", "tcp://10.0.0.1:443"} {
		env["KUBERNETES_SERVICE_PORT"] = port
		_, err = inCluster(lookup, dir)
		require.ErrorContains(t, err, "1 to 65535")
		require.NotErrorIs(t, err, ErrNotInCluster)
	}
}

// A proxy would see to which nodes what happens, and with a certificate of its own the token.
func TestNoProxy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("t"), 0o600))
	r, err := newRest(Config{Server: "https://127.0.0.1:1", TokenFile: file})
	require.NoError(t, err)
	require.Nil(t, r.http.Transport.(*http.Transport).Proxy)
}

func TestClass(t *testing.T) {
	for reason, want := range map[string]string{
		"gpu.link": "gpu.link", "": "faulty", "...": "faulty", "故障": "faulty", "GPU 3: 41 GB/s": "GPU-3-41-GB-s",
		"-a-": "a", strings.Repeat("a", 62) + ".b": strings.Repeat("a", 62), strings.Repeat("a", 70): strings.Repeat("a", 63),
	} {
		require.Equal(t, want, class(reason), reason)
	}
}

func TestClean(t *testing.T) {
	require.Equal(t, "a [2Jb c�", clean("a\x1b[2Jb\nc\xff ", 100))
	require.Equal(t, "ä…", clean("äöü", 5))
	require.Equal(t, "äö", clean("äö", 4))
}

func TestTooManyOwners(t *testing.T) {
	r, err := parseRecord("")
	require.NoError(t, err)
	for i := range maxOwners {
		r, err = r.with(strings.Repeat("a", i+1), entry{})
		require.NoError(t, err)
	}
	_, err = r.with("b", entry{})
	require.ErrorContains(t, err, "64 owners already")
	_, err = r.with("a", entry{})
	require.NoError(t, err, "one that is there is replaced")
}

// Later versions may have put more there.
func TestForeignEntriesStayAsTheyAre(t *testing.T) {
	const theirs = `{"level":"drain","until":"2026-03-01T16:00:00Z","more":{"a":1}}`
	r, err := parseRecord(`{"theirs":` + theirs + `}`)
	require.NoError(t, err)
	r, err = r.with("ours", newEntry(Taint, Mark{Reason: "x"}))
	require.NoError(t, err)
	require.Contains(t, r.String(), theirs)
	require.Equal(t, `{"theirs":`+theirs+`}`, r.without("ours").String())
}

func FuzzRecord(f *testing.F) {
	for _, text := range []string{
		"", "{}", "null", "[]", `{"a":null}`, `{"a":{}}`, `{"":{}}`,
		`{"a":{"level":"taint","tainted":true},"b":{"cordoned":true}}`,
		`{"job":{"reason":"gpu\u001b.link","since":"2026-03-01T12:00:00+01:00","level":"condition"}}`,
	} {
		f.Add(text, "job")
	}
	f.Fuzz(func(t *testing.T, text, owner string) {
		r, err := parseRecord(text)
		if err != nil {
			require.Less(t, len(err.Error()), 2000)
			return
		}
		again, err := parseRecord(r.String())
		require.NoError(t, err)
		require.Equal(t, r.String(), again.String())
		require.Len(t, r.marks("n"), len(r.entries))
		if checkOwner(owner) != nil || len(r.entries) >= maxOwners {
			return
		}
		now := time.Unix(1_700_000_000, 0).UTC()
		n := &node{}
		n.Metadata.Annotations = map[string]string{Key: text}
		for _, l := range []Level{Condition, Taint, Cordon} {
			p, _, err := n.apply(l, Mark{Node: "n", Owner: owner, Since: now, Until: now}, now)
			require.NoError(t, err)
			if p != nil {
				_, err = json.Marshal(p.body)
				require.NoError(t, err)
			}
		}
		for other, e := range r.without(owner).entries {
			kept, err := r.with(owner, entry{})
			require.NoError(t, err)
			require.Equal(t, e, kept.entries[other])
		}
	})
}

func FuzzText(f *testing.F) {
	f.Add("GPU 3: 41 GB/s, need 300", 20)
	f.Add("\xff\x00äöü", 3)
	label := regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	f.Fuzz(func(t *testing.T, text string, limit int) {
		require.Regexp(t, label, class(text))
		limit = 3 + max(limit, -limit, 0)%1000
		line := clean(text, limit)
		require.LessOrEqual(t, len(line), limit)
		require.True(t, utf8.ValidString(line))
		require.NotContains(t, line, "\n")
	})
}

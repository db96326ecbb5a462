package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/stretchr/testify/require"
)

func TestImage(t *testing.T) {
	t.Parallel()
	r := testRelease(t)
	im := images()[1]
	require.NoError(t, r.writeImage(r.out, im, amd64))
	path, data := one(t, r.out, "*.tar")
	require.Equal(t, "dlrover-run-launcher-v1.2.3-image.tar", filepath.Base(path))
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }
	manifest, err := tarball.LoadManifest(open)
	require.NoError(t, err)
	require.Equal(t, []string{"dlrover-run:v1.2.3-launcher"}, manifest[0].RepoTags)
	img, err := tarball.ImageFromPath(path, nil)
	require.NoError(t, err)
	require.NoError(t, validate.Image(img))
	config, err := img.ConfigFile()
	require.NoError(t, err)
	require.Equal(t, "amd64", config.Architecture)
	require.Equal(t, nobody, config.Config.User)
	require.Equal(t, []string{"/usr/local/bin/dlrover-run"}, config.Config.Entrypoint)
	require.Equal(t, "v1.2.3", config.Config.Labels["org.opencontainers.image.version"])

	layers, err := img.Layers()
	require.NoError(t, err)
	require.Len(t, layers, 1)
	in, err := layers[0].Uncompressed()
	require.NoError(t, err)
	modes := map[string]int64{}
	for entries := tar.NewReader(in); ; {
		h, err := entries.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		require.True(t, r.time.Equal(h.ModTime), h.Name)
		modes[h.Name] = h.Mode
	}
	require.EqualValues(t, 0o755, modes["usr/local/bin/"])
	require.EqualValues(t, 0o755, modes["usr/local/bin/dlrover-run"])
	require.EqualValues(t, 0o1777, modes["tmp/"])
	require.Contains(t, modes, "usr/local/share/doc/dlrover-run/sbom.cdx.json")
	require.NotContains(t, modes, "usr/local/bin/dlroverctl")

	require.NoError(t, r.writeImage(r.out, im, amd64))
	_, again := one(t, r.out, "*.tar")
	require.True(t, bytes.Equal(data, again), "other bytes the second time")
}

// A folder is in front of what it holds, and links lead to a name beside them.
func TestTarHasFolders(t *testing.T) {
	r := testRelease(t)
	var out bytes.Buffer
	require.NoError(t, r.tar(&out, []file{{"a/b/c", []byte("x"), 0o644}}, map[string]string{"a/b/link": "c"}))
	var names []string
	for entries := tar.NewReader(&out); ; {
		h, err := entries.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		names = append(names, h.Name+h.Linkname)
	}
	require.Equal(t, []string{"a/", "a/b/", "a/b/c", "a/b/linkc", "tmp/"}, names)
}

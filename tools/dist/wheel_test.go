package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/stretchr/testify/require"
)

// amd64 has programs in the release of a test.
var amd64 = architectures[0]

// testRelease is a release whose programs are one small program for amd64.
func testRelease(t *testing.T) *release {
	t.Helper()
	r := &release{version: "v1.2.3", python: "1.2.3", debian: "1.2.3-1", time: time.Unix(1_700_000_000, 0).UTC(),
		root: "../..", programs: t.TempDir(), out: t.TempDir(), notices: &notices{}}
	dir := filepath.Join(r.programs, amd64.debian)
	require.NoError(t, os.Mkdir(dir, 0o755))
	small := filepath.Join(dir, "dlrover-run")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", small, "./testdata/small")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH=amd64")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	for _, name := range []string{"dlrover-master", "checkpointd", "dlroverctl"} {
		require.NoError(t, os.Link(small, filepath.Join(dir, name)))
	}
	require.NoError(t, r.notices.read(r))
	return r
}

// one is the only file with such a name.
func one(t *testing.T, dir, pattern string) (path string, data []byte) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, pattern))
	require.NoError(t, err)
	require.Len(t, paths, 1, pattern)
	data, err = os.ReadFile(paths[0])
	require.NoError(t, err)
	return paths[0], data
}

func TestWheel(t *testing.T) {
	t.Parallel()
	r := testRelease(t)
	for _, w := range wheels() {
		require.NoError(t, r.writeWheel(r.out, w, amd64))
	}
	path, data := one(t, r.out, "dlrover_run_go-1.2.3-*")
	require.Equal(t, "dlrover_run_go-1.2.3-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.musllinux_1_1_x86_64.whl",
		filepath.Base(path))
	entries, err := os.ReadDir(r.out)
	require.NoError(t, err)
	require.Len(t, entries, 2, "there is no gpucheck")

	z, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	require.NoError(t, err)
	got := map[string][]byte{}
	for _, f := range z.File {
		in, err := f.Open()
		require.NoError(t, err)
		got[f.Name], err = io.ReadAll(in)
		require.NoError(t, err)
		require.Equal(t, strings.Contains(f.Name, "/scripts/"), f.Mode()&0o111 != 0, f.Name)
		require.True(t, r.time.Equal(f.Modified), f.Name)
	}
	info := "dlrover_run_go-1.2.3.dist-info/"
	rows, err := csv.NewReader(bytes.NewReader(got[info+"RECORD"])).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, len(got))
	for _, row := range rows {
		if row[0] != info+"RECORD" {
			sum := sha256.Sum256(got[row[0]])
			require.Equal(t, "sha256="+base64.RawURLEncoding.EncodeToString(sum[:]), row[1])
			require.Equal(t, fmt.Sprint(len(got[row[0]])), row[2])
		}
	}
	require.Contains(t, string(got[info+"METADATA"]),
		"Provides-Extra: gpu\nRequires-Dist: dlrover-run-go-gpucheck == 1.2.3; extra == 'gpu'\n")
	require.Contains(t, string(got[info+"licenses/"+noticesName]), "The Go Authors")
	require.Contains(t, string(got[info+"licenses/"+noticesName]), "github.com/CycloneDX/cyclonedx-go@")

	require.NoError(t, r.writeWheel(r.out, wheels()[0], amd64))
	_, again := one(t, r.out, "dlrover_run_go-1.2.3-*")
	require.True(t, bytes.Equal(data, again), "other bytes the second time")
}

// Every module that the linker has recorded is in the bill, and every reference leads to a component.
func TestBillOfMaterials(t *testing.T) {
	t.Parallel()
	r := testRelease(t)
	data, err := r.sbomOf("all", []string{r.program(amd64, "dlrover-run"), r.program(amd64, "dlroverctl")})
	require.NoError(t, err)
	require.NotContains(t, string(data), "(devel)")
	var bom cdx.BOM
	require.NoError(t, cdx.NewBOMDecoder(bytes.NewReader(data), cdx.BOMFileFormatJSON).Decode(&bom))
	refs := map[string]string{bom.Metadata.Component.BOMRef: bom.Metadata.Component.Version}
	for _, c := range *bom.Components {
		require.NotContains(t, refs, c.BOMRef)
		refs[c.BOMRef] = c.Version
	}
	require.Equal(t, "v1.2.3", refs["dlroverctl@v1.2.3"])
	require.Contains(t, refs, "pkg:golang/github.com/CycloneDX/cyclonedx-go@v0.12.0")
	require.Len(t, *bom.Dependencies, 3)
	for _, d := range *bom.Dependencies {
		require.Contains(t, refs, d.Ref)
		for _, on := range *d.Dependencies {
			require.Contains(t, refs, on)
		}
	}
}

func TestSourceDate(t *testing.T) {
	at, err := sourceDate("1700000000")
	require.NoError(t, err)
	require.Equal(t, 2023, at.Year())
	for _, epoch := range []string{"", "yesterday", "1", "-5"} {
		_, err := sourceDate(epoch)
		require.ErrorContains(t, err, "in 1980 or later", epoch)
	}
}

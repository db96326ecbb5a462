package ctl

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv/native"
)

// programs is a directory with what the links lead to.
func programs(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "bin")
	require.NoError(t, os.Mkdir(dir, 0o755))
	for _, name := range []string{"dlrover-run", "dlroverctl"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o755))
	}
	return dir
}

// install makes the links, and returns what is said.
func install(t *testing.T, programs, dir string, force bool, names ...string) (string, error) {
	t.Helper()
	links, err := linksOf(programs, names)
	require.NoError(t, err)
	var out bytes.Buffer
	err = (&program{stdout: &out}).install(dir, links, force, false)
	return out.String(), err
}

func TestInstallNames(t *testing.T) {
	t.Setenv("PATH", "")
	bin := programs(t)
	out, err := install(t, bin, bin, false)
	require.NoError(t, err)
	for _, l := range native.Launchers() {
		target, err := os.Readlink(filepath.Join(bin, l.Name))
		require.NoError(t, err)
		require.Equal(t, "dlrover-run", target)
		require.Contains(t, out, "made "+filepath.Join(bin, l.Name)+" -> dlrover-run\n")
	}
	for _, name := range []string{viewer, driver} {
		target, err := os.Readlink(filepath.Join(bin, name))
		require.NoError(t, err)
		require.Equal(t, "dlroverctl", target)
	}
	require.True(t, strings.HasSuffix(out, "note: "+bin+" is not in $PATH\n"), out)

	t.Setenv("PATH", bin)
	out, err = install(t, bin, bin, false)
	require.NoError(t, err)
	require.NotContains(t, out, "made")
	require.NotContains(t, out, "note")
	require.Equal(t, len(native.Launchers())+2, strings.Count(out, "kept"))
}

// Links from elsewhere: relative in the same tree, through a link to the directory, too.
func TestInstallNamesElsewhere(t *testing.T) {
	bin, dir := programs(t), t.TempDir()
	other := filepath.Join(t.TempDir(), "other")
	require.NoError(t, os.Symlink(dir, other))
	t.Setenv("PATH", bin)
	_, err := install(t, bin, bin, false)
	require.NoError(t, err)
	out, err := install(t, bin, other, false, "msrun")
	require.NoError(t, err)
	require.Contains(t, out, "made "+filepath.Join(other, "msrun")+" -> ../")
	require.Contains(t, out, "note: "+other+" is not in $PATH\n")
	target, err := filepath.EvalSymlinks(filepath.Join(dir, "msrun"))
	require.NoError(t, err)
	require.Equal(t, filepath.Join(bin, "dlrover-run"), target)

	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "only what was asked for, and nothing temporary")
	require.Equal(t, "/opt/bin/dlrover-run", link{"msrun", "/opt/bin/dlrover-run"}.target("/usr/bin"))
}

// What is not ours stays, and then nothing is made.
func TestInstallNamesRefuses(t *testing.T) {
	bin, dir := programs(t), t.TempDir()
	t.Setenv("PATH", dir)
	theirs := filepath.Join(dir, "torchrun")
	require.NoError(t, os.WriteFile(theirs, []byte("#!/bin/sh"), 0o755))
	require.NoError(t, os.Symlink("/opt/theirs/msrun", filepath.Join(dir, "msrun")))
	require.NoError(t, os.Symlink("/gone/dlrover-run", filepath.Join(dir, "xpu_timer_launch")))
	_, err := install(t, bin, dir, false)
	require.ErrorContains(t, err, theirs+" is another program: --force replaces it")
	require.ErrorContains(t, err, filepath.Join(dir, "msrun")+" is another program")
	require.NotContains(t, err.Error(), "xpu_timer")
	require.NotContains(t, err.Error(), "\n")
	require.NoFileExists(t, filepath.Join(dir, viewer))

	out, err := install(t, bin, dir, false, "xpu_timer_launch")
	require.NoError(t, err)
	require.Contains(t, out, "replaced", "a link to an earlier place of the program")
	out, err = install(t, bin, dir, true)
	require.NoError(t, err)
	require.Equal(t, 2, strings.Count(out, "replaced"))
	require.Contains(t, out, "kept "+filepath.Join(dir, "xpu_timer_launch"))

	require.NoError(t, os.Remove(theirs))
	require.NoError(t, os.Mkdir(theirs, 0o755))
	_, err = install(t, bin, dir, true)
	require.ErrorContains(t, err, theirs+" is a directory")
	_, err = install(t, bin, filepath.Join(dir, "none"), false)
	require.ErrorContains(t, err, "make the directory, or give another one")

	_, err = linksOf(bin, []string{"horovodrun"})
	require.ErrorContains(t, err, `"horovodrun" is none of the names: use `)
	_, err = linksOf(dir, nil)
	require.ErrorContains(t, err, "dlroverctl looks for dlrover")
	require.Equal(t, 2, ctl(&bytes.Buffer{}, "install-names"))
}

// pip lets the packages dlrover and dlrover-run-go have a file of the same name.
func TestInstallNamesSaysWhoseTheProgramIs(t *testing.T) {
	bin, dir := programs(t), t.TempDir()
	t.Setenv("PATH", dir)
	launcher := filepath.Join(bin, "dlrover-run")
	record := func(stem, rows string) {
		info := filepath.Join(filepath.Dir(bin), "lib/python3.11/site-packages", stem+".dist-info")
		require.NoError(t, os.MkdirAll(info, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(info, "RECORD"), []byte(rows), 0o644))
	}
	record("dlrover_run_go-1.2", "../../../bin/dlrover-run,sha256=a,1\n")
	record("torch-1.2", "../../../bin/torchrun,sha256=a,1\nbin/dlrover-run,,\n")
	out, err := install(t, bin, dir, false)
	require.NoError(t, err)
	require.NotContains(t, out, "note")

	record("dlrover-0.6.1", "dlrover/a.py,,\n../../../bin/dlrover-run,sha256=a,1\n")
	out, err = install(t, bin, dir, false)
	require.NoError(t, err)
	require.Contains(t, out, "note: "+launcher+" is this program, and also a file of dlrover 0.6.1: to install or remove "+
		"that package removes this program; then: pip install --force-reinstall --no-deps dlrover_run_go-*.whl\n")

	require.NoError(t, os.WriteFile(launcher, []byte("#!/usr/bin/python3\n"), 0o755))
	_, err = linksOf(bin, nil)
	require.ErrorContains(t, err, launcher+" is a script of dlrover 0.6.1, to which")
	require.NoError(t, os.Remove(launcher))
	_, err = linksOf(bin, nil)
	require.ErrorContains(t, err, "pip install --force-reinstall")

	other := programs(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "dlrover-run"), nil, 0o755))
	out, err = install(t, other, dir, true)
	require.NoError(t, err)
	require.Contains(t, out, "note: the links lead to "+other+"/dlrover-run, but $PATH finds "+dir+"/dlrover-run first")
}

package token

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	first  = "first-0123456789abcdef"
	second = "second-0123456789abcdef"
)

// changing is a token file that may be read again at once.
type changing struct {
	Job
	t   *testing.T
	log bytes.Buffer
}

func follow(t *testing.T, text string) *changing {
	path := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	j, err := Find(path, os.LookupEnv)
	require.NoError(t, err)
	c := &changing{Job: j, t: t}
	j.LogTo(slog.New(slog.NewTextHandler(&c.log, nil)))
	return c
}

// write replaces the text; the file is as old as said.
func (c *changing) write(text string, age time.Duration) {
	c.t.Helper()
	require.NoError(c.t, os.WriteFile(c.file.path, []byte(text), 0o600))
	c.touch(age)
}

// touch also makes the next use read the file.
func (c *changing) touch(age time.Duration) {
	c.t.Helper()
	at := time.Now().Add(-age)
	require.NoError(c.t, os.Chtimes(c.file.path, at, at))
	c.file.looked = time.Time{}
}

// The three steps of a rotation.
func TestATokenChanges(t *testing.T) {
	c := follow(t, first+"\n")
	require.Equal(t, []string{first}, c.Accepted())
	c.write(first+"\n"+second+"\n", time.Minute)
	require.Equal(t, []string{first, second}, c.Accepted())
	require.Equal(t, first, c.Sent())
	c.write(second+"\n\n"+first, time.Minute)
	require.Equal(t, []string{first, second}, c.Accepted(), "an empty line between them is an error")
	c.write(second+"\n"+first, time.Minute)
	require.Equal(t, second, c.Sent())
	c.write(second, time.Minute)
	require.Equal(t, []string{second}, c.Accepted())
	require.NotContains(t, c.log.String(), first)
	require.NotContains(t, c.log.String(), second)
}

// A file that is being written is not believed: another look finds the same.
func TestAHalfWrittenTokenIsNotUsed(t *testing.T) {
	c := follow(t, first)
	c.write(second[:20], 0)
	require.Equal(t, first, c.Sent())
	c.write(second, 0)
	require.Equal(t, first, c.Sent())
	c.touch(0)
	require.Equal(t, second, c.Sent())
}

func TestATokenFileThatCannotBeUsed(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "short": "short-" + first[:4], "three lines": first + "\n" + second + "\n" + first,
	} {
		t.Run(name, func(t *testing.T) {
			c := follow(t, first)
			for range 3 {
				c.write(text, time.Minute)
				require.Equal(t, []string{first}, c.Accepted())
			}
			require.Equal(t, 1, bytes.Count(c.log.Bytes(), []byte("cannot be used")), c.log.String())
			require.NotContains(t, c.log.String(), "short-")
			c.write(second, time.Minute)
			require.Equal(t, second, c.Sent())
		})
	}
	c := follow(t, first)
	require.NoError(t, os.Remove(c.file.path))
	for range 3 {
		c.file.looked = time.Time{}
		require.Equal(t, first, c.Sent())
	}
}

// Kubernetes replaces a link, and not the file.
func TestTheTokenOfASecret(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"1": first, "2": second} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "token"), []byte(text), 0o600))
	}
	require.NoError(t, os.Symlink("1", filepath.Join(dir, "..data")))
	require.NoError(t, os.Symlink("..data/token", filepath.Join(dir, "token")))
	j, err := Find(filepath.Join(dir, "token"), os.LookupEnv)
	require.NoError(t, err)
	require.NoError(t, os.Symlink("2", filepath.Join(dir, "..new")))
	require.NoError(t, os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")))
	require.Eventually(t, func() bool { return j.Sent() == second }, 20*time.Second, 20*time.Millisecond)
}

func TestATokenOfAVariableStays(t *testing.T) {
	require.Equal(t, []string{first}, Job{Token: first}.Accepted())
	require.Empty(t, Job{}.Accepted())
	require.Empty(t, Job{}.Sent())
	require.Empty(t, Job{Token: first}.Path())
}

package pystack

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func ownELF(t testing.TB) []byte {
	b, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	return b
}

func TestELFFileThatIsNone(t *testing.T) {
	head := ownELF(t)[:64]
	_, err := parseELF(bytes.NewReader(head[:40]))
	require.ErrorIs(t, err, errELF)
	_, err = parseELF(bytes.NewReader(head))
	require.ErrorIs(t, err, errELF, "its tables are missing")
	_, err = parseELF(bytes.NewReader(bytes.Repeat([]byte("#!/bin/sh\n"), 20)))
	require.ErrorIs(t, err, errELF)
	_, err = parseELF(strings.NewReader(
		"\x7fELF\x01\x01\x01" + strings.Repeat("\x00", 13) + "\x01" + strings.Repeat("\x00", 43)))
	require.EqualError(t, err,
		"an ELF file of class 1 and byte order 1 is not supported: 64-bit (2) little-endian (1) is")
}

func FuzzELFFile(f *testing.F) {
	f.Add(ownELF(f)[:4096])
	f.Add([]byte("\x7fELF\x02\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := parseELF(bytes.NewReader(b))
		if err != nil {
			return
		}
		lookup(file, "_PyRuntime", "Py_Version")
		functionsAt(file, []uint64{0, 1 << 20})
		versionText(file)
	})
}

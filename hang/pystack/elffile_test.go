package pystack

import (
	"bytes"
	"debug/elf"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func ownELF(t testing.TB) []byte {
	b, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	return b
}

// The test's own program has all that is looked for.
func TestELFFileIsReadAsDebugELFDoes(t *testing.T) {
	b := ownELF(t)
	want, err := elf.NewFile(bytes.NewReader(b))
	require.NoError(t, err)
	got, err := parseELF(bytes.NewReader(b))
	require.NoError(t, err)

	var loads []load
	for _, p := range want.Progs {
		if p.Type == elf.PT_LOAD {
			loads = append(loads, load{offset: p.Off, addr: p.Vaddr, size: p.Filesz})
		}
	}
	require.Equal(t, loads, got.loads)
	require.Len(t, got.sections, len(want.Sections))
	for i, s := range want.Sections {
		if s.Type != elf.SHT_NOBITS && s.Type != elf.SHT_NULL {
			require.Equal(t, []uint64{uint64(s.Type), s.Offset, s.FileSize, uint64(s.Link)},
				[]uint64{uint64(got.sections[i].kind), got.sections[i].offset, got.sections[i].size, uint64(got.sections[i].link)})
		}
	}
	rodata, ok := got.section(".rodata")
	require.True(t, ok)
	data, err := rodata.read()
	require.NoError(t, err)
	wantData, err := want.Section(".rodata").Data()
	require.NoError(t, err)
	require.True(t, bytes.Equal(wantData, data))
	_, ok = got.section(".rodat")
	require.False(t, ok)
}

func TestELFFileThatIsNone(t *testing.T) {
	head := ownELF(t)[:elfHeaderSize]
	_, err := parseELF(bytes.NewReader(head[:40]))
	require.ErrorIs(t, err, errELF)
	_, err = parseELF(bytes.NewReader(head))
	require.ErrorIs(t, err, errELF, "its tables are missing")
	_, err = parseELF(bytes.NewReader(bytes.Repeat([]byte("#!/bin/sh\n"), 20)))
	require.ErrorIs(t, err, errELF)
	head = bytes.Clone(head)
	head[4] = 1
	_, err = parseELF(bytes.NewReader(head))
	require.EqualError(t, err,
		"an ELF file of class 1 and byte order 1 is not supported: 64-bit (2) little-endian (1) is")
}

// A section that says that it is larger than its file is not believed.
func TestELFSectionThatLies(t *testing.T) {
	s := elfSection{r: bytes.NewReader(make([]byte, 100)), offset: 10, size: maxRodata}
	_, err := s.read()
	require.ErrorIs(t, err, errELF)
	s.size = 90
	b, err := s.read()
	require.NoError(t, err)
	require.Len(t, b, 90)
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

// Package spark tests the example of preprocessing: against a reader of its own, and against Spark.
package spark

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	debianPython = "/usr/bin/python3"
	program      = "pyspark_preprocess.py"
)

// corpus is input in a folder: its files, and the texts of all documents in their order.
type corpus struct {
	dir   string
	files []string
	texts []string
	lists [][]string
}

// newCorpus has texts of all lengths, none and long ones among them, empty lines, \r\n, a file without a last newline
// and a compressed one.
func newCorpus(t *testing.T) *corpus {
	t.Helper()
	c := &corpus{dir: t.TempDir()}
	for file := range 3 {
		var b bytes.Buffer
		for i := range 400 {
			n := file*400 + i
			text := strings.Repeat(fmt.Sprintf("%d äß中😀\n", n), n*n%23)
			list := []string{text, "", fmt.Sprint(n)}[:n%4%3+1]
			c.texts, c.lists = append(c.texts, text), append(c.lists, list)
			line, err := json.Marshal(map[string]any{"text": text, "list": list, "other": n})
			require.NoError(t, err)
			b.Write(line)
			b.WriteString([]string{"\n", "\r\n", "\n \n\n"}[n%3])
		}
		c.write(t, file, b.Bytes())
	}
	return c
}

func (c *corpus) write(t *testing.T, file int, data []byte) {
	t.Helper()
	name := fmt.Sprintf("%d.jsonl", file)
	switch file {
	case 1:
		data = bytes.TrimRight(data, "\r\n ")
	case 2:
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, err := z.Write(data)
		require.NoError(t, err)
		require.NoError(t, z.Close())
		name, data = name+".gz", b.Bytes()
	}
	c.files = append(c.files, filepath.Join(c.dir, name))
	require.NoError(t, os.WriteFile(c.files[file], data, 0o600))
}

// args are for the program.
func (c *corpus) args(prefix string, more ...string) []string {
	return append([]string{"--input", strings.Join(c.files, ","), "--output_prefix=" + filepath.Join(c.dir, prefix),
		"--jsonl-keys", "text", "list", "--append-eod"}, more...)
}

// run runs a command in the folder of this test. Nothing but its data sets may stay.
func (c *corpus) run(t *testing.T, command ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "SPARK_LOCAL_IP=127.0.0.1",
		"SPARK_LOCAL_HOSTNAME=localhost")
	out, err := cmd.CombinedOutput()
	left, globErr := filepath.Glob(filepath.Join(c.dir, "*.parts-*"))
	require.NoError(t, globErr)
	require.Empty(t, left)
	return string(out), err
}

// single makes the data sets in one process.
func (c *corpus) single(t *testing.T, python, prefix string, more ...string) {
	t.Helper()
	out, err := c.run(t, append([]string{python, program, "--single-process"}, c.args(prefix, more...)...)...)
	require.NoError(t, err, out)
}

// indexed reads a data set, the index of which has 8 or 4 as the tokens' type: documents of sequences of tokens.
func indexed(t *testing.T, prefix string) (documents [][][]int) {
	t.Helper()
	idx, err := os.ReadFile(prefix + ".idx")
	require.NoError(t, err)
	bin, err := os.ReadFile(prefix + ".bin")
	require.NoError(t, err)
	require.Equal(t, "MMIDIDX\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00", string(idx[:17]))
	size := map[byte]int{8: 2, 4: 4}[idx[17]]
	long := func(at int) int { return int(binary.LittleEndian.Uint64(idx[at:])) }
	sequences, bounds := long(18), long(26)
	pointers := 34 + 4*sequences
	require.Len(t, idx, pointers+8*sequences+8*bounds)
	all := make([][]int, sequences)
	for i := range all {
		at := long(pointers + 8*i)
		all[i] = make([]int, binary.LittleEndian.Uint32(idx[34+4*i:]))
		for j := range all[i] {
			for b := range size {
				all[i][j] |= int(bin[at+size*j+b]) << (8 * b)
			}
		}
	}
	for at := pointers + 8*sequences; at+8 < len(idx); at += 8 {
		documents = append(documents, all[long(at):long(at+8)])
	}
	return documents
}

// bytewise is a document as the built-in tokenizer has it: texts without a token are no sequence, 0 is its end.
func bytewise(texts ...string) (document [][]int) {
	document = [][]int{}
	for _, text := range texts {
		if text == "" {
			continue
		}
		tokens := make([]int, 0, len(text)+1)
		for _, b := range []byte(text) {
			tokens = append(tokens, int(b))
		}
		document = append(document, tokens)
	}
	if n := len(document); n > 0 {
		document[n-1] = append(document[n-1], 0)
	}
	return document
}

func TestPreprocessing(t *testing.T) {
	needPython(t)
	c := newCorpus(t)
	c.single(t, debianPython, "whole")
	text := indexed(t, filepath.Join(c.dir, "whole_text_document"))
	list := indexed(t, filepath.Join(c.dir, "whole_list_document"))
	require.Len(t, text, len(c.texts))
	require.Len(t, list, len(c.texts))
	for i := range text {
		require.Equal(t, bytewise(c.texts[i]), text[i], i)
		require.Equal(t, bytewise(c.lists[i]...), list[i], i)
	}
	for _, pieces := range []string{"1", "7", "5000"} {
		c.single(t, debianPython, "pieces", "--partitions", pieces)
		c.same(t, "whole", "pieces")
	}
	out, err := c.run(t, debianPython, "read_indexed.py", filepath.Join(c.dir, "whole_list_document"), "1")
	require.NoError(t, err, out)
	require.Contains(t, out, "1200 documents, ")
	require.Contains(t, out, " of type 8\n1 [[49, 32, 195, 164, 195, 159, ")
}

func needPython(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(debianPython); err != nil {
		t.Skip("SKIPPED: PREPROCESSING IS NOT TRIED: ", err)
	}
}

// same asserts that two runs have made the same bytes.
func (c *corpus) same(t *testing.T, one, other string) {
	t.Helper()
	for _, end := range []string{"text_document.bin", "text_document.idx", "list_document.bin", "list_document.idx"} {
		end = "_" + end
		a, err := os.ReadFile(filepath.Join(c.dir, one+end))
		require.NoError(t, err)
		b, err := os.ReadFile(filepath.Join(c.dir, other+end))
		require.NoError(t, err)
		require.True(t, bytes.Equal(a, b), "%s and %s differ in %s", one, other, end)
	}
}

// spoil puts bad lines into the first two files.
func (c *corpus) spoil(t *testing.T) (want []string) {
	t.Helper()
	bad := []string{`{"text": "no list"}`, `{"text": 5, "list": []}`, "[1]", "{", "\"\xff\"",
		`{"text": "\ud800", "list": []}`}
	for _, file := range c.files[:2] {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		lines := strings.Split(string(data), "\n")
		for i, line := range bad {
			lines[7*i+3] += "\n" + line
		}
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600))
		for i, why := range []string{"no key 'list'", "no text at key 'text', but int", "no object, but list",
			"Expecting property name", "no UTF-8 at byte 1", `half a character (\ud800) at key 'text'`} {
			want = append(want, fmt.Sprintf("%s:%d: %s", file, 7*i+3+i+2, why))
		}
	}
	return want
}

func TestBadLines(t *testing.T) {
	needPython(t)
	c := newCorpus(t)
	c.single(t, debianPython, "good")
	want := c.spoil(t)
	args := c.args("bad", "--single-process", "--partitions=9")
	out, err := c.run(t, append([]string{debianPython, program}, args...)...)
	require.ErrorContains(t, err, "exit status 1")
	for _, line := range want {
		require.Contains(t, out, line)
	}
	require.Contains(t, out, "\n12 of ")
	require.Contains(t, out, "nothing is written: correct them, or leave them out by --bad-lines=skip\n")
	_, err = os.Stat(filepath.Join(c.dir, "bad_text_document.bin"))
	require.ErrorIs(t, err, os.ErrNotExist)
	c.single(t, debianPython, "bad", "--bad-lines=skip")
	c.same(t, "good", "bad")
}

func TestRefusals(t *testing.T) {
	needPython(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "a.jsonl")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	input, output := "--input="+file, "--output-prefix="+dir+"/a"
	run := func(args ...string) (string, error) {
		args = append([]string{program, "--single-process"}, args...)
		out, err := exec.Command(debianPython, args...).CombinedOutput()
		return string(out), err
	}
	for want, args := range map[string][]string{
		"there is no file /none":                       {"--input=/none", output},
		"hdfs://a: only files of mounted file systems": {"--input=hdfs://a", output},
		"a.zst: of compressed files only .gz is read":  {"--input=a.zst", output},
		"there is no directory /none":                  {input, "--output-prefix=/none/a"},
		"'a/b' is given twice, or cannot":              {input, output, "--json-keys", "a/b"},
		"invalid choice: 'lazy'":                       {input, output, "--dataset-impl=lazy"},
		"No module named 'none', which":                {input, output, "--tokenizer-type=none:f"},
		"--tokenizer-type=Other: want Char":            {input, output, "--tokenizer-type=Other"},
	} {
		out, err := run(args...)
		require.ErrorContains(t, err, "exit status 2", out)
		require.Contains(t, out, want)
	}
	out, err := run(input, output)
	require.NoError(t, err, out)
	require.Empty(t, indexed(t, filepath.Join(dir, "a_text_document")))
}

package warm

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWire(t *testing.T) {
	ours, end, err := pair()
	require.NoError(t, err)
	defer ours.Close()
	theirs, err := connOf(end)
	require.NoError(t, err)
	require.NoError(t, theirs.write([]byte(`{"op":"prepared","v":1,"modules":7,"failed":[["x","no"]]}`), nil))
	a, err := ours.receive()
	require.NoError(t, err)
	require.Equal(t, answer{Op: opPrepared, V: 1, Modules: 7, Failed: []failed{{"x", "no"}}}, a)

	more, err := inMemory("more", []byte(`{"files":[["/a",12,3]]}`))
	require.NoError(t, err)
	defer more.Close()
	_, err = more.Seek(0, io.SeekStart)
	require.NoError(t, err)
	require.NoError(t, theirs.write([]byte(`{"op":"prepared"}`), []*os.File{more}))
	a, err = ours.receive()
	require.NoError(t, err)
	require.Equal(t, []file{{"/a", 12, 3}}, a.Files)

	large := request{Op: opPrepare, Modules: []string{strings.Repeat("x", maxMessage)}}
	require.NoError(t, ours.send(large))
	buf, oob := make([]byte, 100), make([]byte, 64)
	n, oobn, _, _, err := theirs.ReadMsgUnix(buf, oob)
	require.NoError(t, err)
	require.Equal(t, `{"op":"prepare"}`, string(buf[:n]))
	body := received(oob[:oobn])
	defer body.Close()
	text, err := io.ReadAll(io.NewSectionReader(body, 0, 1<<20))
	require.NoError(t, err)
	require.Contains(t, string(text), large.Modules[0])

	require.NoError(t, theirs.write(bytes.Repeat([]byte("x"), maxMessage+1), nil))
	_, err = ours.receive()
	require.ErrorContains(t, err, "more than 65536 bytes")
	require.NoError(t, theirs.Close())
	_, err = ours.receive()
	require.ErrorIs(t, err, io.EOF)
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"op":"prepared","files":[["/a",1,2]],"failed":[["a","b"]]}`), []byte(`{"files":[]}`))
	f.Add([]byte(`{}`), []byte(`[`))
	f.Fuzz(func(t *testing.T, data, more []byte) {
		if a, err := decode(data, bytes.NewReader(more)); err == nil {
			_, err = decode(data, nil)
			require.NoError(t, err)
			require.LessOrEqual(t, len(a.Files), len(data)+len(more))
		}
	})
}

func TestCompatible(t *testing.T) {
	base := []string{"PATH=/bin", "OMP_NUM_THREADS=1", "PYTHONPATH=/a", "TORCH_LOGS=x"}
	for _, same := range [][]string{
		{"PATH=/other", "RANK=3", "MASTER_PORT=1", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "TORCHELASTIC_RUN_ID=x", "TZ=UTC"},
		{"OMP_NUM_THREADS=2", "OMP_NUM_THREADS=1"},
	} {
		require.Empty(t, compatible(base, append(base, same...)))
	}
	for _, other := range []string{
		"OMP_NUM_THREADS=2", "LD_PRELOAD=x", "PYTHONPATH=/b", "TORCHDYNAMO_DISABLE=1", "LC_ALL=C",
	} {
		name, _, _ := strings.Cut(other, "=")
		require.Equal(t, "$"+name+" is not what it was at the imports", compatible(base, append(base, other)))
	}
	require.Equal(t, "$TORCH_LOGS is not what it was at the imports", compatible(base, base[:3]))
}

func TestCommon(t *testing.T) {
	a := []string{"A=1", "RANK=0", "B=2", "C=old", "C=3", "DLROVER_HANG_DIR=/d"}
	b := []string{"A=1", "RANK=1", "B=3", "C=3", "DLROVER_HANG_DIR=/d"}
	require.Equal(t, []string{"A=1", "C=3", "DLROVER_HANG_DIR=/d"}, commonEnv(a, b))
	require.Equal(t, []string{"A=1", "B=2", "C=3", "DLROVER_HANG_DIR=/d"}, commonEnv(a))
}

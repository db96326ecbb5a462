package tcpstore

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

func decodeAll(r io.Reader, cfg Config) (reqs []request, err error) {
	cfg = cfg.withDefaults()
	d := decoder{r: bufio.NewReaderSize(r, 64), cfg: &cfg, receiving: new(atomic.Int64)}
	for {
		req, err := d.next()
		if err != nil {
			return reqs, err
		}
		reqs = append(reqs, req)
	}
}

func wireCases() []struct {
	name string
	gen  generation
	wire string
	want request
} {
	v := func(s ...string) (out [][]byte) {
		for _, x := range s {
			out = append(out, []byte(x))
		}
		return out
	}
	return []struct {
		name string
		gen  generation
		wire string
		want request
	}{
		{"A set", genA, "\x00" + str("/k") + str("v"), request{opSet, genA, []string{"/k"}, v("v"), 0}},
		{"A compare_set", genA, "\x01" + str("/k") + str("") + str("n"),
			request{opCompareSet, genA, []string{"/k"}, v("", "n"), 0}},
		{"A get", genA, "\x02" + str("/k"), request{opGet, genA, []string{"/k"}, nil, 0}},
		{"A add", genA, "\x03" + str("init/") + u64(-1), request{opAdd, genA, []string{"init/"}, nil, -1}},
		{"A check", genA, "\x04" + strs("a", "b"), request{opCheck, genA, []string{"a", "b"}, nil, 0}},
		{"A wait", genA, "\x05" + strs("a"), request{opWait, genA, []string{"a"}, nil, 0}},
		{"A numkeys", genA, "\x06", request{opNumKeys, genA, nil, nil, 0}},
		{"A watch_key", genA, "\x07" + str("k"), request{opWatchKey, genA, []string{"k"}, nil, 0}},
		{"A delete_key", genA, "\x08" + str("k"), request{opDeleteKey, genA, []string{"k"}, nil, 0}},
		{"B set", genB, "\x01" + str("/k") + str("v"), request{opSet, genB, []string{"/k"}, v("v"), 0}},
		{"B compare_set", genB, "\x02" + str("/k") + str("o") + str("n"),
			request{opCompareSet, genB, []string{"/k"}, v("o", "n"), 0}},
		{"B get", genB, "\x03" + str("/k"), request{opGet, genB, []string{"/k"}, nil, 0}},
		{"B add", genB, "\x04" + str("/k") + u64(3), request{opAdd, genB, []string{"/k"}, nil, 3}},
		{"B check", genB, "\x05" + strs("a", "b"), request{opCheck, genB, []string{"a", "b"}, nil, 0}},
		{"B wait for nothing", genB, "\x06" + strs(), request{opWait, genB, nil, nil, 0}},
		{"B numkeys", genB, "\x07", request{opNumKeys, genB, nil, nil, 0}},
		{"B delete_key", genB, "\x08" + str("k"), request{opDeleteKey, genB, []string{"k"}, nil, 0}},
		{"B append", genB, "\x09" + str("k") + str("v"), request{opAppend, genB, []string{"k"}, v("v"), 0}},
		{"B multi_get", genB, "\x0a" + strs("a", "b"), request{opMultiGet, genB, []string{"a", "b"}, nil, 0}},
		{"B multi_set", genB, "\x0b" + u64(2) + str("a") + str("1") + str("b") + str("2"),
			request{opMultiSet, genB, []string{"a", "b"}, v("1", "2"), 0}},
		{"B cancel_wait", genB, "\x0c", request{opCancelWait, genB, nil, nil, 0}},
		{"B ping", genB, "\x0d\xff\xff\xff\xff", request{opPing, genB, nil, nil, 0xffffffff}},
		{"B queue_push", genB, "\x0e" + str("q") + str("v"), request{opQueuePush, genB, []string{"q"}, v("v"), 0}},
		{"B queue_pop", genB, "\x0f" + str("q"), request{opQueuePop, genB, []string{"q"}, nil, 0}},
		{"B queue_len", genB, "\x10" + str("q"), request{opQueueLen, genB, []string{"q"}, nil, 0}},
		{"B list_keys", genB, "\x11", request{opListKeys, genB, nil, nil, 0}},
		{"B barrier", genB, "\x12" + str("b") + u64(4), request{opBarrier, genB, []string{"b"}, nil, 4}},
		{"B key longer than the buffer", genB, "\x03" + str(strings.Repeat("k", 5000)),
			request{opGet, genB, []string{strings.Repeat("k", 5000)}, nil, 0}},
		{"B long value", genB, "\x01" + str("k") + str(strings.Repeat("v", 1<<20)),
			request{opSet, genB, []string{"k"}, v(strings.Repeat("v", 1<<20)), 0}},
	}
}

func (g generation) hello() string {
	if g == genB {
		return greeting
	}
	return ""
}

func TestWire(t *testing.T) {
	for _, tc := range wireCases() {
		t.Run(tc.name, func(t *testing.T) {
			wire := tc.gen.hello() + tc.wire
			for name, r := range map[string]io.Reader{
				"whole":  strings.NewReader(wire),
				"bytes":  iotest.OneByteReader(strings.NewReader(wire)),
				"at EOF": iotest.DataErrReader(strings.NewReader(wire)),
			} {
				got, err := decodeAll(r, Config{})
				require.Equal(t, io.EOF, err, name)
				require.Equal(t, []request{tc.want}, got, name)
			}
			require.Equal(t, tc.wire, string(tc.want.appendTo(nil)))
			for i := len(wire) - 1; i > 0; i = i * 4 / 5 {
				_, err := decodeAll(strings.NewReader(wire[:i]), Config{})
				if i == len(tc.gen.hello()) {
					require.Equal(t, io.EOF, err)
					continue
				}
				require.Equal(t, io.ErrUnexpectedEOF, err, "cut after %d bytes", i)
			}
		})
	}
}

func TestWireLimits(t *testing.T) {
	cfg := Config{MaxKeyBytes: 4, MaxValueBytes: 8, MaxKeysPerRequest: 3, MaxRequestBytes: 30}
	for _, tc := range []struct {
		name, wire string
		want       *limitError // nil: within the limits
	}{
		{"key", "\x03" + str("four"), nil},
		{"long key", "\x03" + str("kkkkk"), &limitError{"bytes in one key", 5, 4}},
		{"announced key", "\x03" + u64(-1), &limitError{"bytes in one key", 1<<64 - 1, 4}},
		{"value", "\x01" + str("k") + str("12345678"), nil},
		{"long value", "\x01" + str("k") + str("123456789"), &limitError{"bytes in one value", 9, 8}},
		{"keys", "\x05" + strs("", "", ""), nil},
		{"many keys", "\x05" + strs("", "", "", ""), &limitError{"keys in one request", 4, 3}},
		{"negative count of pairs", "\x0b" + u64(-1), &limitError{"keys in one request", 1<<64 - 1, 3}},
		{"request", "\x05" + strs("123", "123", ""), nil},
		{"long request", "\x05" + strs("123", "123", "1"), &limitError{"bytes in one request", 31, 30}},
		{"requests in sequence", strings.Repeat("\x01"+str("k")+str("12345678"), 3), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := decodeAll(strings.NewReader(greeting+tc.wire), cfg)
			if tc.want == nil {
				require.Equal(t, io.EOF, err)
				return
			}
			var got *limitError
			require.ErrorAs(t, err, &got)
			require.Equal(t, tc.want, got)
			require.Contains(t, err.Error(), tc.want.What)
		})
	}
}

// TestWireAllocation announces the greatest values that are allowed, without sending them.
func TestWireAllocation(t *testing.T) {
	for name, wire := range map[string]string{
		"value": greeting + "\x01" + str("k") + u64(64<<20) + "v",
		"keys":  greeting + "\x06" + u64(128<<10) + u64(8<<10) + "k",
		"pairs": greeting + "\x0b" + u64(128<<10) + str("k") + u64(64<<20) + "v",
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := decodeAll(strings.NewReader(wire), Config{})
			runtime.ReadMemStats(&after)
			require.Equal(t, io.ErrUnexpectedEOF, err)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(64<<10))
		})
	}
}

func FuzzDecode(f *testing.F) {
	for _, tc := range wireCases() {
		if len(tc.wire) < 1000 {
			f.Add([]byte(tc.gen.hello() + tc.wire))
		}
	}
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte(greeting + "\x06" + u64(-1)))
	cfg := Config{MaxKeyBytes: 100, MaxValueBytes: 1000, MaxKeysPerRequest: 10, MaxRequestBytes: 2000}
	f.Fuzz(func(t *testing.T, data []byte) {
		reqs, err := decodeAll(bytes.NewReader(data), cfg)
		slow, slowErr := decodeAll(iotest.OneByteReader(bytes.NewReader(data)), cfg)
		require.Equal(t, reqs, slow, "segmentation must not matter")
		require.Equal(t, err, slowErr)
		var again []byte
		if bytes.HasPrefix(data, []byte(greeting)) {
			again = append(again, greeting...)
		}
		for _, r := range reqs {
			again = r.appendTo(again)
		}
		if len(reqs) > 0 {
			require.True(t, bytes.HasPrefix(data, again), "the encoder must undo the decoder")
			require.True(t, err != io.EOF || len(again) == len(data), "the end must be between two requests")
		}
		var limit *limitError
		require.True(t, err == io.EOF || err == io.ErrUnexpectedEOF ||
			errors.As(err, &limit) || errors.Is(err, errUnknownQuery), "%v", err)
	})
}

// number is o as gen writes it; ok is false for a query that gen does not have.
func (o op) number(gen generation) (n byte, ok bool) {
	switch {
	case gen == genB:
		return byte(o), o <= opBarrier
	case o == opWatchKey:
		return 7, true
	case o == opDeleteKey:
		return 8, true
	default:
		return byte(o) - 1, o >= opSet && o <= opNumKeys
	}
}

// appendTo appends the wire form of r to b.
func (r request) appendTo(b []byte) []byte {
	n, _ := r.op.number(r.gen)
	b = append(b, n)
	switch r.op {
	case opCheck, opWait, opMultiGet, opMultiSet:
		b = binary.LittleEndian.AppendUint64(b, uint64(len(r.keys)))
	}
	for i, k := range r.keys {
		b = appendString(b, k)
		if r.op == opMultiSet {
			b = appendString(b, r.values[i])
		}
	}
	switch r.op {
	case opSet, opAppend, opQueuePush, opCompareSet:
		for _, v := range r.values {
			b = appendString(b, v)
		}
	case opAdd, opBarrier:
		b = binary.LittleEndian.AppendUint64(b, uint64(r.num))
	case opPing:
		b = binary.LittleEndian.AppendUint32(b, uint32(r.num))
	}
	return b
}

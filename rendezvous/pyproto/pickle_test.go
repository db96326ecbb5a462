package pyproto

import (
	"bytes"
	"encoding/binary"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/pickle"
)

// classX is a class X of a module m, and an object of it without a state.
const (
	classX  = "cm\nX\n"
	objectX = classX + ")\x81"
)

func TestEveryOpcode(t *testing.T) {
	x := func(pairs ...Pair) *Message {
		return &Message{Class: pickle.Class{Module: "m", Name: "X"}, State: Dict{Pairs: pairs}}
	}
	list := func(items ...any) *List { return &List{Items: items} }
	dict := func(pairs ...Pair) *Dict { return &Dict{Pairs: pairs} }
	for _, c := range []struct {
		name, in string
		want     any
	}{
		{"none", "N", nil},
		{"true", "\x88", true},
		{"false", "\x89", false},
		{"protocol 2", "\x80\x02N", nil},
		{"protocol 5", "\x80\x05N", nil},
		{"a frame", "\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00N", nil},
		{"frames in a row", "\x95\x01\x00\x00\x00\x00\x00\x00\x00\x95\x02\x00\x00\x00\x00\x00\x00\x00N", nil},
		{"BININT 0", "J\x00\x00\x00\x00", int64(0)},
		{"BININT, the highest", "J\xff\xff\xff\x7f", int64(math.MaxInt32)},
		{"BININT, the lowest", "J\x00\x00\x00\x80", int64(math.MinInt32)},
		{"BININT1", "K\xff", int64(255)},
		{"BININT2", "M\xff\xfe", int64(0xfeff)},
		{"LONG1 of no bytes", "\x8a\x00", int64(0)},
		{"LONG1 of 1", "\x8a\x01\x7f", int64(127)},
		{"LONG1 of 1, negative", "\x8a\x01\x80", int64(-128)},
		{"LONG1 of 2", "\x8a\x02\x80\x00", int64(128)},
		{"LONG1 of 2, negative", "\x8a\x02\x7f\xff", int64(-129)},
		{"LONG1 of 3", "\x8a\x03\x00\x00\x01", int64(65536)},
		{"LONG1 of 3, negative", "\x8a\x03\x00\x00\x80", int64(-1 << 23)},
		{"LONG1 of 4", "\x8a\x04\x00\x00\x00\x40", int64(1 << 30)},
		{"LONG1 of 4, negative", "\x8a\x04\x00\x00\x00\x80", int64(math.MinInt32)},
		{"LONG1 of 5", "\x8a\x05\x00\x00\x00\x80\x00", int64(1 << 31)},
		{"LONG1 of 5, negative", "\x8a\x05\x00\x00\x00\x00\xff", int64(-1 << 32)},
		{"LONG1 of 6", "\x8a\x06\x00\x00\x00\x00\x00\x01", int64(1 << 40)},
		{"LONG1 of 6, negative", "\x8a\x06\x00\x00\x00\x00\x00\x80", int64(-1 << 47)},
		{"LONG1 of 7", "\x8a\x07\x00\x00\x00\x00\x00\x00\x01", int64(1 << 48)},
		{"LONG1 of 7, negative", "\x8a\x07\xff\xff\xff\xff\xff\xff\xff", int64(-1)},
		{"LONG1 of 8", "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", int64(math.MaxInt64)},
		{"LONG1 of 8, negative", "\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80", int64(math.MinInt64)},
		{"BINFLOAT", "G\x3f\xf8\x00\x00\x00\x00\x00\x00", 1.5},
		{"BINFLOAT, infinite", "G\xff\xf0\x00\x00\x00\x00\x00\x00", math.Inf(-1)},
		{"SHORT_BINUNICODE", "\x8c\x02\xc3\xa4", "ä"},
		{"SHORT_BINUNICODE, empty", "\x8c\x00", ""},
		{"BINUNICODE", "X\x01\x00\x00\x00a", "a"},
		{"BINUNICODE8", "\x8d\x01\x00\x00\x00\x00\x00\x00\x00a", "a"},
		{"half a surrogate, as in names of files", "\x8c\x04a\xed\xb3\xbf", "a�"},
		{"SHORT_BINBYTES", "C\x01\xff", []byte{0xff}},
		{"SHORT_BINBYTES, empty", "C\x00", []byte{}},
		{"BINBYTES", "B\x01\x00\x00\x00a", []byte("a")},
		{"BINBYTES8", "\x8e\x01\x00\x00\x00\x00\x00\x00\x00a", []byte("a")},
		{"EMPTY_TUPLE", ")", tuple{}},
		{"TUPLE1", "N\x85", tuple{nil}},
		{"TUPLE2", "NK\x01\x86", tuple{nil, int64(1)}},
		{"TUPLE3", "NK\x01K\x02\x87", tuple{nil, int64(1), int64(2)}},
		{"TUPLE", "(NK\x01K\x02\x88t", tuple{nil, int64(1), int64(2), true}},
		{"TUPLE of none", "(t", tuple{}},
		{"EMPTY_LIST", "]", list()},
		{"APPEND", "]Na", list(nil)},
		{"APPENDS", "](NK\x01eK\x02a", list(nil, int64(1), int64(2))},
		{"APPENDS of none", "](e", list()},
		{"lists in lists", "](]](NeaK\x01e", list(list(list(nil)), int64(1))},
		{"EMPTY_DICT", "}", dict()},
		{"SETITEM", "}K\x01Ns", dict(pair(int64(1), nil))},
		{"SETITEMS", "}(K\x01K\x02K\x00K\x03u", dict(pair(int64(1), int64(2)), pair(int64(0), int64(3)))},
		{"SETITEMS of none", "}(u", dict()},
		{"keys of every kind", "}(NN\x88N\x8c\x00NG\x00\x00\x00\x00\x00\x00\x00\x00Nu",
			dict(pair(nil, nil), pair(true, nil), pair("", nil), pair(0.0, nil))},
		{"GLOBAL and NEWOBJ", objectX, x()},
		{"STACK_GLOBAL", "\x8c\x01m\x8c\x01X\x93)\x81", x()},
		{"BUILD", objectX + "}\x8c\x01aK\x01sb", x(pair("a", int64(1)))},
		{"BUILD twice", objectX + "}\x8c\x01aK\x01sb}\x8c\x01aK\x02sb", x(pair("a", int64(1)), pair("a", int64(2)))},
		{"MEMOIZE and BINGET", "](\x8c\x01a\x94h\x00e", list("a", "a")},
		{"BINPUT and BINGET", "](\x8c\x01aq\x00h\x00e", list("a", "a")},
		{"LONG_BINPUT and LONG_BINGET", "](C\x01ar\x01\x00\x00\x00j\x01\x00\x00\x00e", list([]byte("a"), []byte("a"))},
		{"the last that was remembered", "](\x8c\x01aq\x00\x8c\x01bq\x00h\x00e", list("a", "b", "b")},
		{"an empty tuple again", "()\x94h\x00t", tuple{tuple{}, tuple{}}},
		{"a class again", "(" + classX + "\x94)\x81h\x00)\x81t", tuple{x(), x()}},
		{"what comes behind STOP", "N.garbage", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := []byte(c.in + ".")
			v, err := decode(in)
			require.NoError(t, err)
			require.Equal(t, c.want, v)
			end := bytes.IndexByte(in, '.') // none of them holds another
			for n := range in[:end] {
				_, err := decode(in[:n])
				require.ErrorIs(t, err, errPickle, "cut at byte %d", n)
			}
			require.LessOrEqual(t, len(pickle.Encode(v)), pickle.EncodedLen(v))
			again, err := decode(pickle.Encode(v))
			require.NoError(t, err)
			require.Equal(t, v, again)
		})
	}
}

func TestTruncatedMessages(t *testing.T) {
	for _, s := range samples(t) {
		for protocol, data := range s.pickles(t) {
			if protocol == "4" && s.version == "0.5.1" {
				continue // as in 0.6.1
			}
			for n := range data {
				if _, err := ReadMessage(data[:n]); err == nil {
					t.Fatalf("%s of %s is read though it is cut at byte %d", s.Class, s.version, n)
				}
			}
		}
	}
}

func TestRefusedPickles(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"nothing", "", "it ends too early"},
		{"STOP alone", ".", "it does not end with one value"},
		{"two values", "NN.", "it does not end with one value"},
		{"a mark at the end", "(.", "it does not end with one value"},
		{"a mark below", "(N.", "it does not end with one value"},
		{"protocol 0", "\x80\x00N.", "protocol 0"},
		{"protocol 6", "\x80\x06N.", "protocol 6"},
		{"INT of protocol 0", "I1\n.", "opcode 0x49"},
		{"REDUCE", classX + ")R.", "opcode 0x52"},
		{"INST", "(im\nX\n.", "opcode 0x69"},
		{"OBJ", "(" + classX + "o.", "opcode 0x6f"},
		{"NEWOBJ_EX", classX + ")}\x92.", "opcode 0x92"},
		{"a persistent id", "NQ.", "opcode 0x51"},
		{"an extension", "\x82\x01.", "opcode 0x82"},
		{"DUP", "N2.", "opcode 0x32"},
		{"POP", "NN0.", "opcode 0x30"},
		{"a set", "\x8f.", "opcode 0x8f"},
		{"a bytearray", "\x96\x00\x00\x00\x00\x00\x00\x00\x00.", "opcode 0x96"},
		{"a buffer elsewhere", "\x97.", "opcode 0x97"},
		{"2 to the 63", "\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00.", "more than 64 bits"},
		{"LONG4", "\x8b\x01\x00\x00\x00\x01.", "opcode 0x8b"},
		{"a class", classX + ".", "a class of which no object is made"},
		{"a class in a list", "]" + classX + "a.", "a class of which no object is made"},
		{"a class from the memo", classX + "\x94)\x81]h\x00ab.", "a state that belongs to no object"},
		{"a class as a state", objectX + "}\x8c\x01a" + classX + "sb.", "a class of which no object is made"},
		{"an object with arguments", classX + "N\x85\x81.", "an object with arguments"},
		{"an object of no class", "N)\x81.", "without a class"},
		{"a class without a name", "NN\x93.", "a class without a name"},
		{"a class with an empty name", "\x8c\x01m\x8c\x00\x93.", "is not the name"},
		{"opcodes in a name", "\x8c\x01m\x8c\x05X\n)R.\x93.", "is not the name"},
		{"a name in other letters", "\x8c\x01m\x8c\x02\xc3\xa4\x93.", "is not the name"},
		{"a long name", "cm\n" + strings.Repeat("X", 257) + "\n.", "is not the name"},
		{"a state that is a tuple", objectX + ")b.", "a state that belongs to no object"},
		{"a state of nothing", "N}b.", "a state that belongs to no object"},
		{"an item without a list", "Na.", "items without a list"},
		{"an item for a dict", "}Na.", "items without a list"},
		{"a pair for a list", "]NNs.", "pairs without a dict"},
		{"half a pair", "}(Nu.", "pairs without a dict"},
		{"items without a mark", "]Ne.", "a mark is missing"},
		{"a tuple without a mark", "Nt.", "a mark is missing"},
		{"items for a mark", "((Ne.", "items without a list"},
		{"a mark as an item", "](\x85.", "behind a mark"},
		{"too few for a tuple", "N\x86.", "a value is missing"},
		{"a list as a key", "}]Ns.", "as the key of a dict"},
		{"bytes as a key", "}C\x00Ns.", "as the key of a dict"},
		{"a tuple as a key", "})Ns.", "as the key of a dict"},
		{"an object as a key", "}" + objectX + "Ns.", "as the key of a dict"},
		{"nothing to remember", "\x94N.", "nothing to remember"},
		{"a mark to remember", "(\x94N.", "nothing to remember"},
		{"an entry that is not there", "h\x00.", "has no entry 0"},
		{"an entry that was left out", "\x8c\x00q\x01h\x00.", "has no entry 0"},
		{"a list again", "](]\x94h\x00e.", "a container that is in two places"},
		{"a list in itself", "]\x94h\x00a.", "a container that is in two places"},
		{"a dict again", "](}q\x00h\x00e.", "a container that is in two places"},
		{"a tuple again", "](N\x85\x94h\x00e.", "a container that is in two places"},
		{"an object again", "](" + objectX + "\x94j\x00\x00\x00\x00e.", "a container that is in two places"},
		{"a jump in the memo", "\x8c\x00r\xff\xff\xff\xff.", "comes too early"},
		{"a far jump in the memo", "\x8c\x00r\xff\xff\x00\x00.", "comes too early"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v, err := decode([]byte(c.in))
			require.ErrorIs(t, err, errPickle)
			require.ErrorContains(t, err, c.want)
			require.Nil(t, v)
		})
	}
}

func TestMessagesAreOfDLRover(t *testing.T) {
	for in, want := range map[string]string{
		objectX + ".":             "a m.X where",
		"N.":                      "a <nil> where",
		"cbuiltins\neval\n)\x81.": "a builtins.eval where",
		"cdlrover.python.common.constants\nX\n)\x81.": "a dlrover.python.common.constants.X where",
	} {
		_, err := ReadMessage([]byte(in))
		require.ErrorIs(t, err, errPickle)
		require.ErrorContains(t, err, want)
	}
}

// heap is the most memory, in bytes, that f allocates.
func heap(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestBombs(t *testing.T) {
	u32 := func(n uint32) string { return string(binary.LittleEndian.AppendUint32(nil, n)) }
	u64 := func(n uint64) string { return string(binary.LittleEndian.AppendUint64(nil, n)) }
	const million = 1_000_000
	for _, c := range []struct {
		name, in, want string
		most           uint64
	}{
		{"tuples in each other", ")" + strings.Repeat("\x85", million) + ".", "containers in each other", 1 << 20},
		{"tuples with marks", strings.Repeat("(", million) + strings.Repeat("t", million) + ".",
			"containers in each other", 200 << 20},
		{"lists in each other", strings.Repeat("]", million) + strings.Repeat("a", million-1) + ".",
			"containers in each other", 300 << 20},
		{"dicts in each other", strings.Repeat("}N", 200) + "}" + strings.Repeat("s", 200) + ".",
			"containers in each other", 1 << 20},
		{"objects in each other", strings.Repeat(objectX+"}N", 200) + "N" + strings.Repeat("sb", 200) + ".",
			"containers in each other", 1 << 20},
		{"a long text that is not there", "X" + u32(math.MaxUint32), "it ends too early", 64 << 10},
		{"a longer one", "\x8d" + u64(math.MaxUint64), "it ends too early", 64 << 10},
		{"one whose length is negative", "\x8e" + u64(1<<63), "it ends too early", 64 << 10},
		{"a long frame", "\x95" + u64(math.MaxUint64), "it ends too early", 64 << 10},
		{"a memo of many entries", "\x8c\x00" + "r" + u32(math.MaxUint32), "comes too early", 64 << 10},
		{"one with gaps", strings.Repeat("Nr"+u32(100), 3), "comes too early", 64 << 10},
		{"many values", strings.Repeat("]", maxMessage), "more than 4194304 values", 800 << 20},
		{"a text from the memo, often", "](X" + u32(million) + strings.Repeat("a", million) + "\x94" +
			strings.Repeat("h\x00", million) + "e.", "repeated too often", 16 << 20},
		{"a name without an end", "c" + strings.Repeat("m", million), "it ends too early", 64 << 10},
		{"more than is read", strings.Repeat("N", maxMessage+1), "at most 16777216 are read", 64 << 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := []byte(c.in)
			require.Less(t, heap(func() {
				_, err := decode(in)
				require.ErrorIs(t, err, errPickle)
				require.ErrorContains(t, err, c.want)
			}), c.most)
		})
	}
}

// As deep as is read, Encode writes it too; every container by itself counts, and objects with their state as one.
func TestDepthThatIsRead(t *testing.T) {
	for _, c := range []struct{ begin, inner, end string }{
		{"", ")", "\x85"}, {"]", "]", "a"}, {"}N", "}", "s"}, {objectX + "}N", objectX, "sb"},
	} {
		in := strings.Repeat(c.begin, pickle.MaxDepth-1) + c.inner + strings.Repeat(c.end, pickle.MaxDepth-1) + "."
		v, err := decode([]byte(in))
		if c.inner == ")" { // an empty tuple is no depth
			in = strings.Replace(in, ")", ")\x85", 1)
			v, err = decode([]byte(in))
		}
		require.NoError(t, err)
		_, err = decode(pickle.Encode(v))
		require.NoError(t, err)
		_, err = decode([]byte(c.begin + in[:len(in)-1] + c.end + "."))
		require.ErrorContains(t, err, "containers in each other")
	}
}

func TestEncodePanicsForDefects(t *testing.T) {
	for _, v := range []any{uint(1), pickle.Class{Module: "m", Name: "X"}, []int{1}, &Message{}, Comm.New("a\nb"),
		&List{Items: []any{uint(1)}}} {
		require.Panics(t, func() { pickle.Encode(v) }, "%T", v)
	}
}

func TestAttributes(t *testing.T) {
	m, err := ReadMessage(pickle.Encode(Comm.New("X",
		Field{"s", "text"}, Field{"i", 3}, Field{"f", 2.75}, Field{"b", true}, Field{"none", nil},
		Field{"list", &List{Items: []any{1}}}, Field{"dict", &Dict{Pairs: []Pair{pair("k", 1), pair("k", 2)}}},
		Field{"object", Comm.New("Y")}, Field{"nan", math.NaN()}, Field{"inf", math.Inf(1)}, Field{"huge", -1e300},
		Field{"bytes", []byte("v")})))
	require.NoError(t, err)
	require.Equal(t, Comm, DialectOf(m))
	require.Equal(t, "text", m.Str("s"))
	require.Equal(t, "", m.Str("i"))
	require.Equal(t, []int{3, 2, 1, 0, 0, 0, 0, 0, 0}, []int{m.Int("i"), m.Int("f"), m.Int("b"), m.Int("none"),
		m.Int("s"), m.Int("missing"), m.Int("nan"), m.Int("inf"), m.Int("huge")})
	require.Equal(t, []float64{3, 2.75, 0}, []float64{m.Float("i"), m.Float("f"), m.Float("s")})
	require.Equal(t, []any{int64(1)}, m.List("list"))
	require.Equal(t, int64(2), m.Dict("dict").Get("k"))
	require.Nil(t, m.Dict("dict").Get("other"))
	require.Empty(t, m.Dict("list").Pairs)
	require.Nil(t, m.List("dict"))
	require.Equal(t, "Y", m.Object("object").Class.Name)
	require.Nil(t, m.Object("s"))
	require.Nil(t, m.Object("s").Get("anything"))
	require.Equal(t, "v", string(BytesOf(m.Get("bytes"))))
	require.Equal(t, "text", string(BytesOf(m.Get("s"))))
	require.Nil(t, BytesOf(m.Get("i")))
	require.Equal(t, 3, pickle.IntOf(m.Get("i")))
}

func FuzzDecode(f *testing.F) {
	for _, s := range samples(f) {
		if data := s.pickles(f)["4"]; len(data) < 400 {
			f.Add(data)
		}
	}
	f.Add([]byte(objectX + "}(\x8c\x01aG\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x01b](N)\x88eub."))
	f.Fuzz(func(t *testing.T, in []byte) {
		v, err := decode(in)
		if err != nil {
			require.ErrorIs(t, err, errPickle)
			return
		}
		out := pickle.Encode(v) // which compares what is not a number, too
		require.LessOrEqual(t, len(out), pickle.EncodedLen(v))
		again, err := decode(out)
		require.NoError(t, err)
		require.Equal(t, out, pickle.Encode(again))
	})
}

func benchmark(b *testing.B, m *Message) {
	data := pickle.Encode(m)
	b.Run("Decode", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ReadMessage(data); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Encode", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		b.ReportAllocs()
		for b.Loop() {
			pickle.Encode(m)
		}
	})
}

func BenchmarkWaitingNodeNumRequest(b *testing.B) {
	benchmark(b, Comm.New("WaitingNodeNumRequest",
		Field{"node_id", 0}, Field{"local_world_size", 0}, Field{"rdzv_name", "elastic-training"}))
}

func BenchmarkWorldOf10000Nodes(b *testing.B) {
	world := &Dict{}
	for i := range 10000 {
		world.Pairs = append(world.Pairs, pair(i, 8))
	}
	benchmark(b, Comm.New("RendezvousState",
		Field{"world", world}, Field{"waiting_num", 0}, Field{"round", 1}, Field{"group", 0}))
}

func pair(key, value any) Pair { return Pair{Key: key, Value: value} }

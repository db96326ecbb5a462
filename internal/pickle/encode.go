package pickle

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// Encode writes v, one of the values that Decode makes or an int, as a pickle of protocol 3. Every Python from 3.0 on
// reads it, and with it every version of DLRover. Invalid UTF-8 is replaced. A value of another type, and an invalid
// name of a class, are defects of the caller's, for which it panics.
func Encode(v any) []byte {
	return append(encode(append(make([]byte, 0, EncodedLen(v)), opProto, 3), v), opStop)
}

// EncodedLen is how many bytes Encode makes of v, or a few more: text that is mended counts as if all of it were.
func EncodedLen(v any) int { return len("..") + lenOf(v) + len(".") }

func lenOf(v any) int {
	const head = 5 // an opcode and a length
	switch v := v.(type) {
	case string:
		if !utf8.ValidString(v) {
			return head + len("\uFFFD")*len(v)
		}
		return head + len(v)
	case []byte:
		return head + len(v)
	case Tuple:
		return lenOfAll(v)
	case *List:
		return lenOfAll(v.Items)
	case *Dict:
		return lenOfPairs(v.Pairs)
	case *Object:
		return len("c\n\n)\x81b") + len(v.Class.Module) + len(v.Class.Name) + lenOfPairs(v.State.Pairs)
	}
	return len("\x8a\x08") + 8 // the longest of the rest: a number
}

func lenOfAll(items []any) (n int) {
	for _, v := range items {
		n += lenOf(v)
	}
	return n + len("](e")
}

func lenOfPairs(pairs []Pair) (n int) {
	for _, p := range pairs {
		n += lenOf(p.Key) + lenOf(p.Value)
	}
	return n + len("}(u")
}

func encode(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, opNone)
	case bool:
		if v {
			return append(b, opTrue)
		}
		return append(b, opFalse)
	case int:
		return encodeInt(b, int64(v))
	case int64:
		return encodeInt(b, v)
	case float64:
		return binary.BigEndian.AppendUint64(append(b, opBinFloat), math.Float64bits(v))
	case string:
		v = strings.ToValidUTF8(v, "\uFFFD") // Python would refuse the whole message
		return append(binary.LittleEndian.AppendUint32(append(b, opUnicode), uint32(len(v))), v...)
	case []byte:
		return append(binary.LittleEndian.AppendUint32(append(b, opBytes), uint32(len(v))), v...)
	case Tuple:
		return append(encodeAll(append(b, opMark), v), opTuple)
	case *List:
		return append(encodeAll(append(b, opEmptyList, opMark), v.Items), opAppends)
	case *Dict:
		return encodeDict(b, v.Pairs)
	case *Object:
		return encodeObject(b, v)
	}
	panic(fmt.Sprintf("pickle: a %T", v))
}

func encodeInt(b []byte, n int64) []byte {
	if n == int64(int32(n)) {
		return binary.LittleEndian.AppendUint32(append(b, opBinInt), uint32(n))
	}
	return binary.LittleEndian.AppendUint64(append(b, opLong1, 8), uint64(n))
}

func encodeAll(b []byte, items []any) []byte {
	for _, v := range items {
		b = encode(b, v)
	}
	return b
}

func encodeDict(b []byte, pairs []Pair) []byte {
	b = append(b, opEmptyDict, opMark)
	for _, p := range pairs {
		b = encode(encode(b, p.Key), p.Value)
	}
	return append(b, opSetItems)
}

func encodeObject(b []byte, o *Object) []byte {
	if !isName(o.Class.Module) || !isName(o.Class.Name) {
		panic(fmt.Sprintf("pickle: an object of the class %q of %q", o.Class.Name, o.Class.Module))
	}
	b = append(b, opGlobal)
	b = append(append(b, o.Class.Module...), '\n')
	b = append(append(b, o.Class.Name...), '\n', opEmptyTuple, opNewObj)
	if len(o.State.Pairs) == 0 {
		return b
	}
	return append(encodeDict(b, o.State.Pairs), opBuild)
}

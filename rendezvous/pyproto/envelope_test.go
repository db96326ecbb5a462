package pyproto

import (
	"encoding/hex"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// unknown has a field of every wire type that is not the envelope's, and a node of 7.
const unknown = "\x20\x01\x29\x01\x02\x03\x04\x05\x06\x07\x08\x35\x01\x02\x03\x04\x3a\x02xx\x08\x07"

func TestEnvelope(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     envelope
	}{
		{"nothing", "", envelope{}},
		{"all", "\x08\x03\x12\x06worker\x1a\x02N.", envelope{3, "worker", []byte("N.")}},
		{"another order", "\x1a\x02N.\x12\x06worker\x08\x03", envelope{3, "worker", []byte("N.")}},
		{"the last counts", "\x08\x03\x08\x04\x12\x01a\x12\x01b", envelope{NodeID: 4, NodeType: "b"}},
		{"-1", "\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", envelope{NodeID: -1}},
		{"-1 in 32 bits", "\x08\xff\xff\xff\xff\x0f", envelope{NodeID: -1}},
		{"the lowest", "\x08\x80\x80\x80\x80\xf8\xff\xff\xff\xff\x01", envelope{NodeID: math.MinInt32}},
		{"a number longer than needed", "\x08\x83\x80\x00", envelope{NodeID: 3}},
		{"unknown fields", unknown, envelope{NodeID: 7}},
		{"a high field", "\xf8\xff\xff\xff\x0f\x01\x08\x07", envelope{NodeID: 7}},
		{"empty bytes", "\x1a\x00", envelope{Data: []byte{}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, err := parseEnvelope([]byte(c.in))
			require.NoError(t, err)
			require.Equal(t, c.want, e)
			again, err := parseEnvelope(e.marshal())
			require.NoError(t, err)
			require.Equal(t, e.NodeID, again.NodeID)
			require.Equal(t, e.NodeType, again.NodeType)
			require.Equal(t, string(e.Data), string(again.Data))
		})
	}
}

// As protobuf of Python writes it.
func TestEnvelopeIsAsWritten(t *testing.T) {
	require.Equal(t, "08ffffffffffffffffff011206776f726b65721a024e2e",
		hex.EncodeToString(envelope{-1, "worker", []byte("N.")}.marshal()))
	require.Empty(t, envelope{}.marshal())
	require.Equal(t, "080112026e6f", hex.EncodeToString(response{true, "no"}.marshal()))
	require.Empty(t, response{}.marshal())
	r, err := parseResponse([]byte("\x08\x01\x12\x02no\x18\x07"))
	require.NoError(t, err)
	require.Equal(t, response{true, "no"}, r)
	e, err := parseEnvelope(envelope{NodeType: "cut \xe4\xbd"}.marshal())
	require.NoError(t, err)
	require.Equal(t, "cut �", e.NodeType)
}

func TestEnvelopesThatAreNone(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"field 0", "\x00\x01", "without a number"},
		{"a key without an end", "\x80", "without a number"},
		{"a key of more than 64 bits", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00", "without a number"},
		{"a number without an end", "\x08\xff", "does not end"},
		{"a number of more than 64 bits", "\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", "does not end"},
		{"a key alone", "\x08", "does not end"},
		{"too few bytes", "\x1a\x03ab", "ends too early"},
		{"far too few bytes", "\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "ends too early"},
		{"half of 64 bits", "\x29\x01\x02\x03\x04", "ends too early"},
		{"half of 32 bits", "\x35\x01\x02", "ends too early"},
		{"the begin of a group", "\x0b", "wire type 3"},
		{"the end of a group", "\x0c", "wire type 4"},
		{"wire type 7", "\x0f", "wire type 7"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := parseEnvelope([]byte(c.in))
			require.ErrorIs(t, err, errProto)
			require.ErrorContains(t, err, c.want)
			_, err = parseResponse([]byte(c.in))
			require.ErrorIs(t, err, errProto)
		})
	}
}

func FuzzEnvelope(f *testing.F) {
	for _, s := range samples(f) {
		if data := s.pickles(f)["4"]; len(data) < 200 {
			f.Add(envelope{7, "worker", data}.marshal())
		}
	}
	f.Add(envelope{-1, "worker", []byte("N.")}.marshal())
	f.Add(response{true, "why"}.marshal())
	f.Add([]byte(unknown))
	f.Fuzz(func(t *testing.T, in []byte) {
		_, problem := parseResponse(in)
		e, err := parseEnvelope(in)
		require.Equal(t, err == nil, problem == nil)
		if err != nil {
			require.ErrorIs(t, err, errProto)
			return
		}
		out := e.marshal()
		again, err := parseEnvelope(out)
		require.NoError(t, err)
		require.Equal(t, e.NodeID, again.NodeID)
		require.Equal(t, string(e.Data), string(again.Data))
		require.Equal(t, string(out), string(again.marshal()))
	})
}

package serve

import (
	"encoding/json"
	"math"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

func requirePrinted(t *testing.T, a netcheck.Assignment) {
	t.Helper()
	got, err := appendJSON([]byte("before"), &a)
	require.NoError(t, err)
	require.Equal(t, "before"+text(a), string(got))
}

// A field that is new, or in another place, makes this red.
func TestAppendJSON(t *testing.T) {
	var all netcheck.Assignment
	filled(reflect.ValueOf(&all).Elem())
	requirePrinted(t, all)
	requirePrinted(t, netcheck.Assignment{})
	requirePrinted(t, netcheck.Assignment{Duty: "<\"\\\x00\u2028é\xff>", Allow: []string{"&"}, Key: []byte{}})
	one := reflect.New(reflect.TypeOf(all)).Elem()
	for i := range one.NumField() {
		one.SetZero()
		one.Field(i).Set(reflect.ValueOf(all).Field(i))
		requirePrinted(t, one.Interface().(netcheck.Assignment))
	}
	peer := reflect.ValueOf(&netcheck.Assignment{}).Elem()
	for i := range peer.FieldByName("Peer").NumField() {
		peer.SetZero()
		peer.FieldByName("Peer").Field(i).Set(reflect.ValueOf(all.Peer).Field(i))
		requirePrinted(t, peer.Interface().(netcheck.Assignment))
	}
	_, err := appendJSON(nil, &netcheck.Assignment{Verdict: &netcheck.Verdict{Confidence: math.NaN()}})
	require.Error(t, err)
}

// FuzzAppendJSON: it writes what encoding/json writes.
func FuzzAppendJSON(f *testing.F) {
	var all netcheck.Assignment
	filled(reflect.ValueOf(&all).Elem())
	f.Add([]byte(text(all)))
	f.Add([]byte(`{"peer":{"nics":[],"addrs":[]},"verdict":{},"allow":["<"],"left":-1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var a netcheck.Assignment
		if json.Unmarshal(data, &a) == nil {
			requirePrinted(t, a)
		}
	})
}

func BenchmarkAppendJSON(b *testing.B) {
	a := netcheck.Assignment{Seq: 1 << 60, Duty: netcheck.Serve, Round: 2, Test: "2.1234", Key: make([]byte, 32),
		Left: 30e9, Peer: netcheck.Peer{ID: "0123456789abcdef", Name: "node-1234", Addr: "10.0.0.1",
			NICs: []netcheck.NIC{{Name: "eth0", Addr: "10.0.0.1", Mbps: 100000, MTU: 9000, CC: "cubic", Lo: 20000}}}}
	b.Run("appendJSON", func(b *testing.B) {
		b.ReportAllocs()
		var buf []byte
		for b.Loop() {
			buf, _ = appendJSON(buf[:0], &a)
		}
	})
	b.Run("json", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = json.Marshal(&a)
		}
	})
}

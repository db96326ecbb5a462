package serve

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

// filled sets every field of v, and of what it holds, to something.
func filled(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		filled(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		filled(v.Index(0))
		filled(v.Index(1))
	case reflect.Struct:
		for i := range v.NumField() {
			filled(v.Field(i))
		}
	case reflect.String:
		v.SetString("some words, [and]: {more}")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(-1.25e-7)
	case reflect.Int, reflect.Int64:
		v.SetInt(-42)
	case reflect.Uint64:
		v.SetUint(1<<64 - 1)
	}
}

// full is a request with all that there is, but what scan leaves to encoding/json.
func full() (q Request) {
	filled(reflect.ValueOf(&q).Elem())
	q.Arrive.Findings, q.Report.Torch, q.Report.Findings = nil, nil, nil
	return q
}

// TestScanReadsAll: a field that is new, or in another place, makes scan useless, and this red.
func TestScanReadsAll(t *testing.T) {
	for name, q := range map[string]Request{
		"all fields": full(),
		"none":       {},
		"a report":   reports("a", netcheck.Assignment{Test: "t", Seq: 7}, netcheck.Stalled),
	} {
		got, ok := scan([]byte(text(q)))
		require.True(t, ok, name)
		require.Equal(t, q, got, name)
		got, ok = scan([]byte(text(q)), q.Visit, "", q.ID)
		require.True(t, ok, name)
		require.Equal(t, q, got, name)
	}
}

func TestScanLeavesTheRest(t *testing.T) {
	for name, in := range map[string]string{
		"nothing":         ``,
		"no object":       `[]`,
		"spaces":          `{"id": "a"}`,
		"another order":   `{"visit":"v","id":"a"}`,
		"a field twice":   `{"id":"a","id":"b"}`,
		"an unknown one":  `{"id":"a","admin":true}`,
		"another case":    `{"ID":"a"}`,
		"null":            `{"id":null}`,
		"an escape":       `{"id":"\u0061"}`,
		"no ASCII":        `{"id":"é"}`,
		"a control":       "{\"id\":\"\x01\"}",
		"no end":          `{"id":"a"`,
		"no text's end":   `{"id":"a`,
		"more":            `{"id":"a"}{}`,
		"a comma more":    `{"id":"a",}`,
		"no comma":        `{"id":"a""visit":"v"}`,
		"findings":        `{"id":"a","arrive":{"findings":[]}}`,
		"PyTorch":         `{"id":"a","report":{"torch":{}}}`,
		"no number":       `{"seq":x}`,
		"01":              `{"seq":01}`,
		"-1 of unsigned":  `{"seq":-1}`,
		"1.5 of integers": `{"arrive":{"gpus":1.5}}`,
		"1e400":           `{"report":{"flows":[{"mbps":1e400}]}}`,
		"1.":              `{"report":{"flows":[{"mbps":1.}]}}`,
		".5":              `{"report":{"flows":[{"mbps":.5}]}}`,
		"1e":              `{"report":{"flows":[{"mbps":1e}]}}`,
		"+1":              `{"report":{"flows":[{"mbps":+1}]}}`,
		"infinity":        `{"report":{"flows":[{"mbps":Inf}]}}`,
		"no truth":        `{"leave":True}`,
		"half a list":     `{"ready":{"addrs":["a"`,
		"a list's comma":  `{"ready":{"addrs":["a",]}}`,
	} {
		_, ok := scan([]byte(in))
		require.False(t, ok, name)
	}
}

// FuzzScan: what scan understands it understands as encoding/json does.
func FuzzScan(f *testing.F) {
	f.Add([]byte(text(full())))
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"seq":10,"report":{"flows":[{"mbps":-0.5e+3,"streams":[0,1E2],"segments":0}]},"leave":false}`))
	f.Add([]byte(`{"arrive":{"nics":[]},"ready":{"addrs":[]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, ok := scan(data)
		if !ok {
			return
		}
		want, err := decodeAny(data)
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

func BenchmarkScan(b *testing.B) {
	data := []byte(text(Request{ID: "0123456789abcdef", Visit: "ABCDEFGHIJKLMNOPQRSTUVWXYZ", Seq: 1 << 60,
		Report: &netcheck.Result{Test: "t12", Flows: []netcheck.Flow{{
			NIC: "eth0", Mbps: 91234.567891, Low: 88234.12345, Mid: 91234.567891, Segments: 1_000_000, Retrans: 1e-6,
			Streams: []float64{22808.64197275, 22808.64197275, 22808.64197275, 22808.64197275}, CC: "cubic",
			P50: 20, P99: 45, P999: 80, MTU: 9000,
		}}}}))
	for name, f := range map[string]func([]byte) (Request, error){
		"scan": func(b []byte) (Request, error) { return decode(b) }, "json": decodeAny,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, _ = f(data)
			}
		})
	}
}

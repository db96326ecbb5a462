package hang

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// anything fills v with values that are not zero, or now and then with some that are.
func anything(rng *rand.Rand, v reflect.Value, zeros bool) {
	if zeros && rng.IntN(4) == 0 {
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		anything(rng, v.Elem(), zeros)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).Tag.Get("json") != "-" { // else it stays on its node
				anything(rng, v.Field(i), zeros)
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1+rng.IntN(3), 3))
		for i := range v.Len() {
			anything(rng, v.Index(i), zeros)
		}
	case reflect.String:
		v.SetString(strings.Repeat("é\x00", 1+rng.IntN(100)))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(rng.Uint64()>>rng.IntN(63)) | 1)
	case reflect.Uint8, reflect.Uint64:
		v.SetUint(rng.Uint64()>>rng.IntN(63)&(1<<v.Type().Bits()-1) | 1)
	default:
		panic(v.Kind())
	}
}

// What is packed comes out as it was: no field of Evidence is forgotten, whatever its neighbours have.
func TestPackedEvidence(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var want []Evidence
		for range rng.IntN(4) {
			var e Evidence
			anything(rng, reflect.ValueOf(&e).Elem(), seed%3 > 0)
			e.Node, e.GroupRank = "gpu-07", 7
			want = append(want, e)
		}
		p := pack(slices.Clone(want))
		require.Equal(t, want, p.unpack("gpu-07", 7), "seed %d", seed)
		require.Equal(t, len(want) == 0, p.empty())
	}
}

// Only what is the same for several workers is kept once.
func TestPackedEvidenceShares(t *testing.T) {
	groups, stacks := []Group{{ID: 1}}, &Stacks{}
	es := []Evidence{{Groups: groups, Stacks: stacks}, {Groups: groups, Stacks: stacks}, {Groups: []Group{{ID: 2}},
		Stacks: stacks}, {Groups: groups}, {}}
	p := pack(slices.Clone(es))
	require.Len(t, p.shared, 4)
	require.Equal(t, es, p.unpack("", 0))
}

// Evidence of many workers that do the same takes little.
func TestPackedEvidenceIsSmall(t *testing.T) {
	s := crowd(1, 0)
	for i := range s.ev {
		last := s.ev[i].Samples[2].Page
		for k := range 32 {
			last.StepTimes = append(last.StepTimes, last.LastStep-50_123_457*time.Duration(32-k))
		}
	}
	size := 0
	for i := range s.ev {
		size += s.ev[i].Size()
	}
	t.Logf("%d bytes of %d", pack(s.ev).size(), size)
	require.Less(t, pack(s.ev).size(), size/10)
}

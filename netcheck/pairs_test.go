package netcheck

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Only tests whose ends both reach others, and are at no fault, tell about the fabric.
func TestTestsAmongGoodNodes(t *testing.T) {
	of := func(records ...record) *member { return &member{n: &node{}, records: records} }
	good, fine, unproven := of(record{passed: true}), of(record{passed: true}), of(record{})
	slow, bad := of(record{passed: true}, record{blamed: true}), of(record{passed: true, blamed: true})
	j := &judge{}
	for _, ends := range [][2]*member{{good, fine}, {fine, good}, {good, slow}, {slow, good}, {slow, slow}, {good, bad},
		{bad, good}, {bad, slow}, {good, unproven}, {unproven, good}, {unproven, unproven}} {
		j.history.ended = append(j.history.ended, &test{ends: ends, reach: fail})
	}
	j.history.ended = append(j.history.ended, &test{ends: [2]*member{good, fine}, reach: pass},
		&test{ends: [2]*member{good, fine}, reach: fail, class: [2]Class{OK, Silent}},
		&test{ends: [2]*member{good, fine}, reach: fail, class: [2]Class{Silent, OK}})
	failed, all := j.amongGood()
	require.Equal(t, 2, failed)
	require.Equal(t, 5, all)
}

// The class of a verdict is the one of most failures, but for an MTU that is too small: it explains the others.
func TestWhatTestsFailWith(t *testing.T) {
	m := &member{n: &node{}}
	for _, c := range []struct {
		classes []Class
		want    Class
		partner string
	}{
		{nil, OK, ""},
		{[]Class{Refused, Reset, Reset, Stalled}, Reset, "2"},
		{[]Class{Reset, Refused}, Refused, "1"},
		{[]Class{Reset, MTU, Reset, Reset}, MTU, "1"},
		{[]Class{OK, Reset, OK, OK}, Reset, "1"},
	} {
		m.tests = nil
		for i, class := range c.classes {
			x := &test{ends: [2]*member{m, {n: &node{Node: Node{Name: string(rune('0' + i))}}}}, class: [2]Class{class}}
			x.conclude()
			m.tests = append(m.tests, x)
		}
		class, partner, _ := m.failures()
		require.Equal(t, c.want, class, c.classes)
		require.Equal(t, c.partner, partner, c.classes)
	}
}

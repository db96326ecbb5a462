package rendezvous

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPlaceInGroups(t *testing.T) {
	full := Occupied{Nodes: 2}
	for name, c := range map[string]struct {
		groups []Occupied
		wish   int
		want   int // -1: it waits
	}{
		"the first of empty groups":                {[]Occupied{{}, {}}, -1, 0},
		"one group is filled before the next":      {[]Occupied{{}, {Nodes: 1}, {}}, -1, 1},
		"the first group that lacks a node":        {[]Occupied{full, {}, {}}, -1, 1},
		"all are complete":                         {[]Occupied{full, full}, -1, -1},
		"the wish":                                 {[]Occupied{{Nodes: 1}, {}, {}}, 2, 2},
		"the wish comes first":                     {[]Occupied{{}, {Nodes: 1}}, 0, 0},
		"the wish is complete":                     {[]Occupied{full, {}}, 0, 1},
		"a wish that is no group":                  {[]Occupied{full, {}}, 7, 1},
		"its own group, although others lack more": {[]Occupied{{}, {Nodes: 1, Gone: []string{"x", "me"}}}, 0, 1},
		"its own group, although others lack less": {[]Occupied{{Nodes: 1}, {Gone: []string{"me"}}}, -1, 1},
		"its own group is complete again":          {[]Occupied{{Nodes: 2, Gone: []string{"me"}}, {}}, -1, 1},
		"the one before it is not lost yet":        {[]Occupied{{}, {Nodes: 2, Suspect: []string{"me"}}}, -1, 1},
		"it was replaced already":                  {[]Occupied{{}, {Nodes: 3, Suspect: []string{"me"}}}, -1, 0},
		"another one is suspect":                   {[]Occupied{{Nodes: 2, Suspect: []string{"x"}}, {}}, -1, 1},
		"another suspect is not replaced":          {[]Occupied{{Nodes: 2, Suspect: []string{"x"}}, full}, -1, -1},
		"its own group is over":                    {[]Occupied{{Over: true, Gone: []string{"me"}}, {}}, 0, 1},
		"all that lack nodes are over":             {[]Occupied{{Over: true}, full}, 0, -1},
	} {
		t.Run(name, func(t *testing.T) {
			got, found := PlaceIn(c.groups, 2, "me", c.wish)
			require.Equal(t, c.want >= 0, found)
			if found {
				require.Equal(t, c.want, got)
			}
		})
	}
}

func TestGroupIsValid(t *testing.T) {
	p := Params{Min: 1, Max: 1, Group: Group{Of: "job", Index: 2, Count: 3, Min: 1}}
	require.NoError(t, p.Validate())
	p.Group.Index = 3
	require.ErrorContains(t, p.Validate(), "replica group 3 of 3, at least 1: need 2 to 256 groups")
	p.Group = Group{Count: 2, Min: 1}
	require.ErrorContains(t, p.Validate(), `replica group of run ""`)
	require.Equal(t, "job.g2", GroupRun("job", 2))
}

func TestGroupIsSharedByAllNodes(t *testing.T) {
	of := Params{Min: 1, Max: 1, Group: Group{Of: "job", Count: 3, Min: 1}}
	other := of
	other.Group.Min = 2
	require.ErrorContains(t, other.conflict(of), "--replica-groups=3, of which 2 are needed, but the run was opened with "+
		"--replica-groups=3, of which 1 are needed; use the same option on every node")
	require.NoError(t, of.conflict(of))
}

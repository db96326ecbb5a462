package page

import (
	"encoding/json"
	"fmt"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
)

// GroupsSize bounds the file that names the process groups of a page, in bytes.
const GroupsSize = 4 << 20

// ParseGroups returns the process groups of a page. They are in the file l<LOCAL_RANK>.groups of the same directory,
// a JSON list of Group with the meanings of the page's ids. It is replaced by a rename when groups are made or
// destroyed, before a page has their ids.
func ParseGroups(b []byte) ([]hang.Group, error) {
	if len(b) > GroupsSize {
		return nil, fmt.Errorf("process groups in %d bytes: at most %d are read", len(b), GroupsSize)
	}
	var groups []hang.Group
	if err := json.Unmarshal(b, &groups); err != nil {
		return nil, fmt.Errorf("process groups: %w", err)
	}
	if len(groups) > groupSlots {
		return nil, fmt.Errorf("%d process groups: a page has %d", len(groups), groupSlots)
	}
	seen := map[uint64]bool{0: true}
	for _, g := range groups {
		if seen[g.ID] {
			return nil, fmt.Errorf("process group %.40q: its id, %d, is 0 or another one's", g.Name, g.ID)
		}
		seen[g.ID] = true
		if _, err := rankset.Parse(g.Ranks); err != nil {
			return nil, fmt.Errorf("process group %.40q: %w", g.Name, err)
		}
	}
	return groups, nil
}

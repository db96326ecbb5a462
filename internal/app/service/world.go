package service

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"dlrover-run/rendezvous"
)

// rowsPerLine bounds a line of the log, in which a world of 10,000 nodes is a hundred lines.
const rowsPerLine = 100

// row is one node in the log of a seal.
type row struct {
	Rank  int    `json:"rank"`
	Node  string `json:"node"`
	Addr  string `json:"addr"`
	Slots int    `json:"slots"`
	Ports []int  `json:"ports,omitempty"`
}

// String is for logs that are text.
func (r row) String() string {
	s := fmt.Sprintf("%d=%s@%s*%d", r.Rank, r.Node, r.Addr, r.Slots)
	if len(r.Ports) > 0 {
		s += ":" + strings.Trim(strings.ReplaceAll(fmt.Sprint(r.Ports), " ", ","), "[]")
	}
	return s
}

// logWorld logs the nodes of a world that was sealed, by rank.
func logWorld(log *slog.Logger, run string, n rendezvous.Note) {
	for chunk := range slices.Chunk(n.Members, rowsPerLine) {
		rows := make([]row, len(chunk))
		for i, m := range chunk {
			rows[i] = row{m.GroupRank, m.Node, m.Addr, m.Slots, m.Ports}
		}
		log.Info("world", "run_id", run, "round", n.Round, "epoch", n.Epoch, "nodes", len(n.Members), "members", rows)
	}
}

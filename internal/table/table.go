// Package table writes all tables for people: aligned columns, two spaces apart, one line for each row.
package table

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"dlrover-run/internal/text"
)

// Table is a table on its way to a writer. Flush ends it.
type Table struct {
	out  io.Writer
	text *bytes.Buffer // as tabwriter lays it out
	w    *tabwriter.Writer
	end  string // of a row
}

// New begins a table, with a row of headings if any are given. Long text belongs into the last column.
func New(w io.Writer, headings ...string) Table {
	t := begin(w, 0, "")
	if len(headings) > 0 {
		t.Row(headings...)
	}
	return t
}

// Numbers begins a table with columns that are aligned on the right.
func Numbers(w io.Writer) Table { return begin(w, tabwriter.AlignRight, "\t") }

func begin(w io.Writer, flags uint, end string) Table {
	text := new(bytes.Buffer)
	return Table{w, text, tabwriter.NewWriter(text, 0, 0, 2, ' ', flags), end}
}

// Row writes cells. Characters that do not print are escaped, so that a row is one line.
func (t Table) Row(cells ...string) {
	for i, c := range cells {
		cells[i] = text.EscapeLine(c)
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t")+t.end)
}

// Flush writes the rows, without blanks at their ends.
func (t Table) Flush() error {
	_ = t.w.Flush() // a buffer takes all
	for line := range strings.Lines(t.text.String()) {
		if _, err := fmt.Fprintln(t.out, strings.TrimRight(line, " \n")); err != nil {
			return err
		}
	}
	return nil
}

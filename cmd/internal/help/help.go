// Package help prints the options of an urfave/cli application in the order of its
// flags, which is that of their use; urfave sorts by name.
package help

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/cmd/internal/console"
)

// Print writes name, usage line, description and options of app. arguments stands
// behind the program's name in the usage line.
func Print(w io.Writer, app *cli.App, arguments string) {
	fmt.Fprintf(w, "%s - %s\n\nusage: %s %s\n\n%s\n", app.Name, app.Usage, app.Name, arguments, app.Description)
	section, width := "none yet", widest
	if n, ok := console.Columns(w); ok {
		width = min(max(n, narrowest), widest)
	}
	for _, f := range app.Flags {
		if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
			continue
		}
		if s := f.(cli.CategorizableFlag).GetCategory(); s != section {
			section = s
			fmt.Fprintf(w, "\n%s:\n", section)
		}
		meta, text := cutMeta(f.(cli.DocGenerationFlag).GetUsage())
		fmt.Fprintf(w, "  %s%s\n%s", spellings(f.Names()), meta, wrap(text, width))
	}
}

// A line of a flag's text has as many columns as the terminal, within these bounds; widest where there is none. Longer
// words make it longer.
const narrowest, widest = 40, 100

// wrap indents text and breaks it into lines of at most width columns.
func wrap(text string, width int) string {
	const indent = "        "
	var b strings.Builder
	line := indent
	for _, word := range strings.Fields(text) {
		if len(line)+1+len(word) > width && line != indent {
			b.WriteString(line + "\n")
			line = indent
		}
		if line != indent {
			line += " "
		}
		line += word
	}
	return b.String() + line + "\n"
}

// cutMeta splits "`META`: text", urfave's way to name a flag's value.
func cutMeta(usage string) (meta, text string) {
	if rest, ok := strings.CutPrefix(usage, "`"); ok {
		if meta, text, ok = strings.Cut(rest, "`: "); ok {
			return " " + meta, text
		}
	}
	return "", usage
}

func spellings(names []string) string {
	var out []string
	for _, n := range slices.Backward(names) {
		out = append(out, dashed(n))
	}
	return strings.Join(out, ", ")
}

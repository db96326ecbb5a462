// Package help prints the options of an urfave/cli application in the order of its
// flags, which is that of their use; urfave sorts by name.
package help

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/console"
)

// Print writes name, usage line, description and options of app. arguments stands
// behind the program's name in the usage line.
func Print(w io.Writer, app *cli.App, arguments string) {
	printHead(w, app.Name, app.Usage, arguments, app.Description)
	printFlags(w, app.Flags)
}

// Printer takes the place of cli.HelpPrinter: it prints an application with commands, or one of its commands.
func Printer(w io.Writer, _ string, of any) {
	switch of := of.(type) {
	case *cli.App:
		printHead(w, of.Name, of.Usage, of.ArgsUsage, of.Description)
		printCommands(w, of.Commands)
		printFlags(w, of.Flags)
	case *cli.Command:
		printHead(w, of.HelpName, of.Usage, of.ArgsUsage, of.Description)
		printCommands(w, of.Subcommands)
		printFlags(w, of.Flags)
	}
}

func printHead(w io.Writer, name, usage, arguments, description string) {
	fmt.Fprintf(w, "%s - %s\n\nusage: %s\n", name, usage, strings.TrimRight(name+" "+arguments, " "))
	if description != "" {
		fmt.Fprintf(w, "\n%s\n", description)
	}
}

// printCommands writes a line for each command, those below others included, under the heading of its category.
func printCommands(w io.Writer, commands []*cli.Command) {
	lines := lines("", "Commands", commands)
	section, width := "none yet", 0
	for _, l := range lines {
		width = max(width, len(l.form))
	}
	for _, l := range lines {
		if l.section != section {
			section = l.section
			fmt.Fprintf(w, "\n%s:\n", section)
		}
		fmt.Fprintf(w, "  %-*s  %s\n", width, l.form, l.usage)
	}
}

// line is a line of the list of commands.
type line struct{ section, form, usage string }

func lines(above, section string, commands []*cli.Command) (all []line) {
	for _, c := range commands {
		in := cmp.Or(c.Category, section)
		if c.Subcommands != nil {
			all = append(all, lines(above+c.Name+" ", in, c.Subcommands)...)
			continue
		}
		all = append(all, line{in, strings.TrimRight(above+c.Name+" "+c.ArgsUsage, " "), c.Usage})
	}
	return all
}

// TLS are the options of TLS, which all programs have; serves: the program serves others.
func TLS(category string, serves bool) []cli.Flag {
	ca := "`PATH`: certificates of the authorities, in PEM, that sign the servers' (default: $DLROVER_TLS_CA)"
	if serves {
		ca = "`PATH`: certificates of the authorities, in PEM, that sign the other side's; launchers without such a " +
			"certificate are not served (default: $DLROVER_TLS_CA)"
	}
	return []cli.Flag{
		&cli.StringFlag{Name: "tls", Category: category,
			Usage: "`auto|off`: auto: connections are encrypted, with a key that is derived from the job token; off: " +
				"they are not (default: $DLROVER_TLS, else by --tls-cert or --tls-ca where they are given)"},
		&cli.StringFlag{Name: "tls-cert", Category: category,
			Usage: "`PATH`: certificate of this program, in PEM; it is read again after a change (default: $DLROVER_TLS_CERT)"},
		&cli.StringFlag{Name: "tls-key", Category: category,
			Usage: "`PATH`: private key of --tls-cert (default: $DLROVER_TLS_KEY)"},
		&cli.StringFlag{Name: "tls-ca", Category: category, Usage: ca},
	}
}

func printFlags(w io.Writer, flags []cli.Flag) {
	section, width := "none yet", widest
	if n, ok := console.Columns(w); ok {
		width = min(max(n, narrowest), widest)
	}
	for _, f := range flags {
		if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
			continue
		}
		if s := f.(cli.CategorizableFlag).GetCategory(); s != section {
			section = s
			fmt.Fprintf(w, "\n%s:\n", cmp.Or(section, "Options"))
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

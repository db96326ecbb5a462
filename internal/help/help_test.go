package help

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"
)

func TestPrint(t *testing.T) {
	long := strings.Repeat("word ", 30) + strings.Repeat("x", 120)
	app := &cli.App{Name: "prog", Usage: "does things", Description: "More about it.", Flags: []cli.Flag{
		&cli.StringFlag{Name: "zeta", Aliases: []string{"z"}, Category: "First", Usage: "`PATH`: where to"},
		&cli.BoolFlag{Name: "alpha", Category: "First", Usage: long},
		&cli.BoolFlag{Name: "hidden", Category: "First", Hidden: true, Usage: "not shown"},
		&cli.BoolFlag{Name: "help", Category: "Second", Usage: "this"},
	}}
	var out bytes.Buffer
	Print(&out, app, "[options]")
	indent := strings.Repeat(" ", 8)
	require.Equal(t, `prog - does things

usage: prog [options]

More about it.

First:
  -z, --zeta PATH
        where to
  --alpha
`+indent+strings.TrimSpace(strings.Repeat("word ", 18))+"\n"+indent+strings.TrimSpace(strings.Repeat("word ", 12))+"\n"+
		indent+strings.Repeat("x", 120)+`

Second:
  --help
        this
`, out.String())
}

// window writes to a buffer, and has the size of a terminal.
type window struct {
	bytes.Buffer
	terminal *os.File
}

func (w *window) Fd() uintptr { return w.terminal.Fd() }

func TestLinesFitTheTerminal(t *testing.T) {
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	defer terminal.Close()
	app := &cli.App{Name: "prog", Flags: []cli.Flag{
		&cli.BoolFlag{Name: "alpha", Category: "All", Usage: strings.Repeat("word ", 50)},
	}}
	for columns, widest := range map[uint16]int{0: 97, 1: 37, 40: 37, 41: 37, 42: 42, 80: 77, 100: 97, 300: 97} {
		require.NoError(t, unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}))
		w := &window{terminal: terminal}
		Print(w, app, "[options]")
		longest := 0
		for line := range strings.Lines(w.String()) {
			longest = max(longest, len(strings.TrimSuffix(line, "\n")))
		}
		require.Equal(t, widest, longest, "%d columns", columns)
	}
}
